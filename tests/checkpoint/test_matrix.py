"""Every plan's checkpoint resumes under every plan; a target resumes all sources in one engine.

Once both precisions have run, the measurements are written to ``docs/resume-matrix.md``.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import anywhere
from tests.checkpoint.anywhere import LEAN, PLANS, ROUNDED, apart, folder_of
from tests.checkpoint.matrix_table import write_table
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.nvme,
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
]

RUNS = [(name, world_size) for name in PLANS for world_size in (1, 2)]
SOURCES = [*RUNS, *((name, world_size) for name in LEAN for world_size in (1, 2))]
FP32 = 5e-5
"""Largest relative difference of a loss in fp32."""


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def sources(request, tmp_path_factory) -> Any:
    """Return precision, folder, and uninterrupted runs under every plan, each with a checkpoint."""
    precision, root = request.param, tmp_path_factory.mktemp(request.param)
    made = {}
    for name, world_size in SOURCES:
        folder = folder_of(root, name, precision, world_size)
        arguments = (name, precision, str(folder), str(swap_of(root)))
        ranks = run_ranks(anywhere.saved, *arguments, world_size=world_size, timeout_s=900)
        made[name, world_size] = ranks[0]
    return precision, root, made


@pytest.fixture(scope="module")
def measured() -> Any:
    """Collect the measurements of this module and write them at the end."""
    found: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {}, "spread": {}}
    yield found
    cells = len(SOURCES) * len(RUNS)
    if all(len(found[precision]) == cells for precision in ("fp32", "bf16")):
        write_table(found, [label(*run) for run in SOURCES], [label(*run) for run in RUNS])


@pytest.mark.parametrize("target", RUNS, ids=lambda run: f"{run[0]}x{run[1]}")
def test_every_checkpoint_resumes_under_every_plan(target, sources, measured):
    precision, root, made = sources
    name, world_size = target
    folders = [str(folder_of(root, a, precision, n)) for a, n in SOURCES]
    arguments = (name, precision, folders, str(swap_of(root)))
    ranks = run_ranks(anywhere.resumed, *arguments, world_size=world_size, timeout_s=1800)
    # bf16 rounds differently at every stage, so the spread of uninterrupted runs is the bound.
    whole = [made[run]["losses"] for run in RUNS]
    spread = max(apart(a, b) for a, b in itertools.permutations(whole, 2))
    measured["spread"][precision] = spread
    worst = {}
    for source, actual in zip(SOURCES, ranks[0], strict=True):
        expected = made[source]
        names = [each for each in expected["state"] if not each.startswith("step ")]
        assert [n for n in names if actual["state"][n] != expected["state"][n]] == []
        assert actual["step"] == anywhere.BEFORE
        assert bool(actual["whole"]) == ("z3" not in name)
        assert bool(actual["swapped"]) == ("nvme" in name)
        difference = apart(expected["losses"], actual["losses"])
        measured[precision][f"{label(*source)} -> {label(*target)}"] = difference
        worst[source] = difference
    bound = FP32 if precision == "fp32" else spread
    assert max(worst[run] for run in RUNS) <= bound, worst
    assert max(worst.values()) <= max(bound, ROUNDED), worst
    # The same plan gives the same numbers.
    assert worst[target] == 0.0


def label(name: str, world_size: int) -> str:
    return f"{name} x{world_size}"


def swap_of(root: Path) -> Path:
    folder = root / "swap"
    folder.mkdir(exist_ok=True)
    return folder
