"""Markdown tables that stay tables whatever their cells hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

_MARKUP: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", **{mark: f"\\{mark}" for mark in "\\|*[]`"}}
)


class Code(str):
    """A cell to be shown as code."""

    __slots__ = ()


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: str = "") -> str:
    """A Markdown table.

    Args:
        header: Names of the columns.
        rows: As many cells each as ``header`` has; ``Code`` cells are shown as code.
        numbers: One letter a column: ``"r"`` aligns it to the right (``"lrr"``).
    """
    sides = numbers.ljust(len(header), "l")
    rule = ["---:" if side == "r" else "---" for side in sides]
    lines = [[cell(text) for text in header], rule, *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """``text`` on one line, nothing in it markup."""
    plain = " ".join(text.split())
    if not isinstance(text, Code) or not plain:
        return plain.translate(_MARKUP)
    # A backtick span can hold neither a pipe nor a backtick inside a table.
    if any(mark in plain for mark in "|`\\"):
        return f"<code>{plain.translate(_MARKUP)}</code>"
    return f"`{plain}`"
