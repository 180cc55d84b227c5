"""One table in three forms, and how it goes to a terminal."""

from __future__ import annotations

import io
import json
import re

import pytest

from zerotune._util.table import Code, Column, Line, Page, Table
from zerotune.errors import UNSET


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def table():
    return Table(
        title="Sizes",
        above="sizes:",
        columns=(
            Column(name="name", head="name", show=Code),
            Column(name="size", head="GiB", show=lambda size: f"{size:.1f}", right=True),
            Column(name="note", head="why"),
        ),
        rows=(("a.b", 1.5, "small"), ("a_long_name", 12.25, UNSET)),
    )


@pytest.fixture
def terminal(monkeypatch):
    """Prints at a terminal of some columns, and gives what it shows."""
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
    assert Page(title="All", blocks=(table,)).text().split("\n") == [
        "All",
        "sizes:",
        "  name          GiB  why",
        "  a.b           1.5  small",
        "  a_long_name  12.2",
    ]


def test_markdown_has_a_heading_for_each_table_that_has_rows(table):
    empty = Table(title="Nothing", columns=table.columns, rows=())
    assert Page(title="a|b", blocks=(table, empty)).markdown() == (
        "# a\\|b\n\n## Sizes\n\n| name | GiB | why |\n| --- | ---: | --- |\n"
        "| `a.b` | 1.5 | small |\n| `a_long_name` | 12.2 |  |\n"
    )


def test_data_are_the_values_and_lack_what_a_row_lacks(table):
    data = table.data()
    assert json.loads(json.dumps(data)) == data
    assert data == [
        {"name": "a.b", "size": 1.5, "note": "small"},
        {"name": "a_long_name", "size": 12.25},
    ]


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
    table = Table(
        columns=(Column(name="a", width=6), Column(name="b")), rows=(("one", "word " * 20),)
    )
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
    columns = (Column(name="what", width=6), Column(name="where", width=6))
    table = Table(columns=columns, rows=(("accumulated gradients", "host"), ("EMA", "host")))
    first, second = (line.text for line in table.lines(None))
    assert first.split() == ["accumulated", "gradients", "host"]
    assert first.index("host") == second.index("host")
