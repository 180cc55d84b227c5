"""The documentation's figures are those of the committed results."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def generator():
    return runpy.run_path(str(DOCS / "generate_performance.py"))


def test_the_page_is_current(generator):
    written = (DOCS / "performance.md").read_text(encoding="utf-8")
    assert generator["page"]() == written, "run python docs/generate_performance.py"


def test_only_full_measurements_are_committed(generator):
    for name, result in generator["stored"]().items():
        assert not result["quick"], f"{name} was measured with --quick"


def test_a_missing_result_is_said_to_be_missing(generator):
    for name in set(generator["ORDER"]) - set(generator["stored"]()):
        assert (
            f"| {name} | `python -m benchmarks {name}` | not measured yet |" in generator["page"]()
        )


def test_reasons_belong_to_goals(generator):
    from benchmarks.registry import load

    for benchmark, beginning in generator["REASONS"]:
        texts = [goal.text for goal in load(benchmark).goals]
        assert any(text.startswith(beginning) for text in texts), (benchmark, beginning)


def test_a_missed_goal_stands_in_the_headline(generator):
    for path in (DOCS / "results").glob("*.json"):
        for goal in json.loads(path.read_text())["goals"]:
            if goal["met"] is False:
                assert f"| {goal['text']}" in generator["page"]()
