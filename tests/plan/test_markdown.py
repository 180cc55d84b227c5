from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune._util.table import markdown_cell as cell
from zerotune._util.table import markdown_table as table


def test_a_table_has_a_header_and_alignment():
    assert table(("name", "size"), [("weights", "4.00"), ("a.b", "")], align="lr") == (
        "| name | size |\n| --- | ---: |\n| weights | 4.00 |\n| a.b |  |"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", "a\\|b"),
        ("a *b* [c] `d`", "a \\*b\\* \\[c\\] \\`d\\`"),
        ("<b> & c", "&lt;b> &amp; c"),
        ("one  two\n  three", "one two<br>three"),
        ("zero_optimization", "zero_optimization"),
    ],
)
def test_cells_are_escaped(text, shown):
    assert cell(text) == shown


@given(st.lists(st.tuples(st.text(), st.text()), max_size=4))
def test_no_cell_text_breaks_the_table(rows):
    lines = table(("a", "b"), rows).split("\n")

    assert len(lines) == len(rows) + 2
    for line in lines:
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3
