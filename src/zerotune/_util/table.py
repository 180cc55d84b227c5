"""Reports as pages of lines and tables, which rich lays out as text; notebooks show the same text.

Text in a pipe is not wrapped unless the caller asks for a width, because a program may search it.
At a terminal, text is wrapped to the terminal's width, and findings are coloured unless
``NO_COLOR`` is set.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO

import attrs

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_RICH_STYLES: Final[Mapping[str, str]] = {
    "title": "bold",
    "error": "bold red",
    "warning": "yellow",
    "note": "cyan",
    "good": "green",
    "bad": "red",
    "pending": "cyan",
    "faint": "dim",
    "passed": "bold green",
    "failed": "bold red",
}
_PRINTED: Final = 100
"""Width in characters if the width of the output is not known."""
_UNBROKEN: Final = 10**6


class Block(Protocol):
    """Part of a page."""

    def layout(self) -> RenderableType:
        """Return an object that rich lays out as text."""


@attrs.frozen
class Line:
    """Paragraph, on one line if it fits."""

    text: str
    indent: int = attrs.field(default=0, kw_only=True)
    mark: str = attrs.field(default="", kw_only=True)
    """Prefix of the text; with a mark, only the mark is coloured."""
    style: str = attrs.field(default="", kw_only=True)
    """Meaning, which decides the colour: ``"error"``, ``"title"``, ``"good"`` …"""

    def layout(self) -> RenderableType:
        """Return the text; wrapped lines are indented past the mark."""
        from rich.table import Table as Grid
        from rich.text import Text

        style, lead = _RICH_STYLES.get(self.style, ""), self._lead
        if not lead:
            return Text(self.text, style)
        grid = Grid.grid()
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(lead, style), Text(self.text, "" if self.mark else style))
        return grid

    def unbroken(self) -> str:
        """Return the text of ``layout`` without wrapping."""
        lead = self._lead
        return f"{lead}{self.text}".replace("\n", "\n" + " " * len(lead)).rstrip()

    @property
    def _lead(self) -> str:
        return " " * self.indent + (f"{self.mark} " if self.mark else "")


Row = Sequence[str]


@attrs.frozen(kw_only=True)
class Table:
    """Rows of text in columns."""

    rows: tuple[Row, ...]
    head: tuple[str, ...] = ()
    """Headings of the columns."""
    align: str = ""
    """One letter per column, as in ``"lrr"``; ``"r"`` aligns a column to the right."""
    widths: tuple[int, ...] = ()
    """Minimum widths of the first columns in characters, so that several tables align."""
    gap: int = 2
    """Blanks between columns."""
    indent: int = 2
    style: Callable[[Row], str] = lambda _row: ""
    """Function that returns the meaning of a row for its colour; see ``Line.style``."""

    def layout(self) -> RenderableType:
        """Return columns as wide as their cells; if they do not fit, the widest are wrapped."""
        from rich.padding import Padding
        from rich.table import Table as Grid
        from rich.text import Text

        grid = Grid(
            box=None,
            show_header=bool(self.head),
            header_style=_RICH_STYLES["title"],
            pad_edge=False,
            padding=(0, self.gap, 0, 0),
        )
        for number in range(len(self.rows[0] if self.rows else self.head)):
            grid.add_column(
                Text(self.head[number] if self.head else ""),
                justify="right" if self.align[number : number + 1] == "r" else "left",
                min_width=self.widths[number] if number < len(self.widths) else None,
                overflow="fold",
            )
        for row in self.rows:
            grid.add_row(*map(Text, row), style=_RICH_STYLES.get(self.style(row), ""))
        return Padding(grid, (0, 0, 0, self.indent), expand=False)


@attrs.frozen(kw_only=True)
class Page:
    """Report with a title and blocks."""

    title: str = ""
    blocks: tuple[Block, ...] = ()

    def text(self, width: int | None = None) -> str:
        """Return text of at most ``width`` columns; ``None`` disables wrapping."""
        lines = [block for block in self.blocks if isinstance(block, Line)]
        if width is None and len(lines) == len(self.blocks):
            # Importing rich takes a fifth of the time of a small command.
            title = [self.title] if self.title else []
            return "\n".join((*title, *(line.unbroken() for line in lines))).rstrip("\n")
        from rich.console import Console

        written = io.StringIO()
        console = Console(
            file=written,
            width=width or _UNBROKEN,
            color_system=None,
            force_terminal=False,
            force_jupyter=False,
        )
        self._show(console)
        return "\n".join(line.rstrip() for line in written.getvalue().split("\n")).rstrip("\n")

    def print(self, stream: TextIO | None = None, *, width: int | None = None) -> None:
        """Write the report, wrapped and in colour if ``stream`` is a terminal.

        Args:
            stream: Output stream; standard output by default.
            width: Columns of a line if ``stream`` is not a terminal.
        """
        to = sys.stdout if stream is None else stream
        if not to.isatty():
            to.write(self.text(width) + "\n")
            return
        from rich.console import Console

        self._show(Console(file=to, force_jupyter=False))

    def _show(self, console: Console) -> None:
        title = [Line(self.title, style="title")] if self.title else []
        for block in (*title, *self.blocks):
            console.print(block.layout(), highlight=False, markup=False, emoji=False)


@singledispatch
def brief_of(value: object) -> str:
    """Return a summary of ``value`` in one line; the room that reports its class registers it."""
    raise NotImplementedError(type(value).__name__)


@singledispatch
def page_of(value: object) -> Page:
    """Return the report of ``value``; the room that reports its class registers it."""
    raise NotImplementedError(type(value).__name__)


class Readable:
    """Base class of values with a one-line ``repr`` and a report for ``print`` and notebooks."""

    __slots__ = ()

    def brief(self) -> str:
        """Return a summary in one line."""
        return brief_of(self)

    def page(self) -> Page:
        """Return the whole report."""
        return page_of(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.brief()}>"

    def __str__(self) -> str:
        return self.page().text(_PRINTED)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def plain_value(value: Any) -> Any:
    """Return ``value`` as JSON data; values that JSON does not support become their ``repr``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return repr(value)
