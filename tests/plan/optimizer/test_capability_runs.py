"""A sample of the stored table's cells, compared with the real engine."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.support.ranks import ranks
from tools.capability_table import CapabilityTable
from zerotune.plan.optimizer.capability import Situation, capability_of
from zerotune.plan.optimizer.catalogue import OPTIMIZERS

PAGE = Path(__file__).parents[3] / "docs" / "optimizers.md"
CELLS = [
    ("AdamW", 3, "none", "bf16"), ("Adagrad", 1, "cpu", "fp32"), ("Lion", 3, "cpu", "bf16"),
    ("Lamb", 0, "none", "bf16"), ("Muon", 2, "none", "bf16"), ("Adafactor", 2, "none", "fp32"),
    ("OneBitAdam", 0, "none", "fp32"),
]  # fmt: skip


def test_the_table_covers_every_cell_that_needs_no_package() -> None:
    table = CapabilityTable.stored()
    for name, entry in OPTIMIZERS.items():
        if entry.package is not None:
            continue
        for stage, offload in [(0, "none"), *((s, o) for s in (1, 2, 3) for o in ("none", "cpu"))]:
            for precision in ("fp32", "bf16"):
                assert (name, stage, offload, precision) in table.cells


def test_the_rules_agree_with_every_measured_cell() -> None:
    table = CapabilityTable.stored()
    for (name, *place), cell in table.cells.items():
        stage, offload, precision = place
        situation = Situation(
            stage=stage,
            offload=offload,
            precision=precision,
            accelerator=table.accelerator,
        )
        answer = capability_of(OPTIMIZERS[name], situation)
        assert answer.status == cell.outcome
        assert answer.implementation in (None, cell.implementation)


def test_a_table_round_trips() -> None:
    table = CapabilityTable.stored()
    text = table.to_json()
    assert CapabilityTable.from_json(text) == table
    assert len(json.loads(text)["cells"]) == len(table.cells)


def test_every_working_cell_lowered_its_loss() -> None:
    for cell in CapabilityTable.stored().cells.values():
        if cell.outcome != "cannot":
            assert cell.last_loss < 0.9 * cell.first_loss, cell.key
            assert cell.implementation
        else:
            assert cell.reason, cell.key


def test_the_docs_show_the_stored_table() -> None:
    generator = runpy.run_path(str(PAGE.with_name("generate_optimizers.py")))
    assert PAGE.read_text(encoding="utf-8") == generator["page"]()


@pytest.mark.deepspeed
@ranks(1)
def test_a_sample_of_the_table_is_still_correct() -> None:
    deepspeed = pytest.importorskip("deepspeed")
    table = CapabilityTable.stored()
    if deepspeed.__version__ != table.versions["deepspeed"]:
        pytest.skip(f"the table is of DeepSpeed {table.versions['deepspeed']}")
    from tools.capabilities import run_cell

    for cell in [run_cell(*cell) for cell in CELLS]:
        stored = table.cells[cell.key]
        assert (cell.outcome, cell.implementation) == (stored.outcome, stored.implementation), cell
        if stored.last_loss is not None:
            # bf16 and other processors round differently; a broken cell is off by far more.
            assert cell.last_loss == pytest.approx(stored.last_loss, rel=0.15), cell
