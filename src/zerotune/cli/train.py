"""``zerotune train``: a training run from a file."""

from __future__ import annotations

import argparse
import os

from zerotune.cli import print_json, print_text, tell
from zerotune.errors import InvalidValueError
from zerotune.plan.plan import Advice
from zerotune.training.run_file import RunFile, schema


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="YAML, JSON or TOML file of a run")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a setting, such as --set data.resolution=768; may be repeated",
    )
    parser.add_argument(
        "--check", action="store_true", help="read the file and its plan, and train nothing"
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the file's JSON Schema, for editors"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, or check the file, or print its schema."""
    if arguments.schema:
        print_json(schema())
        return 0
    if arguments.file is None:
        raise InvalidValueError("is missing", "write zerotune train run.yaml", "FILE")
    found = RunFile.load(arguments.file, overrides=arguments.set)
    first = os.environ.get("RANK", "0") == "0"
    for decision in found.decisions if first else ():
        tell(str(decision))
    # Loads torch, which --schema does not need.
    from zerotune.training.run import resolved, train

    if arguments.check:
        plan = found.chosen_plan()
        if isinstance(plan, Advice):
            print_text(plan.explain() + "\n")
        print_text(resolved(found, plan).explain())
        return 0
    report = train(found)
    if first:
        print_text(report.render())
    return 0
