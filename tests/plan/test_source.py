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
    st.none() | st.text(alphabet='{}[]":,\\/#\n') | st.lists(st.dictionaries(st.text(), st.none())),
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


def test_comments_and_trailing_commas_are_tolerated_and_reported_with_their_position():
    text = '{\n  // stage\n  "stage": 2, # two\n  /* list */ "list": [1, 2,],\n}'
    read, tolerated = parse_json(text, source="x")
    assert read == {"stage": 2, "list": [1, 2]}
    assert tolerated == [
        "a comment at line 2, column 3",
        "a comment at line 3, column 15",
        "a comment at line 4, column 3",
        "a trailing comma at line 4, column 27",
        "a trailing comma at line 4, column 29",
    ]


def test_comment_signs_inside_strings_are_kept():
    assert parse_json('{"a": "http://x # y /* z */"}', source="x") == (
        {"a": "http://x # y /* z */"},
        [],
    )


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ('{"a": 1,\n "b": \'x\'}', 2, 7, "single quotes"),
        ("{'a': 1}", 1, 2, "single quotes"),
        ('{"a": 1, "a": 2}', 1, 10, "'a' twice"),
        ('{"a": True}', 1, 7, "write true"),
        ('{"a": None}', 1, 7, "write null"),
        ('{"a": NaN}', 1, 7, "finite"),
        ('{"a": 1\n "b": 2}', 2, 2, "missing comma"),
        ('{"a" 1}', 1, 6, "colon"),
        ("{a: 1}", 1, 2, "double quotes"),
        ('{"a": bf16}', 1, 7, 'write "bf16"'),
        ('{"a": 1', 1, 8, "never closed"),
        ('{"a": [1, 2}', 1, 12, "missing comma"),
        ('{"a": "x\n"}', 1, 9, "never closed"),
        ('{"a": "x\ty"}', 1, 9, "control character"),
        ('{"a": "\\x"}', 1, 8, "escape"),
        ('{"a": 01}', 1, 7, "malformed number"),
        ('{"a": 1.}', 1, 7, "malformed number"),
        ('{"a": 1e999}', 1, 7, "too large"),
        ('{"a": 1} {', 1, 10, "after its end"),
        ("/* x", 1, 1, "never closed"),
        ("  ", 1, 3, "empty"),
        ('{"a": }', 1, 7, "unexpected"),
        ("", 1, 1, "empty"),
        ("[" * 200 + "]" * 200, 1, 101, "too deeply"),
        ("[" * 200, 1, 201, "value is missing"),
        ("9" * 5000, 1, 1, "too long"),
        ('{"a": 1,, "b": 2}', 1, 9, "extra comma"),
        ('{"a": [,1]}', 1, 8, "extra comma"),
        ('{"a": {{ stage }}}', 1, 8, "template"),
        ('{"a": ${STAGE}}', 1, 7, "template"),
        ('{"a": <stage>}', 1, 7, "template"),
        ("{\u201ca\u201d: 1}", 1, 2, "typographic"),
        ('{"a": \u201cx\u201d}', 1, 7, "typographic"),
        ('{"a": (1, 2)}', 1, 7, "square brackets"),
        ('{"a": -Infinity}', 1, 7, "finite"),
        ('{"a": .5}', 1, 7, "malformed number"),
        ('{"a": +1}', 1, 7, "malformed number"),
        ('{"a": 0x10}', 1, 7, "malformed number"),
        ('{"a": FALSE}', 1, 7, "write false"),
        ("zero_stage: 2\n", 1, 1, "YAML"),
    ],
)
def test_mistakes_are_named_with_line_column_and_hint(text, line, column, words):
    error = refuse(text)
    assert (error.line, error.column) == (line, column)
    assert words in str(error)
    assert error.source == "ds.json"
    assert error.fix


def test_a_byte_order_mark_is_skipped():
    assert parse_json("\ufeff{}", source="x") == ({}, [])


def test_a_surrogate_pair_is_read_as_one_character():
    assert parse_json('"\\ud83d\\ude00"', source="x")[0] == "\U0001f600"


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        (['  "a": {', '    "b": 1,', '  "c": {"d": 2}'], (3, 12)),
        (['  "a": {', '    "b": 1', '  "c": {"d": 2}'], (3, 11)),
        (['  "a": {', '    "b": {', '      "c": 1', "  },", '  "d": 2'], (4, 13)),
        (['  "a": {"b": 1,', '        "c": 2,', '  "d": 3'], (3, 16)),
    ],
)
def test_a_missing_brace_is_located_by_the_indentation(lines, place):
    error = refuse("\n".join(("{", *lines, "}")))
    assert "never closed" in error.reason
    assert (error.line, error.column) == place


def test_without_indentation_a_missing_brace_is_located_at_the_end():
    error = refuse('{\n"a": {\n"b": 1,\n"c": 2\n}\n')
    assert (error.line, error.column) == (6, 1)


def test_a_missing_comma_is_not_reported_as_a_missing_brace():
    error = refuse('{\n  "a": {\n    "b": 1\n    "c": 2\n  }\n}')
    assert "comma" in error.reason
    assert (error.line, error.column) == (4, 5)
