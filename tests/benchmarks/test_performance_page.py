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
        for goal in json.loads(path.read_text()).get("goals", ()):
            if goal["met"] is False:
                assert f"| {goal['text']}" in generator["page"]()


GOAL = {"limit": 1.0, "met": True}


@pytest.mark.parametrize(
    ("ratios", "met", "said"),
    [
        ([0.9] * 8, True, "yes"),
        ([1.1] * 8, False, "**no**"),
        ([0.8, 0.85, 0.9, 0.95, 0.96, 0.97, 1.2, 1.3], True, "met at the median, within the noise"),
        (
            [0.8, 0.9, 1.05, 1.1, 1.1, 1.1, 1.2, 1.3],
            False,
            "missed at the median, within the noise",
        ),
        ([1.1], False, "**no**"),
        ([0.9], True, "yes"),
        ([], None, "not measured yet"),
    ],
)
def test_no_is_said_where_the_difference_is_larger_than_the_noise(generator, ratios, met, said):
    assert generator["_met"](GOAL | {"met": met}, ratios) == said


def test_what_is_not_measured_has_a_reason(generator):
    page = generator["page"]()
    for name in set(generator["ORDER"]) - set(generator["stored"]()):
        assert generator["NOT_YET"][name] in page


def test_the_first_table_has_a_row_for_each_stored_result(generator):
    stored = generator["stored"]()
    for name, case, *compared, _ in generator["FIRST"]:
        found = generator["_case"](stored[name], case)
        assert generator["rounds"](found, *compared), (name, case)
