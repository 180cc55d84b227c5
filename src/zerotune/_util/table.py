"""One table in four forms: text for terminals and pipes, Markdown, HTML for notebooks, and data.

What is told is a ``Page`` of blocks. A block gives lines; a line knows how it goes on below when it
does not fit. In a pipe nothing is broken that a program may look for; at a terminal lines end where
the terminal does, and findings have colours, which ``NO_COLOR`` takes away.
"""

from __future__ import annotations

import html
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TextIO

import attrs

from zerotune.errors import UNSET

_MARKUP: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", **{mark: f"\\{mark}" for mark in "\\|*[]`"}}
)
_STYLES: Final[Mapping[str, str]] = {
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
"""Letters of a line where the width of what shows it is not known."""
_NARROWEST: Final = 24
"""Columns that must be left to go on below the last cell; else a row goes on further left."""


@attrs.frozen
class Line:
    """A paragraph, one line where there is room."""

    text: str
    indent: int = attrs.field(default=0, kw_only=True)
    hang: int = attrs.field(default=2, kw_only=True)
    """Blanks more than ``indent`` before what goes on below."""
    mark: str = attrs.field(default="", kw_only=True)
    """What goes before the text and alone has the colour."""
    style: str = attrs.field(default="", kw_only=True)
    """A word for what it means: ``"error"``, ``"title"``, ``"good"`` …"""
    width: int | None = attrs.field(default=None, kw_only=True)
    """Letters it may have wherever it goes; ``None``: as many as there are."""

    def lines(self, width: int | None) -> Iterator[Line]:  # noqa: ARG002
        """Itself: a line is a block of one."""
        yield self

    def html(self) -> str:
        """As a paragraph of a notebook."""
        words = html.escape(self.text.strip())
        if not words:
            return ""
        mark = f"<b>{html.escape(self.mark)}</b> " if self.mark else ""
        return f'<p style="margin:0 0 0 {self.indent / 2}em">{mark}{_bold(words, self.style)}</p>'

    def wrapped(self, width: int | None) -> list[str]:
        """As lines of at most ``width`` letters; ``None``: where it is broken does not matter."""
        whole = " " * self.indent + (f"{self.mark} {self.text}" if self.mark else self.text)
        limits = [limit for limit in (width, self.width) if limit is not None]
        if not limits or not whole.strip():
            return [whole]
        most = min(limits)
        below = self.indent + self.hang
        if most - below < _NARROWEST:
            below = self.indent + 2
        # Blanks inside a line are columns; only what does not fit is broken.
        return textwrap.wrap(whole, most, subsequent_indent=" " * below, replace_whitespace=False)


class Block(Protocol):
    """A part of a page."""

    def lines(self, width: int | None) -> Iterable[Line]:
        """What it tells in text, for ``width`` letters where that is known."""

    def html(self) -> str:
        """What it tells in a notebook."""


def _shown(value: Any) -> str:
    return "" if value is None or value is UNSET else str(value)


@attrs.frozen(kw_only=True)
class Column:
    """What one cell of every row is, and how it is shown."""

    name: str
    """Its key in the data."""
    head: str = ""
    """What stands above it."""
    show: Callable[[Any], str] = _shown
    """Text of a value; a ``Code`` is shown as code."""
    right: bool = False
    """Whether it ends, instead of begins, where its column does."""
    width: int | None = None
    """Least letters in text; ``None``: those of its widest cell."""
    gap: int = 2
    """Blanks before it in text; the first column has the table's indentation."""


Row = Sequence[Any]
"""As many values as the table has columns; ``UNSET``: there is none."""


@attrs.frozen(kw_only=True)
class Table:
    """Rows of values, and how each column shows them."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""
    """Heading of its section in Markdown."""
    above: str = ""
    """What text says before the rows."""
    indent: int = 2
    sentences: tuple[Line, ...] = ()
    """What text tells in place of columns that would be too wide for it."""
    style: Callable[[Row], str] = lambda _row: ""
    """What a row means, for its colour; see ``Line.style``."""

    def lines(self, width: int | None) -> Iterator[Line]:  # noqa: ARG002
        """What text tells: sentences where there are any, else the rows in columns."""
        if self.above and self.rows:
            yield Line(self.above)
        if self.sentences:
            yield from self.sentences
            return
        heads = [column.head for column in self.columns]
        shown = self._shown()
        widths = [
            max(*map(len, cells), column.width or 0)
            for column, *cells in zip(self.columns, heads, *shown, strict=True)
        ]
        if any(heads) and shown:
            yield self._line(heads, widths, "title")
        for row, cells in zip(self.rows, shown, strict=True):
            yield self._line(cells, widths, self.style(row))

    def markdown(self) -> str:
        """The rows as a Markdown table."""
        numbers = "".join("lr"[column.right] for column in self.columns)
        return markdown_table(
            [column.head for column in self.columns], self._shown(), numbers=numbers
        )

    def html(self) -> str:
        """The rows as a table of a notebook."""
        if not self.rows:
            return ""
        above = Line(self.above or self.title, style="title").html()
        heads = [column.head for column in self.columns]
        sides = ["right" if column.right else "left" for column in self.columns]
        rows = [("th", heads)] if any(heads) else []
        rows += [("td", cells) for cells in self._shown()]
        lines = "".join(
            "<tr>"
            + "".join(
                f'<{kind} style="text-align:{side}">{html.escape(cell)}</{kind}>'
                for side, cell in zip(sides, cells, strict=True)
            )
            + "</tr>"
            for kind, cells in rows
        )
        return f"{above}<table>{lines}</table>"

    def data(self) -> list[dict[str, Any]]:
        """The rows as data that JSON can hold, without what a row does not have."""
        return [
            {
                column.name: plain_value(value)
                for column, value in zip(self.columns, row, strict=True)
                if value is not UNSET
            }
            for row in self.rows
        ]

    def _shown(self) -> list[list[str]]:
        return [
            [column.show(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    def _line(self, cells: Sequence[str], widths: Sequence[int], style: str) -> Line:
        text = ""
        last = len(cells) - 1
        start = 0
        for place, (column, cell, width) in enumerate(
            zip(self.columns, cells, widths, strict=True)
        ):
            text += " " * (column.gap if place else 0)
            start = len(text)
            text += cell.rjust(width) if column.right else cell.ljust(width if place < last else 0)
        return Line(text.rstrip(), indent=self.indent, hang=start, style=style)


@attrs.frozen(kw_only=True)
class Page:
    """A report: what it is about, and its parts."""

    title: str = ""
    blocks: tuple[Block, ...] = ()

    def lines(self, width: int | None) -> Iterator[Line]:
        """The title and every part, as lines."""
        if self.title:
            yield Line(self.title, style="title")
        for block in self.blocks:
            yield from block.lines(width)

    def text(self, width: int | None = None) -> str:
        """As text, for strings and pipes."""
        return "\n".join(piece for line in self.lines(width) for piece in line.wrapped(width))

    def markdown(self) -> str:
        """Title and tables as Markdown."""
        parts = [f"# {markdown_cell(self.title)}"]
        for block in self.blocks:
            if isinstance(block, Table) and block.rows:
                parts += [*([f"## {block.title}"] if block.title else []), block.markdown()]
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """As HTML for a notebook; whatever it tells stays text."""
        title = Line(self.title, style="title").html()
        return f"<div>{title}{''.join(block.html() for block in self.blocks)}</div>"

    def print(self, stream: TextIO | None = None, *, width: int | None = None) -> None:
        """Write it, wrapped and in colour where ``stream`` is a terminal.

        Args:
            stream: Where to; standard output by default.
            width: Letters of a line where it is none.
        """
        to = sys.stdout if stream is None else stream
        if not to.isatty():
            to.write(self.text(width).rstrip("\n") + "\n")
            return
        from rich.console import Console
        from rich.text import Text

        console = Console(file=to, highlight=False, markup=False, emoji=False)
        for line in self.lines(console.width):
            style = _STYLES.get(line.style, "")
            for number, piece in enumerate(line.wrapped(console.width)):
                text = Text(piece)
                end = line.indent + len(line.mark) if line.mark else len(piece)
                if number == 0 or not line.mark:
                    text.stylize(style, 0, end)
                console.print(text, soft_wrap=True)


class Readable:
    """A value that reads well: a line of an interpreter, a report of a print or a notebook."""

    __slots__ = ()

    def brief(self) -> str:
        """What it is, in one line."""
        raise NotImplementedError

    def page(self) -> Page:
        """All it has to tell."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.brief()}>"

    def __str__(self) -> str:
        return self.page().text(_PRINTED)

    def _repr_html_(self) -> str:
        return self.page().html()


def _bold(words: str, style: str) -> str:
    return f"<b>{words}</b>" if style in {"title", "error", "passed", "failed"} else words


class Code(str):
    """A cell to be shown as code."""

    __slots__ = ()


def json_code(value: Any) -> Code:
    """A value of a configuration as JSON spells it; nothing where there is none."""
    if value is None or value is UNSET:
        return Code("")
    try:
        return Code(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError):
        return Code(repr(value))


def plain_value(value: Any) -> Any:
    """``value`` as JSON can hold it; what it cannot hold, as Python writes it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return repr(value)


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: str = ""
) -> str:
    """A Markdown table that stays one whatever its cells hold.

    Args:
        header: Names of the columns.
        rows: As many cells each as ``header`` has; ``Code`` cells are shown as code.
        numbers: One letter a column: ``"r"`` aligns it to the right (``"lrr"``).
    """
    sides = numbers.ljust(len(header), "l")
    rule = ["---:" if side == "r" else "---" for side in sides]
    cells = [[markdown_cell(text) for text in row] for row in (header, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (cells[0], rule, *cells[1:]))


def markdown_cell(text: str) -> str:
    """``text`` on one line, nothing in it markup."""
    plain = " ".join(text.split())
    if not isinstance(text, Code) or not plain:
        return plain.translate(_MARKUP)
    # A backtick span can hold neither a pipe nor a backtick inside a table.
    if any(mark in plain for mark in "|`\\"):
        return f"<code>{plain.translate(_MARKUP)}</code>"
    return f"`{plain}`"
