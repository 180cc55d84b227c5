"""Peak memory of real training steps, compared with the plan's estimate, over stages and offload.

The model is a small U-Net without a GPU, so device memory is RAM too. The C library keeps freed
blocks for reuse, which an estimate of memory in use does not count. So peaks are measured with and
without freed blocks, each in its own process. ``python -m bench.gpu`` compares SDXL on a GPU with
its estimates.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.runner import Benchmark, Case, Goal, Measured
from bench.workers import Worker, load_libraries

PLANS: Mapping[str, Mapping[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, optimizer in RAM": {"stage": 2, "offload": "cpu"},
    "stage 3, optimizer in RAM": {"stage": 3, "offload": "cpu"},
    "stage 3, optimizer and parameters in RAM": {
        "stage": 3,
        "offload": "cpu",
        "offload_param": "cpu",
    },
}
SMALL: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 32,
    "block_out_channels": [64, 128, 256],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 64,
    "attention_head_dim": 8,
    "norm_num_groups": 16,
}
TINY = SMALL | {
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 16,
    "layers_per_block": 1,
}
MODELS: Mapping[str, Mapping[str, Any]] = {"small": SMALL, "tiny": TINY}
MEASURED, IN_USE, ESTIMATED = "measured", "measured, without freed blocks", "estimated"
_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of glibc's ``mallopt``: larger blocks are returned when they are freed."""


def cases(quick: bool) -> Sequence[Case]:
    model = {"model": "tiny", "side": 32} if quick else {"model": "small", "side": 128}
    size = {**model, "batch": 2 if quick else 4, "steps": 2}
    names = ["stage 2, optimizer in RAM"] if quick else list(PLANS)
    return tuple(
        Case(f"{name}, batch {size['batch']}", measure, {"plan": dict(PLANS[name]), **size})
        for name in names
    )


def measure(settings: Mapping[str, Any], _scratch: Path) -> Measured:
    """Train a few steps in a fresh process and compare its peak."""
    found, grown = _train(settings, keeps_freed=True)
    _, in_use = _train(settings, keeps_freed=False)
    values = {MEASURED: grown, IN_USE: in_use, ESTIMATED: found["estimated"]}
    return Measured(
        samples={name: {"host_bytes": [nbytes]} for name, nbytes in values.items()},
        baseline=MEASURED,
        facts=found["facts"],
    )


def _train(settings: Mapping[str, Any], *, keeps_freed: bool) -> tuple[dict[str, Any], int]:
    with Worker(Run, dict(settings), _facts(settings["model"])) as worker:
        before = worker.call("held" if keeps_freed else "held_without_freed_blocks")
        found, peak = worker.peak("train")
    return found, peak - before


@functools.cache
def _facts(model: str) -> Any:
    """Return shapes and activations, or ``None`` where activations are negligible."""
    from zerotune import model_facts

    return None if model == "tiny" else model_facts(MODELS[model])


class Run:
    """A model, its engine and a few steps, in its own process."""

    def __init__(self, settings: Mapping[str, Any], facts: Any) -> None:
        self._settings, self._facts = settings, facts

    def held(self) -> int:
        """Return memory in use after a tiny first step, which loads and compiles everything."""
        load_libraries()
        self._steps("tiny", batch=1, side=32, steps=1)
        return load_libraries()

    def held_without_freed_blocks(self) -> int:
        """Like ``held``; from now on, freed blocks of 64 KiB or more go back to the system."""
        if hasattr(library := ctypes.CDLL(None), "mallopt"):
            library.mallopt(_MMAP_THRESHOLD, 2**16)
        return self.held()

    def train(self) -> dict[str, Any]:
        """Build the engine and train; return the plan's estimate and facts."""
        from zerotune.plan.memory.estimate import RUNTIME
        from zerotune.plan.memory.items import Workload

        settings = self._settings
        size = {key: settings[key] for key in ("batch", "side")}
        engine = self._steps(settings["model"], steps=settings["steps"], **size)
        workload = Workload(batch=size["batch"], height=size["side"], width=size["side"])
        estimate = engine.plan.estimate(workload)
        facts = engine.plan.model
        return {
            # Exclude the libraries, as the measurement does.
            "estimated": estimate.host - RUNTIME,
            "facts": {
                "parameters": sum(p.numel for p in facts.parameters),
                "phase of the peak": estimate.peak("host").phase,
            },
        }

    def _steps(self, name: str, *, batch: int, side: int, steps: int) -> Any:
        import diffusers

        from zerotune import DeepSpeedPlan, OptimizerResolver
        from zerotune.diffusion.facts import example_inputs
        from zerotune.plan.facts import ModelFacts
        from zerotune.training.setup import build_engine

        plan = DeepSpeedPlan.build(
            precision="fp32", micro_batch_size=batch, **self._settings["plan"]
        )
        model = diffusers.UNet2DConditionModel.from_config(dict(MODELS[name]))
        model.enable_gradient_checkpointing()
        counted = self._facts if name == self._settings["model"] else None
        facts = counted or ModelFacts.from_module(model)
        resolved = OptimizerResolver().resolve(plan.resolve(model=facts))
        with build_engine(model=model, plan=resolved) as engine:
            make = example_inputs(model)
            for _ in range(steps):
                inputs = make(batch, side, side)
                arguments = {name: _filled(value, engine) for name, value in inputs.items()}
                engine.backward(engine(**arguments).sample.float().pow(2).mean())
                engine.step()
        return engine


def _filled(value: Any, engine: Any) -> Any:
    import torch

    if isinstance(value, dict):
        return {name: _filled(item, engine) for name, item in value.items()}
    dtype = engine.dtype if value.is_floating_point() else value.dtype
    return torch.rand(value.shape, device=engine.device).to(dtype)


_ABOVE = "the estimate is at most 10 % above the process's peak memory"
_BELOW = "measured memory, excluding freed blocks, is at most 3 % above the estimate"

BENCHMARK = Benchmark(
    name="memory",
    title="the peak memory of real steps, compared with the memory estimate",
    cases=cases,
    ours=(ESTIMATED,),
    better="the closer the estimate is to the memory in use, the better",
    goals=tuple(
        Goal(f"{name}: {text}", f"{name}, batch 4", one, "host_bytes", limit, other)
        for text, one, limit, other in (
            (_ABOVE, ESTIMATED, 1.1, MEASURED), (_BELOW, IN_USE, 1.03, ESTIMATED),
        )
        for name in PLANS
    ),
)  # fmt: skip
