"""Plans in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from zerotune.decisions import Decision, render_decisions
from zerotune.errors import UNSET
from zerotune.plan.filling import DEEPSPEED_DEFAULT

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan
    from zerotune.plan.resolved import ResolvedPlan
    from zerotune.plan.rules import Finding
    from zerotune.platform import Platform

Row = tuple[str, str]
"""A label and a value, both in words."""

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


def explain_plan(
    plan: DeepSpeedPlan, *, world_size: int = 1, platform: Platform | None = None
) -> str:
    """What a plan asks for, and what the rules have to say about it, as text."""
    return "\n".join(
        [
            f"Plan from {plan.source}",
            *_row_lines(plan_rows(plan)),
            *_decision_lines(plan.decisions),
            *_finding_lines(plan.check(world_size=world_size, platform=platform)),
        ]
    )


def explain_resolved(resolved: ResolvedPlan) -> str:
    """What will run, and why, as text."""
    return "\n".join(
        [
            f"Resolved plan from {resolved.requested.source}",
            *_row_lines(resolved_rows(resolved)),
            *_decision_lines(resolved.decisions),
        ]
    )


def plan_rows(plan: DeepSpeedPlan) -> list[Row]:
    """What a plan asks for, as pairs of a label and a value in words."""
    batch = (
        _show(plan.train_batch_size),
        _show(plan.train_micro_batch_size_per_gpu),
        _show(plan.gradient_accumulation_steps),
    )
    return [
        ("ZeRO stage", f"{plan.stage}: {_PARTITIONED[plan.stage]}"),
        ("optimizer lives", _PLACES[plan.offload_optimizer_device]),
        ("parameters wait", _PLACES[plan.offload_param_device]),
        ("precision", plan.precision),
        ("batch", _batch(*batch, "world size")),
        ("clipping", _show(plan.gradient_clipping)),
        ("optimizer", _section(plan.optimizer)),
        ("scheduler", _section(plan.scheduler)),
    ]


def resolved_rows(resolved: ResolvedPlan) -> list[Row]:
    """What will run, as pairs of a label and a value in words."""
    stage = resolved.stage
    batch = (
        resolved.train_batch_size,
        resolved.micro_batch_size,
        resolved.gradient_accumulation_steps,
        f"world size {resolved.world_size}",
    )
    engine = "DeepSpeed" if resolved.uses_deepspeed else "plain engine (DeepSpeed is off)"
    rows = [
        ("engine", f"{engine}, {_ranks(resolved.world_size)}"),
        ("ZeRO stage", f"{stage}: {_PARTITIONED[stage]}"),
        ("optimizer lives", _PLACES[resolved.offload_optimizer] + _folder(resolved, "optimizer")),
        ("parameters wait", _PLACES[resolved.offload_param] + _folder(resolved, "param")),
        ("precision", resolved.precision),
        ("batch", _batch(*batch)),
        ("clipping", str(resolved.gradient_clipping or "off")),
        ("optimizer", _optimizer(resolved)),
        ("scheduler", _scheduler(resolved)),
    ]
    if resolved.model is not None:
        model = resolved.model
        numbers = (
            f"{model.numel:,} elements in {len(model.parameters)} parameters,"
            f" {model.trainable_numel:,} trainable"
        )
        rows.append(("model", f"{model.name}: {numbers}"))
    return rows


def describe(resolved: ResolvedPlan) -> str:
    """A resolved plan in one line."""
    parts = [f"ZeRO-{resolved.stage}" if resolved.stage else "no partitioning"]
    if not resolved.uses_deepspeed:
        parts = ["plain engine"]
    if resolved.offload_optimizer != "none":
        parts.append(f"optimizer {_PLACES[resolved.offload_optimizer]}")
    if resolved.offload_param != "none":
        parts.append(f"parameters {_PLACES[resolved.offload_param]}")
    return ", ".join([*parts, resolved.precision, _ranks(resolved.world_size)])


def summarise_plan(
    plan: DeepSpeedPlan, *, world_size: int = 1, platform: Platform | None = None
) -> dict[str, Any]:
    """What a plan asks for, as plain data that JSON can hold."""
    findings = plan.check(world_size=world_size, platform=platform)
    return {
        "source": plan.source,
        "stage": plan.stage,
        "offload_optimizer": plan.offload_optimizer_device,
        "offload_param": plan.offload_param_device,
        "precision": plan.precision,
        "train_batch_size": plan.train_batch_size,
        "micro_batch_size": plan.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_clipping": plan.gradient_clipping,
        "optimizer": _written(plan.optimizer),
        "scheduler": _written(plan.scheduler),
        "decisions": [decision_data(decision) for decision in plan.decisions],
        "findings": [finding_data(finding) for finding in findings],
    }


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


def finding_data(finding: Finding) -> dict[str, Any]:
    """A finding of the rules as plain data."""
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "key": finding.key,
        "value": None if finding.value is UNSET else _plain(finding.value),
        "reason": finding.reason,
        "fix": finding.fix,
    }


def told_and_defaults(
    decisions: Iterable[Decision],
) -> tuple[list[Decision], list[Decision]]:
    """Decisions worth telling, warnings first, and those that write DeepSpeed's own defaults."""
    everything = list(decisions)
    told = [decision for decision in everything if decision.reason != DEEPSPEED_DEFAULT]
    defaults = [decision for decision in everything if decision.reason == DEEPSPEED_DEFAULT]
    return sorted(told, key=lambda decision: decision.severity != "warning"), defaults


def _row_lines(rows: Iterable[Row]) -> list[str]:
    return [f"  {label:<15} {value}" for label, value in rows]


def _finding_lines(findings: Iterable[Finding]) -> list[str]:
    lines = [f"  {finding}" for finding in findings]
    return ["findings:", *lines] if lines else []


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value)


def _decision_lines(decisions: Iterable[Decision]) -> list[str]:
    told, defaults = told_and_defaults(decisions)
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


def _written(section: Any) -> dict[str, Any] | None:
    if section is None:
        return None
    return {"name": section.type, "params": _plain(section.params or {})}


def _choice(choice: Any) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {"name": choice.name, "params": _plain(choice.params)}
