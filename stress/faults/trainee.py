"""A run that saves regularly, may be killed at any moment, and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.offload.engines import net_loss, plan_for, wide_net
from zerotune import DeepSpeedPlan
from zerotune.offload import OffloadManager
from zerotune.plan import ModelFacts
from zerotune.plan.context import Streaming
from zerotune.plan.plan import ResolvedPlan

STEPS = 4
IN_HOST_MEMORY = {"plain": (False, False), "hidden": (True, True)}
"""Runs with AdamW in host memory and an EMA: (with DeepSpeed, step overlaps the next forward)."""
STREAMED = {"streamed": 1.0, "streamed, stepped in the backward pass": 0.0}
"""Gradient clipping of runs with streamed weights."""


def quietly(_: str) -> None:
    """Do nothing."""


def train(
    root: str,
    checkpoints: str,
    tell: Callable[[str], None] = quietly,
    *,
    seed: int = 0,
    save: bool = True,
    param: str = "cpu",
) -> dict[int, float]:
    """Train to the end from the last checkpoint, if there is one; return the losses by step.

    ``tell`` is called with each stage: ``start``, ``ready``, ``step N``, ``saving N``, ``end``.
    ``param`` is the device of the parameters, with the optimizer on NVMe, or a key of
    ``IN_HOST_MEMORY`` or ``STREAMED``; for such a key, the last loss is a sum of all weights and
    EMAs.
    """
    import zerotune

    tell("start")
    model = wide_net(seed)
    in_host_memory = param in IN_HOST_MEMORY or param in STREAMED
    if in_host_memory:
        plan: Any = plan_in_host_memory(param, model)
    else:
        plan = plan_for(param=param, precision="bf16" if param == "nvme" else "fp32")
    losses: dict[int, float] = {}
    shadows: dict[str, Any] = {}
    with zerotune.prepare(model=model, plan=plan, offload=OffloadManager(root=root)) as engine:
        if in_host_memory:
            shadows["ema"] = zerotune.EMAShadow(decay=0.9).attach(engine)
        last = zerotune.latest_checkpoint(checkpoints) if Path(checkpoints).is_dir() else None
        if last is not None:
            zerotune.load_checkpoint(last, engine=engine, shadows=shadows)
        tell("ready")
        while (step := engine.state.global_step) < STEPS:
            loss = net_loss(engine, step, engine.group.rank)
            losses[step] = float(loss.detach())
            engine.backward(loss)
            engine.step()
            for shadow in shadows.values():
                shadow.step()
            tell(f"step {step}")
            if save:
                tell(f"saving {step}")
                folder = f"{checkpoints}/step-{step:08d}"
                zerotune.save_checkpoint(folder, engine=engine, shadows=shadows)
        if in_host_memory:
            averages = shadows["ema"].state_dict().values()
            weights = (fragment.value for fragment in engine.master_weights.read())
            losses[STEPS] = sum(float(each.double().sum()) for each in (*averages, *weights))
    tell("end")
    return losses


def plan_in_host_memory(kind: str, model: torch.nn.Module) -> ResolvedPlan:
    """Return a plan whose optimizer steps in host memory."""
    deepspeed, hidden = IN_HOST_MEMORY.get(kind, (True, False))
    return DeepSpeedPlan.build(
        stage=2,
        offload="cpu",
        precision="bf16",
        micro_batch_size=2,
        gradient_clipping=STREAMED.get(kind, 1.0),
        optimizer={"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    ).resolve(
        model=ModelFacts.from_module(model),
        world_size=1,
        engine="host" if hidden else None,
        deepspeed=deepspeed,
        streamed=kind in STREAMED and Streaming(units=("Linear",), window=2),
    )


def tell_and_train(pipe: Any, *args: Any, **options: Any) -> None:
    """Run ``train`` and report its stages and losses through a pipe."""
    import os

    from stress.faults.workers import quiet

    quiet()
    losses = train(*args, tell=pipe.send, **options)
    pipe.send(losses)
    pipe.close()
    # ``os._exit`` skips the exit handlers of libraries that expect their own launcher.
    os._exit(0)
