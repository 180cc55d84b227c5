"""Peak memory of real training steps against the plan's estimate, over stages, offload and batch.

On a GPU: SDXL's U-Net with random weights at 1024 x 1024. Elsewhere the same run with a small
U-Net, whose device memory is RAM too. There the C library keeps freed blocks to use them again,
which an estimate of what is in use does not count, so both are measured.

Every case runs in a process of its own, so that one that does not fit costs only itself.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.families import SDXL
from benchmarks.framework import (
    Benchmark,
    Case,
    CaseRefused,
    Context,
    Goal,
    Measured,
    Worker,
    WorkerError,
    anon_bytes,
    device_bytes,
)
from benchmarks.framework.hardware import hardware

PLANS: Mapping[str, Mapping[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, RAM": {"stage": 2, "offload": "cpu"},
    "stage 3, RAM": {"stage": 3, "offload": "cpu"},
    "stage 3, RAM with parameters": {"stage": 3, "offload": "cpu", "offload_param": "cpu"},
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
MODELS: Mapping[str, Mapping[str, Any]] = {"sdxl": SDXL, "small": SMALL, "tiny": TINY}
MEASURED, IN_USE, ESTIMATED = "measured", "measured, without freed blocks", "estimated"
_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of glibc's ``mallopt``: larger blocks go back when they are freed."""


def cases(quick: bool) -> Sequence[Case]:
    on_gpu = bool(hardware()["devices"])
    if quick:
        kinds: list[dict[str, Any]] = [{"model": "tiny", "side": 32, "batch": 2}]
    elif on_gpu:
        kinds = [{"model": "sdxl", "side": 1024, "batch": batch} for batch in (1, 4)]
    else:
        kinds = [{"model": "small", "side": 128, "batch": 4}]
    names = ["stage 2, RAM"] if quick else list(PLANS)
    return tuple(
        Case(
            name=f"{name}, batch {kind['batch']}",
            settings={"plan": dict(PLANS[name]), **kind, "steps": 2},
            measure=measure,
        )
        for name in names
        for kind in kinds
    )


def measure(settings: Mapping[str, Any], context: Context) -> Measured:
    """Train a few steps in a fresh process and compare its peak."""
    try:
        found, grown = _train(settings, keeps_freed=True)
        in_use = grown if found["device"] else _train(settings, keeps_freed=False)[1]
    except WorkerError as error:
        last = str(error).strip().splitlines()[-1]
        if "memory" not in last and "died" not in last:
            raise
        raise CaseRefused(last[:300]) from error
    facts = found["facts"]
    if found["device"]:
        context.log(f"  {found['device']}")
        samples = {
            MEASURED: {name: [value] for name, value in found["device"].items()},
            ESTIMATED: {"allocated_bytes": [found["estimated"]]},
        }
    else:
        samples = {
            MEASURED: {"host_bytes": [grown]},
            IN_USE: {"host_bytes": [in_use]},
            ESTIMATED: {"host_bytes": [found["estimated"]]},
        }
    return Measured(samples=samples, baseline=MEASURED, facts=facts)


def _train(settings: Mapping[str, Any], *, keeps_freed: bool) -> tuple[dict[str, Any], int]:
    with Worker(Run, dict(settings), _facts(settings["model"])) as worker:
        before = worker.call("held" if keeps_freed else "held_without_freed_blocks")
        found, peak = worker.peak("train")
    return found, peak - before


@functools.cache
def _facts(model: str) -> Any:
    """Shapes and activations; ``None`` where activations are not worth counting."""
    from zerotune import model_facts
    from zerotune.plan.families import family

    if model == "sdxl":
        return family("sdxl")
    return None if model == "tiny" else model_facts(MODELS[model])


class Run:
    """A model, its engine and a few steps, in a process of its own."""

    def __init__(self, settings: Mapping[str, Any], facts: Any) -> None:
        self._settings, self._facts = settings, facts

    def held(self) -> int:
        """Bytes this process holds with its libraries loaded and nothing else."""
        import diffusers

        import zerotune.training

        _ = diffusers.UNet2DConditionModel, zerotune.training.Trainer
        return anon_bytes()

    def held_without_freed_blocks(self) -> int:
        """The same, and from now on freed blocks of 64 KiB or more go back to the system."""
        if hasattr(library := ctypes.CDLL(None), "mallopt"):
            library.mallopt(_MMAP_THRESHOLD, 2**16)
        return self.held()

    def train(self) -> dict[str, Any]:
        """Build the engine, take steps; what the plan estimates for it."""
        import diffusers

        from zerotune import DeepSpeedPlan, OptimizerResolver, build_engine
        from zerotune.diffusion.facts import example_inputs
        from zerotune.plan.model import ModelFacts

        settings = self._settings
        config = MODELS[settings["model"]]
        precision = "bf16" if settings["model"] == "sdxl" else "fp32"
        plan = DeepSpeedPlan.build(
            precision=precision, micro_batch_size=settings["batch"], **settings["plan"]
        )
        model = getattr(diffusers, config["_class_name"]).from_config(dict(config))
        model.enable_gradient_checkpointing()
        facts = self._facts or ModelFacts.from_module(model)
        resolved = OptimizerResolver().apply(plan.resolve(model=facts))
        with build_engine(model=model, plan=resolved) as engine:
            make, side = example_inputs(model), settings["side"]
            for _ in range(settings["steps"]):
                inputs = make(settings["batch"], side, side)
                arguments = {name: _filled(value, engine) for name, value in inputs.items()}
                engine.backward(engine(**arguments).sample.float().pow(2).mean())
                engine.step()
            device = device_bytes()
        estimate = plan.estimate(facts, batch=settings["batch"], resolution=side)
        return _account(estimate, device, sum(p.numel for p in facts.parameters))


def _account(estimate: Any, device: Mapping[str, float], parameters: int) -> dict[str, Any]:
    from zerotune.plan.memory.estimate import CONTEXT, RUNTIME

    return {
        "device": dict(device),
        # Neither the CUDA context nor the libraries are in what is measured.
        "estimated": estimate.device - CONTEXT if device else estimate.host - RUNTIME,
        "facts": {
            "parameters": parameters,
            "phase of the peak": estimate.peak("device" if device else "host").phase,
            "estimated device GiB": round(estimate.device / 2**30, 3),
            "estimated host GiB": round(estimate.host / 2**30, 3),
        },
    }


def _filled(value: Any, engine: Any) -> Any:
    import torch

    if isinstance(value, dict):
        return {name: _filled(item, engine) for name, item in value.items()}
    dtype = engine.dtype if value.is_floating_point() else value.dtype
    return torch.rand(value.shape, device=engine.device).to(dtype)


BENCHMARK = Benchmark(
    name="memory",
    title="peak memory of real steps against the plan's estimate",
    cases=cases,
    ours=frozenset({ESTIMATED}),
    better="the nearer the estimate is to what is in use, the better",
    goals=tuple(
        Goal(
            text=f"{name}: the estimate is at most 10 % above the peak of the process",
            case=f"{name}, batch {batch}",
            contestant=ESTIMATED,
            against=MEASURED,
            quantity=quantity,
            limit=1.1,
        )
        for name in PLANS
        for batch, quantity in ((1, "allocated_bytes"), (4, "allocated_bytes"), (4, "host_bytes"))
    )
    + tuple(
        Goal(
            text=f"{name}: what is in use, without freed blocks, is at most 3 % above the estimate",
            case=f"{name}, batch 4",
            contestant=IN_USE,
            against=ESTIMATED,
            quantity="host_bytes",
            limit=1.03,
        )
        for name in PLANS
    ),
)
