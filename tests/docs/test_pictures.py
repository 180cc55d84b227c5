"""Images in the docs show the code's current output."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parents[2] / "docs"


def generator():
    spec = importlib.util.spec_from_file_location(
        "generate_pictures", DOCS / "generate_pictures.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_memory_figures_in_the_readme_equal_the_output_of_its_command():
    pictures = generator()
    readme = (DOCS.parent / "README.md").read_text()
    assert f"zerotune {pictures.COMMAND} --chart memory.png" in readme
    with Image.open(pictures.PICTURE) as drawn:
        shown = json.loads(drawn.text[pictures.ANSWER])
    assert shown == pictures.answer(), "run: python docs/generate_pictures.py"


def test_stored_results_and_charts_equal_the_current_benchmark_results():
    pictures = generator()
    found = list(pictures.results())
    assert len(found) >= 6
    for path, stored, today in found:
        again = f"{path.name}: run python docs/generate_pictures.py"
        assert stored == today, again
        with Image.open(path.with_suffix(".png")) as drawn:
            assert drawn.text[pictures.SHOWN] == pictures.shown(today), again


def test_a_chart_names_the_hardware_and_shows_ours_beside_others():
    pictures = generator()
    for path, _, today in pictures.results():
        title, hardware, ours, panels = json.loads(pictures.shown(today))
        assert title == today["title"]
        assert today["hardware"]["processor"] in hardware
        for cases in panels.values():
            assert any(set(bars) & set(ours) for bars in cases.values()), path.name


def test_zero_and_negative_values_are_drawn_too(tmp_path):
    pictures = generator()
    _, _, result = next(pictures.results())
    for bars in result["cases"][0]["contestants"].values():
        for value, quantity in zip((0.0, -1.0), bars, strict=False):
            bars[quantity] = dict.fromkeys(("q1", "median", "q3"), value)
    pictures.draw(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000
