"""SDXL's full U-Net: fine-tuned whole, in bf16 with fp32 master weights, on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.families import SDXL
from benchmarks.framework import Benchmark, Case, Goal
from benchmarks.large import PLANS, REFERENCE, capped, comparison

TINY: Final[dict[str, Any]] = SDXL | {
    "sample_size": 8,
    "block_out_channels": [16, 32, 32],
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "transformer_layers_per_block": [1, 1, 1],
    "attention_head_dim": [2, 2, 2],
    "norm_num_groups": 8,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 48 + 16,
}
"""The same architecture with few channels."""
_GIB: Final = 2**30


def cases(quick: bool) -> Sequence[Case]:
    """The headline first, then the smallest cards."""
    if quick:
        tiny = {"family": "tiny", "config": TINY, "batch": 2, "side": 64}
        hardest = {"zerotune ZeRO-3": PLANS["zerotune ZeRO-3"]}
        return (
            comparison("64², batch 2", steps=2, plans=hardest, **tiny),
            capped(1.0, steps=1, **tiny),
        )
    full = {"family": "sdxl", "config": SDXL}

    def sized(side: int, batch: int, turn: int) -> Case:
        name = f"{side}², batch {batch}"
        return comparison(name, steps=4, turn=turn, batch=batch, side=side, **full)

    def card(cap: float) -> Case:
        return capped(cap, steps=2, batch=1, side=1024, **full)

    return (
        sized(1024, 8, 0),
        sized(1024, 1, 1),
        card(8),
        card(4),
        card(6),
        sized(128, 8, 2),
        card(24),
        card(12),
        card(16),
        card(10),
        sized(1024, 4, 0),
        sized(768, 8, 1),
        sized(1024, 2, 2),
    )


def _memory(text: str, case: str, contestant: str, gib: float) -> Goal:
    return Goal(
        text=text, case=case, contestant=contestant, quantity="device_bytes", limit=gib * _GIB
    )


GOALS: Final = (
    _memory("1024², batch 8 in 8.5 GiB", "1024², batch 8", "zerotune ZeRO-2", 8.5),
    Goal(
        text="1024², batch 8 in 0.7 of the reference's time",
        case="1024², batch 8",
        contestant="zerotune ZeRO-2",
        quantity="seconds",
        limit=0.7,
        against=REFERENCE,
    ),
    _memory("1024², batch 1 in 6.9 GiB, set-up included", "1024², batch 1", "zerotune ZeRO-2", 6.9),
    _memory("1024², batch 1 in 4 GiB with stage 3", "1024², batch 1", "zerotune ZeRO-3", 4.0),
    _memory("128², batch 8 in 3.5 GiB with stage 3", "128², batch 8", "zerotune ZeRO-3", 3.5),
)

BENCHMARK = Benchmark(
    name="sdxl",
    title="SDXL's full U-Net on one GPU, against the reference's stage-2 configuration",
    cases=cases,
    ours=frozenset(PLANS),
    goals=GOALS,
    device="gpu",
)
