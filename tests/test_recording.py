"""Recorded costs of test files, and the order that follows from them."""

from __future__ import annotations

import json
from types import SimpleNamespace

from tests import conftest
from tests.support.recording import RECORD


def test_the_files_that_take_longest_come_first_and_unknown_engines_before_short_files(
    tmp_path, monkeypatch
):
    record = tmp_path / "tests" / "durations.json"
    record.parent.mkdir()
    record.write_text(json.dumps({"a.py": {"seconds": 5}, "b.py": {"seconds": 90}, "c.py": {}}))
    monkeypatch.setattr(conftest, "RECORD", record)
    items = [
        SimpleNamespace(path=tmp_path / name, number=number, get_closest_marker=marks.get)
        for number in (1, 2)
        for name, marks in (("c.py", {}), ("a.py", {}), ("new.py", {"deepspeed": 1}), ("b.py", {}))
    ]
    items.sort(key=lambda item: item.path.name)
    conftest.pytest_collection_modifyitems(items)
    order = [(item.path.stem, item.number) for item in items]
    assert order == [(name, number) for name in ("b", "new", "a", "c") for number in (1, 2)]


def test_the_record_names_files_with_their_costs():
    known = json.loads(RECORD.read_text(encoding="utf-8"))
    for file, cost in known.items():
        assert file.startswith("tests/")
        assert all(isinstance(value, int) for value in cost.values()), file
