"""Arguments that the commands about plans share."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final

from zerotune.errors import InvalidValueError

EMA_PLACES: Final = ("none", "host", "device", "nvme")


def positive(text: str) -> int:
    """A whole number of at least 1, for ``argparse``."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add what a step works on."""
    group = parser.add_argument_group("workload")
    group.add_argument("--world-size", type=positive, default=1, metavar="N", help="processes")
    group.add_argument(
        "--ema", choices=EMA_PLACES, default="none", help="where an EMA of the weights is kept"
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the forms of the report."""
    group = parser.add_argument_group("output")
    forms = group.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print JSON; sizes are in bytes")
    forms.add_argument("--markdown", action="store_true", help="print Markdown")
    group.add_argument("--chart", metavar="PNG", help="draw the memory per rank into this file")


def size_argument(text: str | None, name: str) -> int | None:
    """Bytes of a size given as the option ``name``; ``None`` when it was not given.

    Raises:
        InvalidValueError: Not a size.
    """
    # Not an argparse type: argparse would throw away the fix.
    from zerotune._util.text import parse_size

    return None if text is None else parse_size(text, key=name)


def refuse_unused(arguments: argparse.Namespace, names: tuple[str, ...], needed: str) -> None:
    """Refuse options that say nothing without another one.

    Raises:
        InvalidValueError: One of ``names`` was given.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            raise InvalidValueError(
                f"means nothing without {needed}", key=option, fix=f"add {needed}, or leave it out"
            )


def print_text(text: str) -> None:
    """Print a report, with one line break at its end."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def print_json(data: Any) -> None:
    """Print data as JSON."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def tell(text: str) -> None:
    """Say something that is not part of the report."""
    sys.stderr.write(f"zerotune: {text}\n")
