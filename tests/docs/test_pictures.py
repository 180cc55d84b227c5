"""Pictures show what the code answers today."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from PIL import Image

from benchmarks.framework.plots import SHOWN, shown
from benchmarks.framework.tables import markdown

DOCS = Path(__file__).parents[2] / "docs"


def generator():
    spec = importlib.util.spec_from_file_location(
        "generate_pictures", DOCS / "generate_pictures.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_memory_that_readme_shows_is_what_its_command_answers():
    pictures = generator()
    readme = (DOCS.parent / "README.md").read_text()
    assert f"zerotune {pictures.COMMAND} --chart memory.png" in readme
    with Image.open(pictures.PICTURE) as drawn:
        shown = json.loads(drawn.text[pictures.ANSWER])
    assert shown == pictures.answer(), "run: python docs/generate_pictures.py"


def test_results_their_tables_and_charts_are_what_the_benchmarks_say_today():
    found = list(generator().results())
    assert len(found) >= 6
    for path, stored, today in found:
        again = f"{path.name}: run python docs/generate_pictures.py"
        assert stored == today, again
        assert path.with_suffix(".md").read_text() == markdown(today), again
        with Image.open(path.with_suffix(".png")) as drawn:
            assert drawn.text[SHOWN] == shown(today), again


def test_a_chart_names_its_unit_what_is_better_and_the_hardware():
    for path, _, today in generator().results():
        title, caption, panels = json.loads(shown(today))
        assert title == today["title"]
        assert today["hardware"]["processor"] in caption
        for panel in panels:
            assert "better" in panel["better"]
            bars = [bar for _, group in panel["groups"] for bar in group]
            assert all(any(figure in bar["value"] for figure in "0123456789") for bar in bars)
            assert any(figure in bar["value"] for bar in bars for figure in "123456789"), path.name
            ours = {bar["name"] for bar in bars} & set(today["ours"])
            colours = {bar["name"]: bar["colour"] for bar in bars}
            others = {colours[name] for name in colours if name not in ours}
            assert ours, (path.name, panel["named"])
            assert not {colours[name] for name in ours} & others, "zerotune has a colour of its own"
