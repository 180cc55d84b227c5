"""Lines and tables as text, as Markdown and at a terminal."""

from __future__ import annotations

import io
import re

import pytest

from zerotune._util.table import Line, Page, Table


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def table():
    return Table(
        head=("name", "GiB", "why"),
        align="lr",
        rows=(("a.b", "1.5", "small"), ("a_long_name", "12.2", "")),
    )


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that prints a page at a terminal and returns the screen's contents."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def show(page, columns, **environment):
        for name, value in {"COLUMNS": str(columns), **environment}.items():
            monkeypatch.setenv(name, value)
        stream = Terminal()
        page.print(stream)
        return stream.getvalue()

    return show


FINDING = Line(
    "zero.stage: a reason that is longer than the terminal is wide",
    mark="[error]",
    style="error",
    indent=2,
)


def test_text_columns_are_as_wide_as_their_widest_cell(table):
    page = Page(title="All", blocks=(Line("sizes:", style="title"), table))
    assert page.text().split("\n") == [
        "All",
        "sizes:",
        "  name          GiB  why",
        "  a.b           1.5  small",
        "  a_long_name  12.2",
    ]


def test_a_two_line_cell_stays_in_one_row():
    table = Table(rows=(("a\nb", "c"),))
    assert Page(blocks=(table,)).text() == "  a  c\n  b"


def test_output_to_a_pipe_is_neither_wrapped_nor_coloured():
    stream = io.StringIO()
    Page(title="All", blocks=(FINDING,)).print(stream)
    assert stream.getvalue() == f"All\n  [error] {FINDING.text}\n"


def test_output_wraps_at_the_terminal_width_and_indents_continuation_lines(terminal):
    shown = terminal(Page(blocks=(FINDING,)), 40, NO_COLOR="1")
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("  [error] zero.stage: a reason")
    assert all(line.startswith("    ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == f"[error] {FINDING.text}"


def test_a_wrapped_row_continues_below_its_last_cell(terminal):
    table = Table(rows=(("one", "word " * 20),), widths=(6,))
    first, *rest = terminal(Page(blocks=(table,)), 60, NO_COLOR="1").splitlines()
    assert first.startswith("  one     word")
    assert rest
    assert all(line.startswith(" " * 10 + "word") for line in rest)


def test_findings_are_coloured_at_a_terminal_unless_no_color_is_set(terminal):
    page = Page(blocks=(FINDING,))
    coloured = terminal(page, 200)
    assert "\x1b[1;31m  [error]" in coloured
    assert coloured.rstrip().endswith(FINDING.text[-10:])
    plain = terminal(page, 200, NO_COLOR="1")
    assert "31m" not in plain


def test_an_overlong_cell_keeps_the_columns_aligned():
    table = Table(rows=(("accumulated gradients", "host"), ("EMA", "host")), widths=(6, 6))
    first, second = Page(blocks=(table,)).text().split("\n")
    assert first.split() == ["accumulated", "gradients", "host"]
    assert first.index("host") == second.index("host")


def test_text_is_not_displayed_in_a_notebook_and_has_no_colours(table, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert Page(blocks=(table,)).text().startswith("  name ")


def test_lines_without_a_table_are_formatted_as_beside_one(table):
    lines = (FINDING, Line("two\nlines", mark="-"), Line("  inside"), Line(""), Line("x", indent=4))
    alone, beside = Page(title="All", blocks=lines), Page(title="All", blocks=(*lines, table))
    assert beside.text().startswith(alone.text() + "\n  name ")
