"""Stand-ins for a trainer and metrics, for tests of callbacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs

from zerotune.plan import DeepSpeedPlan, ModelFacts, RunFacts
from zerotune.platform import Platform
from zerotune.training.events import StepMetrics
from zerotune.training.memory import expected_memory
from zerotune.training.report import Report

METRICS = StepMetrics(
    step=1,
    loss=0.5,
    lr=1e-3,
    grad_norm=0.25,
    applied=True,
    samples=8,
    seconds=0.1,
    phases={"data": 0.01, "forward": 0.03, "backward": 0.04, "optimizer": 0.01, "ema": 0.0},
    host_peak=3 * 2**30,
    device_peak=None,
)


def trainer(step: int = 0, is_main: bool = True) -> Any:
    return SimpleNamespace(step=step, is_main=is_main)


def drive(callback: Any, *, steps: range, is_main: bool = True, **changes: Any) -> None:
    """Call ``callback`` as one ``fit`` with these steps would."""
    running = trainer(step=steps.start - 1, is_main=is_main)
    callback.on_fit_start(running, steps=steps.stop - 1)
    for step in steps:
        running.step = step
        callback.on_step_end(running, attrs.evolve(METRICS, step=step, **changes))
    callback.on_fit_end(running)


def estimate() -> Any:
    """Return the estimate of 2 ** 19 elements on a GPU with the optimizer in host memory."""
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16", reduce_bucket_size=2**19)
    resolved = plan.resolve(
        platform=Platform.synthetic("cuda"),
        model=ModelFacts.from_shapes([("weight", (2**19,))]),
        world_size=2,
        run=RunFacts(micro_batch_size=4),
        engine="deepspeed",
    )
    return expected_memory(resolved, emas=["host"])


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "first_step": 2,
        "steps": 4,
        "world_size": 2,
        "samples_per_step": 8,
        "losses": (1.0, 0.8, 0.7, 0.6),
        "seconds": 2.0,
        "phases": {"data": 0.1, "forward": 0.5, "backward": 1.0, "optimizer": 0.2, "ema": 0.1},
        "host_before": 2**29,
        "host_peak": 2**30,
        "device_peak": 3 * 2**30,
        "estimate": estimate(),
    }
    return Report(**(fields | changes))
