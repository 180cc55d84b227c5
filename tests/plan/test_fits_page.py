"""The docs' table of what fits matches the current output of ``advise``."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator():
    return runpy.run_path(str(DOCS / "generate_memory.py"))


def test_rows_of_the_fits_page_are_current(generator):
    """A model of each kind: on every card, streamed, and the memory of each plan."""
    row, streamed_row = generator["row"], generator["streamed_row"]
    written = [row("sdxl", None), row("flux", 16), row("wan-1.3b", None)]
    written += [streamed_row("sdxl", 16), streamed_row("flux", None), generator["_costs"]("sdxl")]
    page = (DOCS / "fits.md").read_text(encoding="utf-8")
    assert [text for text in written if text not in page] == [], (
        "run python docs/generate_memory.py"
    )


@pytest.mark.nightly
def test_the_fits_page_is_current(generator):
    assert generator["page"]() == (DOCS / "fits.md").read_text(encoding="utf-8"), (
        "run python docs/generate_memory.py"
    )


def test_the_table_of_measured_passes_is_current(generator):
    assert generator["proof_page"]() == (DOCS / "memory-proof.md").read_text(encoding="utf-8"), (
        "run python docs/generate_memory.py"
    )


def test_the_memory_model_is_close_to_every_measured_pass():
    passes = json.loads((DOCS / "results" / "fake_device.json").read_text())
    assert len(passes) > 50
    for one in passes:
        for counted, estimated, held in (
            (one["counted"], one["estimated"], one["weights"]),
            (one["host"], one["estimated_host"], 0),
        ):
            assert (held + estimated) / (held + counted or 1) >= 0.97 or not counted, one
            assert 0.95 * counted <= estimated <= 1.05 * counted, one
