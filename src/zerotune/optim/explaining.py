"""A resolution as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from zerotune.decisions import render_decisions
from zerotune.optim.grouping import describe
from zerotune.optim.schedulers import SCHEDULERS
from zerotune.plan.choices import SchedulerChoice
from zerotune.plan.schedules import lr_at

if TYPE_CHECKING:
    from zerotune.optim.resolver import OptimizerResolution


def explain_resolution(resolution: OptimizerResolution) -> str:
    """A resolution as text: what runs, its schedule at a few steps, and every decision."""
    optimizer, scheduler = resolution.optimizer, resolution.scheduler
    builder = _BUILDER.get(optimizer.source, f"of the package {optimizer.package}")
    lines = [f"optimizer: {optimizer.name}, runs as {optimizer.implementation} ({builder})"]
    lines.append(f"  on {resolution.situation}")
    if optimizer.weight_decay_mode is not None:
        lines.append(f"  weight decay: {_DECAY[optimizer.weight_decay_mode]}")
    states = ", ".join(resolution.states) or "none"
    lines.append(f"  states per parameter: {states}")
    lines += _arguments(optimizer.params)
    if optimizer.groups:
        lines.append("parameter groups, the first match wins:")
        lines += [f"  {describe(group)}" for group in optimizer.groups]
    if scheduler is None:
        lines.append("scheduler: none, the learning rate stays constant")
    else:
        lines.append(f"scheduler: {scheduler.name}, {SCHEDULERS[scheduler.name].summary.lower()}")
        lines += _arguments(scheduler.params)
        lines += _curve(scheduler, optimizer.lr)
    if resolution.decisions:
        lines += ["decisions:", render_decisions(resolution.decisions)]
    return "\n".join(lines)


_BUILDER: Final = {
    "deepspeed": "built by DeepSpeed",
    "torch": "of torch.optim",
    "zerotune": "zerotune's own",
}

_DECAY: Final = {
    "decoupled": "decoupled from the gradient, as AdamW",
    "l2": "L2, added to the gradient as in Adam",
}


def _arguments(params: Mapping[str, Any]) -> list[str]:
    width = max((len(key) for key in params), default=0)
    return [f"  {key:<{width}}  {_value(value)}" for key, value in params.items()]


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_value(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _curve(scheduler: SchedulerChoice, base_lr: float) -> list[str]:
    """The learning rate where the schedule turns."""
    params = scheduler.params
    warmup = params.get("warmup_num_steps", params.get("num_warmup_steps"))
    total = params.get("total_num_steps", params.get("num_training_steps"))
    steps = {0, 1, 2, 10, 100, 1000}
    steps |= {warmup + 1} if warmup is not None else set()
    steps = {step for step in steps if total is None or step < total}
    steps |= {total - 1} if total is not None else set()
    width = len(str(max(steps)))
    return ["  learning rate of update number (from 0)"] + [
        f"    {step:>{width}}  {lr_at(scheduler, step, base_lr):.6g}" for step in sorted(steps)
    ]
