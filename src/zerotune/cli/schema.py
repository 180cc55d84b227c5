"""``zerotune schema``: the parameters of the installed DeepSpeed, as JSON Schema."""

from __future__ import annotations

import argparse
import sys

from zerotune.cli import tell

NAME = "schema"
SUMMARY = "Print all parameters of the installed DeepSpeed as JSON Schema for editors."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write to a file instead of standard output"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the schema, and return the exit status."""
    import json
    from contextlib import redirect_stdout

    from zerotune.backend.schema import plan_schema

    # DeepSpeed logs to standard output while it is imported.
    with redirect_stdout(sys.stderr):
        schema = plan_schema()
    text = json.dumps(schema, indent=2, allow_nan=False) + "\n"
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    from zerotune.plan.write import write_whole

    write_whole(arguments.output, text.encode())
    tell(f"wrote {arguments.output}")
    return 0
