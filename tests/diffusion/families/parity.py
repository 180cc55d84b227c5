"""Losses of each family's runs against the plain engine's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.diffusion.families.training import VARIANTS, Variant, train
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case

STEPS = 20
# Partitioning reorders fp32 sums; a wrong learning rate or a lost gradient is off by 1e-3.
TOLERANCE = 5e-5
WHOLE = (("stage3_param_persistence_threshold", 0),)
"""Every parameter is partitioned, although the models are small."""


@functools.cache
def reference(folder: str, variant: Variant, steps: int) -> tuple[float, ...]:
    """Return the plain engine's losses, also for checkpointing, which changes no arithmetic."""
    (run,) = run_ranks(train, folder, PLAIN, [variant], steps)[0]
    return tuple(run["losses"])


def deviations(
    folder: Path,
    case: Case,
    variants: Sequence[Variant],
    world_size: int,
    exported: Path,
    steps: int = STEPS,
) -> dict[Variant, float]:
    """Return each variant's largest relative loss difference; check the rest of its results."""
    ranks = run_ranks(
        train, str(folder), case, list(variants), steps, str(exported),
        world_size=world_size, timeout_s=240.0 * len(variants),
    )  # fmt: skip
    found = {}
    for variant, run in zip(variants, ranks[0], strict=True):
        expected = reference(str(folder), Variant(lora=variant.lora), steps)
        _check(run, expected, stage=case.stage)
        found[variant] = worst(run["losses"], expected)
    return found


def worst(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def check_run(run: dict[str, Any], *, stage: int) -> None:
    """Check the partitioning, and that plain diffusers predicts the same with the export."""
    assert run["partitioned"] == (stage == 3)
    assert run["same"], "plain diffusers predicts something else from the export"
    assert run.get("drawn", True), "the engine draws something else than the exported model"


def _check(run: dict[str, Any], expected: Sequence[float], *, stage: int) -> None:
    check_run(run, stage=stage)
    learned = [late < early for early, late in zip(expected[:4], expected[-4:], strict=True)]
    assert any(learned), "the run must learn, or agreement means nothing"


__all__ = [
    "STEPS",
    "TOLERANCE",
    "VARIANTS",
    "WHOLE",
    "check_run",
    "deviations",
    "reference",
    "worst",
]
