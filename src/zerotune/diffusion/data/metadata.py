"""Captions from ``metadata.jsonl`` and ``metadata.csv``, as Hugging Face's image folders have."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

from zerotune.errors import DataError


def parse_jsonl(text: str, *, source: str, file: str, caption: str) -> dict[str, str]:
    """Captions by file name from JSON lines.

    Args:
        text: The lines; blank ones are left out.
        source: Name of the file, for messages.
        file: Key that holds the image's path, relative to the metadata file.
        caption: Key that holds the caption.

    Raises:
        DataError: A line that is no object, lacks a key or repeats a file with other words.
    """
    return _collect(_json_rows(text, source), source=source, file=file, caption=caption)


def parse_csv(text: str, *, source: str, file: str, caption: str) -> dict[str, str]:
    """Captions by file name from comma-separated values with a header; like ``parse_jsonl``.

    Raises:
        DataError: A malformed line, a missing column, or a file repeated with other words.
    """
    return _collect(_csv_rows(text, source), source=source, file=file, caption=caption)


def _json_rows(text: str, source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    # Not splitlines(): JSON strings may hold U+2028 and others that it would split at.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _bad(source, number, f"is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise _bad(source, number, "is no JSON object")
        yield number, row


def _csv_rows(text: str, source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        header = next(reader, [])
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise _bad(source, reader.line_num, f"has {len(row)} of {len(header)} columns")
            yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise _bad(source, reader.line_num, f"is not CSV ({error})") from None


def _collect(
    rows: Iterable[tuple[int, dict[str, Any]]], *, source: str, file: str, caption: str
) -> dict[str, str]:
    captions: dict[str, str] = {}
    for number, row in rows:
        for column in (file, caption):
            if not isinstance(row.get(column), str):
                raise _bad(source, number, f"has no text {column!r} (it has {sorted(row)})")
        name = _inside(row[file], source, number)
        if captions.get(name, row[caption]) != row[caption]:
            raise _bad(source, number, f"gives {name!r} a second caption")
        captions[name] = row[caption]
    return captions


def _inside(name: str, source: str, number: int) -> str:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise _bad(source, number, f"names {name!r}, which does not lie beside this file")
    return str(path)


def _bad(source: str, number: int, reason: str) -> DataError:
    return DataError(
        f"line {number} {reason}",
        key=source,
        fix='write lines such as {"file_name": "a.png", "text": "a cat"}, or the same columns, '
        "or name your own with columns=",
    )
