"""``zerotune plan``: what can be done with a plan without training. One module per command."""

from __future__ import annotations

import argparse
import importlib
from typing import Final, cast

from zerotune.cli import Command

NAME: Final = "plan"
SUMMARY: Final = "Check, convert and explain DeepSpeed configurations."

_COMMANDS: Final = (
    "zerotune.cli.plan_check",
    "zerotune.cli.plan_convert",
    "zerotune.cli.plan_explain",
    "zerotune.cli.plan_advise",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands below ``plan``."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        command = cast(Command, importlib.import_module(module))
        subparser = commands.add_parser(
            command.NAME, help=command.SUMMARY, description=command.SUMMARY
        )
        command.configure(subparser)
        subparser.set_defaults(run_plan=command.run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command that was named."""
    return int(arguments.run_plan(arguments))
