"""Start resolved plans on the real DeepSpeed, without zerotune's engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Started:
    """Observations of a plan that started and took one step."""

    stage: int
    precision: str
    optimizer: str
    losses: tuple[float, float]
    """Loss before and after the step, on the same batch."""
    partitioned: bool
    """Whether the model's parameters are empty outside a forward pass."""
    swapped: tuple[str, ...]
    """Kinds of swap files found on disk."""


def settled(request: dict[str, Any], folder: Path) -> Any:
    """Return a resolved plan with its optimizer, swapping under ``folder``, and its model."""
    import torch

    from zerotune.plan import DeepSpeedPlan, ModelFacts
    from zerotune.plan.optimizer.resolver import OptimizerResolver

    torch.manual_seed(0)
    # The second matrix is large enough to be offloaded, even in 16 bits.
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 1024),
        torch.nn.Tanh(),
        torch.nn.Linear(1024, 1024),
        torch.nn.Tanh(),
        torch.nn.Linear(1024, 1),
    )
    # Without warm-up the first step already learns.
    constant = {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-4, "warmup_num_steps": 1}
    plan = DeepSpeedPlan.build(
        optimizer={"type": "AdamW", "params": {"lr": 1e-4}},
        scheduler={"type": "WarmupLR", "params": constant},
        nvme_path=folder if "nvme" in request.values() else None,
        **request,
    ).resolve(model=ModelFacts.from_module(model), engine="deepspeed")
    return OptimizerResolver().resolve(plan), model


def start_raw(requests: list[dict[str, Any]], folder: str) -> list[Started]:
    """Start each rendered plan through ``deepspeed.initialize``, one after the other."""
    import deepspeed

    found = []
    for index, request in enumerate(requests):
        here = Path(folder, str(index))
        here.mkdir()
        plan, model = settled(request, here)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=plan.to_deepspeed()
        )
        found.append(_step(engine, engine.backward, engine.step, str(here)))
        engine.destroy()
    return found


def _step(engine: Any, backward: Any, step: Any, folder: str) -> Started:
    import torch

    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(2):
        loss = (engine(x.to(engine.get_data_types()[0])).float() - 1).pow(2).mean()
        losses.append(float(loss.detach()))
        backward(loss)
        step()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[engine.get_data_types()[0]]
    return Started(
        stage=engine.zero_optimization_stage(),
        precision=precision,
        optimizer=type(inner).__name__,
        losses=(losses[0], losses[1]),
        partitioned=all(p.numel() == 0 for p in engine.module.parameters()),
        swapped=tuple(sorted({_kind(each) for each in _files(folder)})),
    )


def _files(folder: str) -> list[Path]:
    return [Path(where, name) for where, _, names in os.walk(folder) for name in names]


def _kind(file: Path) -> str:
    return "optimizer" if "optimizer" in file.parts else "parameters"
