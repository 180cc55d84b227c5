"""Flux's transformer, trained whole on one GPU; as deep as the host memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from benchmarks.families import FLUX
from benchmarks.framework import Benchmark, Case, Context, Measured
from benchmarks.large import capped, comparison

DOUBLE, SINGLE = 19, 38
"""Blocks of the published model."""
_OUTSIDE, _DOUBLE, _SINGLE = 100_000_000, 339_800_000, 141_600_000
"""Parameters outside the blocks, and of one block of each kind; rounded up."""
_HOST_BYTES: Final = 27
"""Per parameter: 18 of stage 2's optimizer, 4 of the EMA, 4 as loaded, and some room."""
TINY: Final[dict[str, Any]] = FLUX | {
    "in_channels": 16,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "pooled_projection_dim": 8,
    "axes_dims_rope": [2, 2, 4],
    "num_layers": 1,
    "num_single_layers": 2,
}


def depth(host_bytes: int) -> tuple[int, int]:
    """Blocks of each kind that a machine's memory holds, two single ones to each double one."""
    room = host_bytes * 0.9 / _HOST_BYTES - _OUTSIDE
    pairs = int(room // (_DOUBLE + 2 * _SINGLE))
    double = max(1, min(DOUBLE, pairs))
    return double, 2 * double


def cases(quick: bool) -> Sequence[Case]:
    """Two sizes, and two smaller cards."""
    if quick:
        tiny = {"family": "tiny", "config": TINY, "batch": 1, "side": 64}
        return (_scaled(comparison("64², batch 1", steps=1, **tiny)),)
    from zerotune import detect_platform

    double, single = depth(detect_platform(log=False).host_memory.limit)
    config = FLUX | {"num_layers": double, "num_single_layers": single}
    # Activations are those of the blocks there are, and so are not in the estimate.
    part = {"family": f"flux, {double} + {single} blocks", "config": config, "batch": 1}
    return tuple(
        _scaled(case)
        for case in (
            comparison("1024², batch 1", steps=3, side=1024, **part),
            comparison("512², batch 1", steps=3, turn=1, side=512, **part),
            capped(24, steps=2, side=1024, **part),
            capped(12, steps=2, side=1024, **part),
        )
    )


def _scaled(case: Case) -> Case:
    def measure(settings: Any, context: Context) -> Measured:
        measured = case.measure(settings, context)
        config = settings["config"]
        double, single = config["num_layers"], config["num_single_layers"]
        if (double, single) == (DOUBLE, SINGLE):
            return measured
        note = (
            f"{double} of {DOUBLE} double and {single} of {SINGLE} single blocks: host memory, "
            f"time and the weights on the device grow with the blocks, {DOUBLE / double:.2f} times "
            "for all of them; the activations of one block and the buckets do not."
        )
        return attrs.evolve(measured, notes=(*measured.notes, note))

    return attrs.evolve(case, measure=measure)


BENCHMARK = Benchmark(
    name="flux",
    title="Flux's transformer on one GPU, against the reference's stage-2 configuration",
    cases=cases,
    device="gpu",
)
