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
