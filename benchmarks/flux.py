"""Flux's transformer, trained whole on one GPU; as deep as the host memory allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import attrs

from benchmarks.families import FLUX
from benchmarks.framework import Benchmark, Case, Context, Measured
from benchmarks.large import PLANS, capped, comparison
from zerotune import DeepSpeedPlan, Platform, detect_platform
from zerotune.plan.families import family
from zerotune.plan.memory.model import Workload

DOUBLE, SINGLE = 19, 38
"""Blocks of the published model."""
_USED: Final = 0.9
"""Of a machine's memory; the rest is Python's, torch's and the system's."""
_BLOCK: Final = re.compile(r"(single_)?transformer_blocks\.(\d+)\.")
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


def depth(platform: Platform) -> tuple[int, int]:
    """Blocks of each kind that a machine's memory holds, two single ones to each double one.

    Counted for the reference too: it does not keep torch from rounding page-locked memory.
    """
    room = _USED * platform.host_memory.limit
    for double in range(DOUBLE, 1, -1):
        if host_need(double, platform) <= room:
            return double, 2 * double
    return 1, 2


def host_need(double: int, platform: Platform) -> int:
    """The most host memory of any contestant with so many double blocks, bytes."""
    facts = family("flux")
    kept = tuple(one for one in facts.parameters if _within(one.name, double))
    facts = attrs.evolve(facts, parameters=kept)
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16", micro_batch_size=1)
    resolved = plan.resolve(platform=platform, model=facts)
    ours = resolved.estimate(Workload(ema="host")).host
    reference = resolved.estimate(Workload(exact_pinning=False)).host
    # As it was loaded, in fp32.
    return max(ours, reference) + 4 * facts.numel


def _within(name: str, double: int) -> bool:
    found = _BLOCK.match(name)
    return found is None or int(found[2]) < (2 * double if found[1] else double)


def cases(quick: bool) -> Sequence[Case]:
    """Two sizes, and two smaller cards."""
    if quick:
        tiny = {"family": "tiny", "config": TINY, "batch": 1, "side": 64}
        return (_scaled(comparison("64², batch 1", steps=1, **tiny)),)
    double, single = depth(detect_platform(log=False))
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
    ours=frozenset(PLANS),
    device="gpu",
)
