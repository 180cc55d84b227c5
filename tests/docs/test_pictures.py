"""Pictures show what the code answers today."""

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


def test_the_memory_that_readme_shows_is_what_its_command_answers():
    pictures = generator()
    readme = (DOCS.parent / "README.md").read_text()
    assert f"zerotune {pictures.COMMAND} --chart memory.png" in readme
    with Image.open(pictures.PICTURE) as drawn:
        shown = json.loads(drawn.text[pictures.ANSWER])
    assert shown == pictures.answer(), "run: python docs/generate_pictures.py"
