"""Reports as pages of lines and tables: rich lays them out as text; also Markdown and HTML.

In a pipe no line is broken, since a program may search it, unless the caller asks for a width. At
a terminal lines end where the terminal does, and findings have colours, which ``NO_COLOR`` removes.
"""

from __future__ import annotations

import html
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO

import attrs

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_MARKUP: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", "\n": "<br>", **{mark: f"\\{mark}" for mark in "\\|*[]`"}}
)
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
_BOLD: Final = frozenset({"title", "error", "passed", "failed"})
_PRINTED: Final = 100
"""Characters of a line where the width of what shows it is not known."""
_UNBROKEN: Final = 10**6


class Block(Protocol):
    """A part of a page."""

    def layout(self) -> RenderableType:
        """What rich lays out as text."""

    def markdown(self) -> str:
        """The same as Markdown; empty where there is nothing to show."""

    def html(self) -> str:
        """The same as HTML for a notebook."""


@attrs.frozen
class Line:
    """A paragraph; one line where there is room."""

    text: str
    indent: int = attrs.field(default=0, kw_only=True)
    mark: str = attrs.field(default="", kw_only=True)
    """Goes before the text and alone has the colour."""
    style: str = attrs.field(default="", kw_only=True)
    """A word for the meaning: ``"error"``, ``"title"``, ``"good"`` …"""

    def layout(self) -> RenderableType:
        """Text that continues below its own beginning, right of indentation and mark."""
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
        """What ``layout`` shows where every line has room."""
        lead = self._lead
        return f"{lead}{self.text}".replace("\n", "\n" + " " * len(lead)).rstrip()

    @property
    def _lead(self) -> str:
        return " " * self.indent + (f"{self.mark} " if self.mark else "")

    def markdown(self) -> str:
        """A heading, an item of a list, or a paragraph."""
        if self.style == "title":
            return f"## {markdown_cell(self.text).rstrip(':')}"
        mark = f"- **{markdown_cell(self.mark.strip('[]:'))}** " if self.mark else ""
        return mark + markdown_cell(self.text)

    def html(self) -> str:
        """A paragraph."""
        words = html.escape(self.text.strip())
        if not words:
            return ""
        words = f"<b>{words}</b>" if self.style in _BOLD and not self.mark else words
        mark = f"<b>{html.escape(self.mark)}</b> " if self.mark else ""
        return f'<p style="margin:0 0 0 {self.indent / 2}em">{mark}{words}</p>'


Row = Sequence[str]


@attrs.frozen(kw_only=True)
class Table:
    """Rows of text in columns."""

    rows: tuple[Row, ...]
    head: tuple[str, ...] = ()
    """What stands above each column."""
    align: str = ""
    """One letter a column: ``"r"`` aligns it to the right (``"lrr"``)."""
    widths: tuple[int, ...] = ()
    """Least characters of the first columns, so that several tables agree."""
    gap: int = 2
    """Blanks between columns."""
    indent: int = 2
    style: Callable[[Row], str] = lambda _row: ""
    """What a row means, for its colour; see ``Line.style``."""

    def layout(self) -> RenderableType:
        """Columns as wide as their cells; where that is too wide, the widest are wrapped."""
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
        for number in range(self._columns):
            grid.add_column(
                Text(self.head[number] if self.head else ""),
                justify="right" if self.align[number : number + 1] == "r" else "left",
                min_width=self.widths[number] if number < len(self.widths) else None,
                overflow="fold",
            )
        for row in self.rows:
            grid.add_row(*map(Text, row), style=_RICH_STYLES.get(self.style(row), ""))
        return Padding(grid, (0, 0, 0, self.indent), expand=False)

    def markdown(self) -> str:
        """The rows as a Markdown table."""
        if not self.rows:
            return ""
        return markdown_table(self.head or [""] * self._columns, self.rows, align=self.align)

    def html(self) -> str:
        """The rows as an HTML table."""
        if not self.rows:
            return ""
        sides = ["right" if side == "r" else "left" for side in self.align.ljust(self._columns)]
        rows = [("th", self.head)] if self.head else []
        lines = "".join(
            "<tr>"
            + "".join(
                f'<{kind} style="text-align:{side}">{html.escape(cell)}</{kind}>'
                for side, cell in zip(sides, cells, strict=True)
            )
            + "</tr>"
            for kind, cells in (*rows, *(("td", row) for row in self.rows))
        )
        return f"<table>{lines}</table>".replace("\n", "<br>")

    @property
    def _columns(self) -> int:
        return len(self.rows[0] if self.rows else self.head)


@attrs.frozen(kw_only=True)
class Page:
    """A report: its subject, and its parts."""

    title: str = ""
    blocks: tuple[Block, ...] = ()

    def text(self, width: int | None = None) -> str:
        """As text of at most ``width`` columns; ``None``: no line is broken."""
        lines = [block for block in self.blocks if isinstance(block, Line)]
        if width is None and len(lines) == len(self.blocks):
            # Loading rich takes a small command as long as a fifth of its work.
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

    def markdown(self) -> str:
        """As Markdown."""
        parts = [f"# {markdown_cell(self.title)}"] if self.title else []
        parts += [block.markdown() for block in self.blocks]
        return "\n\n".join(part for part in parts if part) + "\n"

    def html(self) -> str:
        """As HTML for a notebook; nothing in it is markup but what this module writes."""
        title = Line(self.title, style="title").html()
        return f"<div>{title}{''.join(block.html() for block in self.blocks)}</div>"

    def print(self, stream: TextIO | None = None, *, width: int | None = None) -> None:
        """Write it, wrapped and in colour where ``stream`` is a terminal.

        Args:
            stream: Where to; standard output by default.
            width: Columns of a line where it is no terminal.
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


class Readable:
    """A value that reads well: a line of an interpreter, a report of a print or a notebook."""

    __slots__ = ()

    def brief(self) -> str:
        """What it is, in one line."""
        raise NotImplementedError

    def page(self) -> Page:
        """The whole report."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.brief()}>"

    def __str__(self) -> str:
        return self.page().text(_PRINTED)

    def _repr_html_(self) -> str:
        return self.page().html()


def plain_value(value: Any) -> Any:
    """``value`` as JSON can hold it; what it cannot hold, as Python writes it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return repr(value)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, align: str = "") -> str:
    """A Markdown table that stays one whatever its cells hold.

    Args:
        head: Names of the columns.
        rows: As many cells each as ``head`` has.
        align: One letter a column: ``"r"`` aligns it to the right (``"lrr"``).
    """
    rule = ["---:" if side == "r" else "---" for side in align.ljust(len(head))]
    cells = [[markdown_cell(text) for text in row] for row in (head, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (cells[0], rule, *cells[1:]))


def markdown_cell(text: str) -> str:
    """``text`` on one line, with nothing in it read as markup."""
    lines = (" ".join(line.split()) for line in text.strip().split("\n"))
    return "\n".join(lines).translate(_MARKUP)
