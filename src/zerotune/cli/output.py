"""What every command prints with: reports, data, and what is said beside them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotune._util.table import Page


def print_page(page: Page, *, width: int | None = None) -> None:
    """Print a report: as it is into a pipe, wrapped and in colour at a terminal.

    Args:
        page: The report.
        width: Letters of a line in a pipe; ``None``: lines stay whole.
    """
    page.print(sys.stdout, width=width)


def print_text(text: str) -> None:
    """Print a report, with one line break at its end."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def print_json(data: Any) -> None:
    """Print data as JSON."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def tell(text: str) -> None:
    """Say something that is not part of the report."""
    sys.stderr.write(f"zerotune: {text}\n")
