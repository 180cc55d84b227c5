"""``zerotune schema``: the parameters of DeepSpeed, as JSON Schema."""

from __future__ import annotations

import argparse

from zerotune.cli import print_text
from zerotune.plan.schema import whole_schema


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001 - it has no options
    """Print the schema, and return the exit status."""
    print_text(whole_schema().rstrip("\n"))
    return 0
