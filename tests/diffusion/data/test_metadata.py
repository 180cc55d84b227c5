"""Metadata files are read as written; anything else gives one clear error."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.diffusion.data.folder import captions_by_file, csv_rows, json_rows
from zerotune.errors import DataError

names = st.from_regex(r"[a-zé ]{1,8}(/[a-z]{1,5})?\.png", fullmatch=True)
captions = st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
columns = {"source": "metadata", "file": "file_name", "caption": "text"}


def parse_jsonl(text, *, source, **keys):
    return captions_by_file(json_rows(text, source), source=source, **keys)


def parse_csv(text, *, source, **keys):
    return captions_by_file(csv_rows(text, source), source=source, **keys)


@settings(max_examples=60, deadline=None)
@given(words=captions, bom=st.sampled_from(["", "\ufeff"]), ascii_only=st.booleans())
def test_json_lines_round_trip(words, bom, ascii_only):
    lines = [
        json.dumps({"file_name": name, "text": text, "other": 1}, ensure_ascii=ascii_only)
        for name, text in words.items()
    ]
    assert parse_jsonl(bom + "\n\r\n".join(lines), **columns) == words


@settings(max_examples=60, deadline=None)
@given(words=captions, bom=st.sampled_from(["", "\ufeff"]), quoting=st.sampled_from([0, 1]))
def test_csv_round_trips(words, bom, quoting):
    file = io.StringIO()
    writer = csv.writer(file, quoting=quoting)
    writer.writerow(["text", "score", "file_name"])
    writer.writerows([text, 1, name] for name, text in words.items())
    assert parse_csv(bom + file.getvalue(), **columns) == words


@settings(max_examples=100, deadline=None)
@given(
    text=st.text() | st.text('{}[],:"\n\\file_nametext.pg01'),
    parse=st.sampled_from([parse_jsonl, parse_csv]),
)
def test_malformed_metadata_is_a_data_error(text, parse):
    error = None
    try:
        found = parse(text, **columns)
    except DataError as caught:
        error, found = caught, {}
    assert all(isinstance(word, str) for pair in found.items() for word in pair)
    assert error is None or (error.key == "metadata" and error.reason.startswith("line "))


@pytest.mark.parametrize(
    ("parse", "text", "reason"),
    [
        (parse_jsonl, '{"file_name": "a.png", "text": "x"}\nno', "line 2 is not JSON"),
        (parse_jsonl, "[1]", "line 1 is not a JSON object"),
        (parse_jsonl, '{"file_name": "a.png"}', "line 1 has no text in column 'text'"),
        (
            parse_jsonl,
            '{"file_name": "a.png", "text": null}',
            "line 1 has no text in column 'text'",
        ),
        (parse_jsonl, '{"file_name": "../a.png", "text": "x"}', "outside this file's folder"),
        (parse_jsonl, '{"file_name": "/a.png", "text": "x"}', "outside this file's folder"),
        (parse_jsonl, "[" * 100_000, "line 1 is not JSON"),
        (parse_csv, "file_name,text\na.png\n", "line 2 has 1 of 2 columns"),
        (parse_csv, "file_name,words\na.png,x\n", "line 2 has no text in column 'text'"),
        (parse_csv, 'file_name,text\na.png,"x\n', "is not CSV"),
        (
            parse_csv,
            "file_name,text\na.png,x\n./a.png,y\n",
            "line 3 has a second caption for 'a.png'",
        ),
    ],
)
def test_errors_name_the_line_and_the_fault(parse, text, reason):
    with pytest.raises(DataError) as caught:
        parse(text, **columns)
    assert reason in str(caught.value)


def test_a_repeated_file_with_the_same_text_is_accepted():
    text = "file_name,text\na.png,x\na.png,x\n"
    assert parse_csv(text, **columns) == {"a.png": "x"}
