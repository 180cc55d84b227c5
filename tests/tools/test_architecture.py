"""The figures, arrows and file names of the architecture page are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="reads pyproject.toml with Python 3.11's parser")

ROOT = Path(__file__).resolve().parents[2]
AGAIN = "run python -m tools.architecture"
ROOMS = "Layers: arrows point down only; siblings never import each other"


def page() -> str:
    return (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_layer_diagram_equals_the_import_contract():
    from tools.architecture import layers

    picture = re.search(r"```text\n(.*?)```", page(), re.DOTALL).group(1)
    # Descriptions are to the right of the names.
    drawn = [re.findall(r"[a-z_]+", line[:46]) for line in picture.splitlines()]
    contract = [name for layer in layers(ROOMS) for name in layer]
    assert [name for line in drawn for name in line] == contract


def test_the_arrows_inside_plan_equal_the_import_contract():
    from tools.architecture import arrows, block

    assert block(page(), "arrows") == arrows(), AGAIN


def test_the_figures_on_the_page_equal_those_of_the_code():
    from tools.architecture import block, figures

    assert block(page(), "figures") == figures(), AGAIN


def test_every_file_named_on_the_page_exists():
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md)|(?:[\w.-]+/){2,})`", page()))
    assert len(named) > 30
    places = (ROOT, ROOT / "src" / "zerotune")
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert not missing


def test_the_table_lists_every_subpackage():
    rooms = {
        path.parent.name
        for path in (ROOT / "src" / "zerotune").glob("*/__init__.py")
        if not path.parent.name.startswith("_")
    }
    assert rooms <= set(re.findall(r"`([\w]+)/`", page()))
