from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.errors import PlanSyntaxError
from zerotune.plan.source import key_lines, parse_json

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def refuse(text: str) -> PlanSyntaxError:
    with pytest.raises(PlanSyntaxError) as caught:
        parse_json(text, source="ds.json")
    return caught.value


@settings(deadline=None)
@given(JSON_VALUES, st.booleans(), st.sampled_from([None, 0, 2]))
def test_all_valid_json_is_parsed_like_in_json(value, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    read, tolerated = parse_json(text, source="x")
    assert read == json.loads(text)
    assert repr(read) == repr(json.loads(text))
    assert tolerated == []


OBJECTS = st.recursive(
    st.none()
    | st.text(alphabet='{}[]":,\\/#\n')
    | st.lists(st.dictionaries(st.text(max_size=20), st.none())),
    lambda inner: st.dictionaries(st.text(alphabet='ab"/#\\é:{', max_size=3), inner),
)


def paths(value, above=""):
    """Yield the path of every key that lies in objects only."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield f"{above}{key}"
        yield from paths(inner, f"{above}{key}.")


@settings(deadline=None)
@given(OBJECTS)
def test_every_key_of_an_object_has_the_line_it_is_written_on(value):
    text = json.dumps(value, indent=1)
    lines = key_lines(text, Path("x.json"))
    assert set(lines) == set(paths(value))
    written = text.splitlines()
    for path, line in lines.items():
        assert written[line - 1].lstrip().startswith(json.dumps(path.rpartition(".")[2]) + ":")


def test_comments_and_commas_over_several_lines_keep_the_lines_of_keys():
    text = '{ /* one\ntwo */\n"a": 1\n,\n"b": {"c": 2\n, } }'
    assert key_lines(text, Path("x.json")) == {"a": 3, "b": 5, "b.c": 5}


@settings(deadline=None)
@given(st.text())
def test_any_text_is_parsed_or_refused_with_a_position_inside_it(text):
    refusal = None
    try:
        parse_json(text, source="x")
    except PlanSyntaxError as error:
        refusal = error
    if refusal is not None:
        assert 1 <= refusal.line <= text.count("\n") + 1
        assert refusal.column >= 1


@settings(deadline=None)
@given(st.text(alphabet='{}[]",:\\/*# \n0123456789.eE+-truefalsn'))
def test_text_parsed_without_tolerance_gives_what_json_gives(text):
    try:
        read, tolerated = parse_json(text, source="x")
    except PlanSyntaxError:
        return
    if not tolerated:
        assert read == json.loads(text)


def test_comments_and_trailing_commas_are_tolerated_and_reported():
    text = '{\n  // stage\n  "stage": 2, # two\n  /* list */ "list": [1, 2,],\n}'
    read, tolerated = parse_json(text, source="x")
    assert read == {"stage": 2, "list": [1, 2]}
    assert tolerated == ["comments", "trailing commas"]


def test_comment_signs_inside_strings_are_kept():
    assert parse_json('{"a": "http://x # y /* z */"}', source="x") == (
        {"a": "http://x # y /* z */"},
        [],
    )


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ('{"a": 1,\n "b": \'x\'}', 2, 7, "Expecting value"),
        ('{"a": 1, "a": 2}', 1, 1, "'a' twice"),
        ('{"a": True}', 1, 7, "Expecting value"),
        ('{"a": NaN}', 1, 1, "finite"),
        ('{"a": -Infinity}', 1, 1, "finite"),
        ('{"a": 1\n "b": 2}', 2, 2, "','"),
        ('{"a" 1}', 1, 6, "':'"),
        ("{a: 1}", 1, 2, "double quotes"),
        ('{"a": "x\ty"}', 1, 9, "control character"),
        ('{"a": 1e999}', 1, 1, "too large"),
        ('{"a": 1} {', 1, 10, "Extra data"),
        ("/* x", 1, 1, "Expecting value"),
        ("", 1, 1, "Expecting value"),
        ("[" * 200 + "]" * 200, 1, 1, "too deeply"),
        ("[" * 200, 1, 201, "Expecting value"),
        ("9" * 5000, 1, 1, "too long"),
        ('{"a": {{ stage }}}', 1, 8, "double quotes"),
        ('{ // x\n"a": [1,],\n"b": "\\ud800"}', 1, 1, "surrogate"),
    ],
)
def test_mistakes_are_named_with_line_and_column(text, line, column, words):
    error = refuse(text)
    assert (error.line, error.column) == (line, column)
    assert words in str(error)
    assert error.source == "ds.json"
    assert error.fix


def test_a_byte_order_mark_is_skipped():
    assert parse_json("\ufeff{}", source="x") == ({}, [])
