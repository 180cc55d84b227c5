"""The docs' table of what fits matches the current output of ``advise``."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from zerotune.plan.advise import _ALIKE

DOCS = Path(__file__).parents[2] / "docs"


def test_the_fits_page_is_current():
    written = runpy.run_path(str(DOCS / "generate_memory.py"))["page"]()
    assert written == (DOCS / "fits.md").read_text(encoding="utf-8"), (
        "run python docs/generate_memory.py"
    )


def test_the_memory_page_states_which_predictions_count_as_equal():
    told = " ".join((DOCS / "memory.md").read_text(encoding="utf-8").split())
    assert f"at most {100 * (_ALIKE - 1):.0f} % slower than the fastest" in told


def test_the_table_of_measured_passes_is_current():
    written = runpy.run_path(str(DOCS / "generate_memory.py"))["proof_page"]()
    assert written == (DOCS / "memory-proof.md").read_text(encoding="utf-8"), (
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
