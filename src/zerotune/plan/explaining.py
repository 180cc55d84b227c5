"""Plans in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from zerotune.decisions import Decision, render_decisions
from zerotune.plan.filling import DEEPSPEED_DEFAULT

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan
    from zerotune.plan.resolved import ResolvedPlan

_PARTITIONED = {
    0: "nothing is partitioned; every rank holds everything",
    1: "optimizer states and master weights are partitioned over the ranks",
    2: "optimizer states, master weights and gradients are partitioned over the ranks",
    3: "optimizer states, gradients and parameters are partitioned over the ranks",
    "auto": "chosen when the plan is resolved",
}
_PLACES = {
    "none": "on the device",
    "cpu": "in host memory",
    "nvme": "in files (NVMe)",
    "auto": "chosen when the plan is resolved",
}


def explain_plan(plan: DeepSpeedPlan) -> str:
    """What a plan asks for, as text."""
    train, micro, accumulation = (
        _show(plan.train_batch_size),
        _show(plan.train_micro_batch_size_per_gpu),
        _show(plan.gradient_accumulation_steps),
    )
    lines = [
        f"Plan from {plan.source}",
        f"  ZeRO stage      {plan.stage}: {_PARTITIONED[plan.stage]}",
        f"  optimizer lives {_PLACES[plan.offload_optimizer_device]}",
        f"  parameters wait {_PLACES[plan.offload_param_device]}",
        f"  precision       {plan.precision}",
        f"  batch           {_batch(train, micro, accumulation, 'world size')}",
        f"  clipping        {_show(plan.gradient_clipping)}",
        f"  optimizer       {_section(plan.optimizer)}",
        f"  scheduler       {_section(plan.scheduler)}",
    ]
    return "\n".join([*lines, *_decision_lines(plan.decisions)])


def explain_resolved(resolved: ResolvedPlan) -> str:
    """What will run, and why, as text."""
    stage = resolved.stage
    batch = (
        resolved.train_batch_size,
        resolved.micro_batch_size,
        resolved.gradient_accumulation_steps,
        f"world size {resolved.world_size}",
    )
    engine = "DeepSpeed" if resolved.uses_deepspeed else "plain engine (DeepSpeed is off)"
    lines = [
        f"Resolved plan from {resolved.requested.source}",
        f"  engine          {engine}, {_ranks(resolved.world_size)}",
        f"  ZeRO stage      {stage}: {_PARTITIONED[stage]}",
        f"  optimizer lives {_PLACES[resolved.offload_optimizer]}{_folder(resolved, 'optimizer')}",
        f"  parameters wait {_PLACES[resolved.offload_param]}{_folder(resolved, 'param')}",
        f"  precision       {resolved.precision}",
        f"  batch           {_batch(*batch)}",
        f"  clipping        {resolved.gradient_clipping or 'off'}",
        f"  optimizer       {_optimizer(resolved)}",
        f"  scheduler       {_scheduler(resolved)}",
    ]
    if resolved.model is not None:
        model = resolved.model
        lines.append(
            f"  model           {model.name}: {model.numel:,} elements in"
            f" {len(model.parameters)} parameters, {model.trainable_numel:,} trainable"
        )
    return "\n".join([*lines, *_decision_lines(resolved.decisions)])


def summarise(resolved: ResolvedPlan) -> dict[str, Any]:
    """What will run, as plain data that JSON can hold."""
    return {
        "uses_deepspeed": resolved.uses_deepspeed,
        "world_size": resolved.world_size,
        "stage": resolved.stage,
        "offload_optimizer": resolved.offload_optimizer,
        "offload_param": resolved.offload_param,
        "nvme_paths": resolved.nvme_paths,
        "precision": resolved.precision,
        "train_batch_size": resolved.train_batch_size,
        "micro_batch_size": resolved.micro_batch_size,
        "gradient_accumulation_steps": resolved.gradient_accumulation_steps,
        "gradient_clipping": resolved.gradient_clipping,
        "optimizer": _choice(resolved.optimizer),
        "scheduler": _choice(resolved.scheduler),
        "decisions": [decision_data(decision) for decision in resolved.decisions],
    }


def decision_data(decision: Decision) -> dict[str, Any]:
    """A decision as plain data."""
    return {
        "key": decision.key,
        "before": _plain(decision.before),
        "after": _plain(decision.after),
        "reason": decision.reason,
        "severity": decision.severity,
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value)


def _decision_lines(decisions: Iterable[Decision]) -> list[str]:
    everything = list(decisions)
    defaults = [decision for decision in everything if decision.reason == DEEPSPEED_DEFAULT]
    told = [decision for decision in everything if decision.reason != DEEPSPEED_DEFAULT]
    lines = ["decisions:", render_decisions(told)] if told else []
    if defaults:
        keys = ", ".join(f"{decision.key} = {decision.after}" for decision in defaults)
        lines.append("written as DeepSpeed 0.19.8 has them by default, because defaults move:")
        lines.extend(textwrap.wrap(keys, 96, initial_indent="  ", subsequent_indent="  "))
    return lines


def _batch(train: Any, micro: Any, accumulation: Any, world: str) -> str:
    return f"{train} = micro {micro} x accumulation {accumulation} x {world}"


def _show(value: Any) -> str:
    return "unset" if value is None else str(value)


def _section(section: Any) -> str:
    if section is None:
        return "unset"
    params = ", ".join(f"{key}={value}" for key, value in (section.params or {}).items())
    return f"{_show(section.type)}({params})"


def _ranks(world_size: int) -> str:
    return "1 process" if world_size == 1 else f"{world_size} processes"


def _folder(resolved: ResolvedPlan, part: str) -> str:
    if part not in resolved.nvme_paths:
        return ""
    return f" under {resolved.nvme_paths[part] or 'a leased folder'}"


def _optimizer(resolved: ResolvedPlan) -> str:
    choice = resolved.optimizer
    if choice is None:
        return f"{_section(resolved.plan.optimizer)}, not settled yet"
    params = ", ".join(f"{key}={value}" for key, value in choice.params.items())
    return f"{choice.name}({params}) run by {choice.implementation}"


def _scheduler(resolved: ResolvedPlan) -> str:
    if resolved.optimizer is None:
        return f"{_section(resolved.plan.scheduler)}, not settled yet"
    if resolved.scheduler is None:
        return "none; the learning rate is constant"
    params = ", ".join(f"{key}={value}" for key, value in resolved.scheduler.params.items())
    return f"{resolved.scheduler.name}({params})"


def _choice(choice: Any) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {"name": choice.name, "params": _plain(choice.params)}
