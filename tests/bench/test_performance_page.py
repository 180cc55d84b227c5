"""The documentation's figures are those of the committed results."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def generator():
    return runpy.run_path(str(DOCS / "generate_performance.py"))


@pytest.mark.parametrize("page", ["performance", "measurements"])
def test_each_generated_page_is_current(generator, page):
    written = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    text = generator["page" if page == "performance" else page]()
    assert text == written, "run python docs/generate_performance.py"


@pytest.mark.parametrize("page", ["../README.md", "index.md"])
def test_the_entry_pages_contain_the_current_result(generator, page):
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    assert generator["result"]() in text


@pytest.mark.parametrize(
    ("interval", "reached", "said"),
    [
        ([0.9, 0.9], 0.9, "yes"),
        ([1.1, 1.1], 1.1, "**no**"),
        ([0.8, 0.95], 0.9, "yes"),
        ([1.05, 1.2], 1.1, "**no**"),
        ([0.8, 1.3], 0.955, "met at the median, within the noise"),
        ([0.8, 1.3], 1.1, "missed at the median, within the noise"),
    ],
)
def test_a_goal_is_missed_only_if_the_difference_exceeds_the_noise(
    generator, interval, reached, said
):
    goal = {"limit": 1.0, "interval": interval, "reached": reached}
    assert generator["met"](goal | {"quantity": "seconds"}) == said
    opposite = {"yes": "**no**", "**no**": "yes"}
    rate = generator["met"](goal | {"quantity": "images_per_second"})
    assert rate == opposite.get(said, rate)


@pytest.mark.parametrize("states", ["fp32 moments", "bf16 moments", "8-bit moments"])
def test_the_documented_times_of_lean_states_match_the_results(generator, states):
    page = (DOCS / "streaming.md").read_text(encoding="utf-8")
    (cells,) = re.findall(rf"^\| {states} \| (.+) \| (.+) \|$", page, flags=re.MULTILINE)
    (case,) = (c for c in generator["stored"]()["step"]["cases"] if c["name"] == "lean states")
    for cell, name in zip(cells, (states, f"{states}, split masters"), strict=True):
        ratio = case["contestants"][name]["thread_seconds"].get("ratio")
        assert cell == ("1" if ratio is None else "{1:.2f} ({0:.2f} to {2:.2f})".format(*ratio))
