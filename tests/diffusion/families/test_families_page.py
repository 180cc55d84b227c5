"""The docs' table of families comes from recorded runs and the current output of ``advise``."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from zerotune.diffusion.models.declared import DECLARED, WanLowNoise

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def generator():
    path = DOCS / "generate_families.py"
    if not path.exists():
        pytest.skip("the documentation is not here")
    return runpy.run_path(str(path))


def test_lines_of_the_table_are_current(generator, monkeypatch):
    known = generator["FAMILIES"]
    few = {name: known[name] for name in ("sdxl", "qwen-image-edit-plus", "wan")}
    monkeypatch.setitem(generator["table"].__globals__, "FAMILIES", few)
    page = (DOCS / "families.md").read_text(encoding="utf-8")
    assert [
        line
        for line in generator["table"](generator["stored"]()).splitlines()
        if line not in page.splitlines()
    ] == [], "run python docs/generate_families.py"


@pytest.mark.nightly
def test_the_table_on_the_page_is_current(generator):
    text = (DOCS / "families.md").read_text(encoding="utf-8")
    assert generator["page"](text, generator["stored"]()) == text, (
        "run python docs/generate_families.py"
    )


def test_every_declared_family_has_a_line(generator):
    listed = {kind for kind, _ in generator["FAMILIES"].values()}
    assert set(DECLARED) <= listed


def test_each_family_is_listed_with_its_pipeline_unless_the_names_agree(generator):
    text = (DOCS / "families.md").read_text(encoding="utf-8").partition(generator["BEGIN"])[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    entry = re.compile(r"`(\w+)`(?: \((?:`(\w+Pipeline)`)?[^)]*\))?")
    listed = {name: pipeline for cell in cells for name, pipeline in entry.findall(cell)}
    for kind in (*DECLARED, WanLowNoise):
        usual = f"{kind.__name__}Pipeline"
        assert listed[kind.__name__] == ("" if kind.pipeline == usual else kind.pipeline)
