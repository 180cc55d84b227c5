"""A run that saves as it goes, may be killed at any moment, and goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.offload.engines import net_loss, plan_for, wide_net
from zerotune.offload import OffloadManager

STEPS = 4


def quietly(_: str) -> None:
    """Tells nobody."""


def train(
    root: str,
    checkpoints: str,
    tell: Callable[[str], None] = quietly,
    *,
    seed: int = 0,
    save: bool = True,
    param: str = "cpu",
) -> dict[int, float]:
    """Train to the end from the last checkpoint, if there is one; losses by step.

    ``tell`` hears of each stage: ``start``, ``ready``, ``step N``, ``saving N``, ``end``.
    """
    import zerotune

    tell("start")
    plan = plan_for(param=param, precision="bf16" if param == "nvme" else "fp32")
    losses = {}
    with zerotune.prepare(
        model=wide_net(seed), plan=plan, offload=OffloadManager(root=root)
    ) as engine:
        last = zerotune.latest_checkpoint(checkpoints) if Path(checkpoints).is_dir() else None
        if last is not None:
            zerotune.load_checkpoint(last, engine=engine)
        tell("ready")
        while (step := engine.state.global_step) < STEPS:
            loss = net_loss(engine, step, engine.group.rank)
            losses[step] = float(loss.detach())
            engine.backward(loss)
            engine.step()
            tell(f"step {step}")
            if save:
                tell(f"saving {step}")
                zerotune.save_checkpoint(f"{checkpoints}/step-{step:08d}", engine=engine)
    tell("end")
    return losses


def tell_and_train(pipe: Any, *args: Any, **options: Any) -> None:
    """``train`` in a process that says through a pipe how far it is."""
    import os

    from tests.faults.workers import quiet

    quiet()
    losses = train(*args, tell=pipe.send, **options)
    pipe.send(losses)
    pipe.close()
    # Skips the exit handlers of libraries that expect their own launcher.
    os._exit(0)
