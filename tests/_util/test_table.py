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
    """Print at a terminal of ``columns`` columns and return the screen's contents."""
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


def test_text_has_columns_as_wide_as_their_cells(table):
    page = Page(title="All", blocks=(Line("sizes:", style="title"), table))
    assert page.text().split("\n") == [
        "All",
        "sizes:",
        "  name          GiB  why",
        "  a.b           1.5  small",
        "  a_long_name  12.2",
    ]


def test_markdown_has_the_parts_of_the_text_without_what_is_empty(table):
    empty = Table(head=table.head, rows=())
    parts = (Line("sizes:", style="title"), table, empty, FINDING, Line(""), Line("a *b*"))
    assert Page(title="a|b", blocks=parts).markdown() == (
        "# a\\|b\n\n## sizes\n\n| name | GiB | why |\n| --- | ---: | --- |\n"
        "| a.b | 1.5 | small |\n| a_long_name | 12.2 |  |\n\n"
        f"- **error** {FINDING.text}\n\na \\*b\\*\n"
    )


def test_a_cell_of_two_lines_stays_one_row_of_markdown_and_html():
    table = Table(rows=(("a\nb", "c"),))
    assert table.markdown().split("\n")[-1] == "| a<br>b | c |"
    assert ">a<br>b</td>" in table.html()
    assert Page(blocks=(table,)).text() == "  a  c\n  b"


def test_a_pipe_breaks_no_line_and_has_no_colours():
    stream = io.StringIO()
    Page(title="All", blocks=(FINDING,)).print(stream)
    assert stream.getvalue() == f"All\n  [error] {FINDING.text}\n"


def test_a_terminal_wraps_where_it_ends_and_goes_on_further_in(terminal):
    shown = terminal(Page(blocks=(FINDING,)), 40, NO_COLOR="1")
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("  [error] zero.stage: a reason")
    assert all(line.startswith("    ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == f"[error] {FINDING.text}"


def test_a_row_goes_on_below_its_last_cell(terminal):
    table = Table(rows=(("one", "word " * 20),), widths=(6,))
    first, *rest = terminal(Page(blocks=(table,)), 60, NO_COLOR="1").splitlines()
    assert first.startswith("  one     word")
    assert rest
    assert all(line.startswith(" " * 10 + "word") for line in rest)


def test_findings_have_colours_at_a_terminal_unless_they_are_not_wanted(terminal):
    page = Page(blocks=(FINDING,))
    coloured = terminal(page, 200)
    assert "\x1b[1;31m  [error]" in coloured
    assert coloured.rstrip().endswith(FINDING.text[-10:])
    plain = terminal(page, 200, NO_COLOR="1")
    assert "31m" not in plain


def test_a_cell_wider_than_its_column_touches_no_other():
    table = Table(rows=(("accumulated gradients", "host"), ("EMA", "host")), widths=(6, 6))
    first, second = Page(blocks=(table,)).text().split("\n")
    assert first.split() == ["accumulated", "gradients", "host"]
    assert first.index("host") == second.index("host")


def test_text_never_goes_to_a_notebook_and_has_no_colours(table, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert Page(blocks=(table,)).text().startswith("  name ")


def test_lines_alone_read_as_they_do_beside_a_table(table):
    lines = (FINDING, Line("two\nlines", mark="-"), Line("  inside"), Line(""), Line("x", indent=4))
    alone, beside = Page(title="All", blocks=lines), Page(title="All", blocks=(*lines, table))
    assert beside.text().startswith(alone.text() + "\n  name ")
