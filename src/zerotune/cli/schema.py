"""``zerotune schema``: the parameters of DeepSpeed, as JSON Schema."""

from __future__ import annotations

import argparse
import sys

from zerotune.cli import tell
from zerotune.plan.schema import whole_schema
from zerotune.plan.write import write_whole


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write to a file instead of standard output"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the schema, and return the exit status."""
    text = whole_schema()
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    write_whole(arguments.output, text.encode())
    tell(f"wrote {arguments.output}")
    return 0
