"""Plans and resolved plans as reports and as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from zerotune._util.table import Block, Line, Page, Table, brief_of, page_of, plain_value
from zerotune._util.text import counted, format_size
from zerotune.decisions import Decision, worst_first
from zerotune.errors import UNSET
from zerotune.plan.context import Context, MastersName
from zerotune.plan.resolved import Resolved
from zerotune.plan.rules.table import check_plan
from zerotune.plan.section import value_at
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO
from zerotune.platform.facts import Platform

Setting = tuple[str, str]
"""A setting in a report: its label and its value, both as text."""


_LABEL_WIDTH: Final = 15


_PARTITIONED = {
    0: "nothing is partitioned; every rank holds everything",
    1: "optimizer states and master weights are partitioned over the ranks",
    2: "optimizer states, master weights and gradients are partitioned over the ranks",
    3: "optimizer states, gradients and parameters are partitioned over the ranks",
    "auto": "chosen when the plan is resolved",
}


_WHERE = {
    "none": "on the device",
    "cpu": "in host memory",
    "nvme": "in files (NVMe)",
    "auto": "chosen when the plan is resolved",
}


def plan_page(plan: Settings, *, world_size: int = 1, platform: Platform | None = None) -> Page:
    """Return a report of a plan: errors, settings, changes made on reading, and findings."""
    findings = check_plan(plan, Context(world_size=world_size, platform=platform))
    errors = [one for one in findings if one.severity == "error"]
    rows = [(label, _unless_refused(label, value, errors)) for label, value in _asked_rows(plan)]
    title = f"Plan from {plan.source}"
    return Page(
        title=f"{title}: cannot run, {counted(len(errors), 'error')}" if errors else title,
        blocks=(
            *_finding_lines(errors, title=""),
            _settings_table(rows),
            *_decision_lines(plan.decisions, plan),
            *_finding_lines(one for one in findings if one.severity != "error"),
        ),
    )


_KEYS_OF_ROWS: Final[Mapping[str, tuple[str, ...]]] = {
    "ZeRO stage": ("zero_optimization.stage",),
    "optimizer state": ("zero_optimization.offload_optimizer",),
    "parameters": ("zero_optimization.offload_param",),
    "precision": ("fp16", "bf16"),
    "batch": (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ),
    "clipping": ("gradient_clipping",),
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
}


def _unless_refused(label: str, value: str, errors: Sequence[Decision]) -> str:
    keys = _KEYS_OF_ROWS[label]
    refused = any(f"{one.key}.".startswith(f"{key}.") for one in errors for key in keys)
    return "refused, see the errors" if refused else value


def resolved_page(resolved: Resolved, further: Iterable[Decision] = ()) -> Page:
    """Return a report of a resolved plan: settings, and all decisions with reasons.

    Args:
        resolved: The plan.
        further: Decisions that the engine made.
    """
    decisions = (*resolved.decisions, *further)
    return Page(
        title=f"Resolved plan from {resolved.requested.source}",
        blocks=(
            _settings_table(_resolved_rows(resolved)),
            *_decision_lines(decisions, resolved.requested),
        ),
    )


def running_page(resolved: Resolved, decisions: Iterable[Decision]) -> Page:
    """Return a short report of a running plan: settings and warnings."""
    shown, _ = shown_and_defaults(decisions)
    return Page(
        title=f"Training: {describe(resolved)}",
        blocks=(
            _settings_table(_resolved_rows(resolved)),
            *_decision_lines((o for o in shown if o.severity == "warning"), resolved.requested),
            Line(f"explain() lists all {len(shown)} decisions", indent=2, style="faint"),
        ),
    )


def _settings_table(settings: list[Setting]) -> Table:
    return Table(rows=tuple(settings), widths=(_LABEL_WIDTH,), gap=1)


def _decision_lines(decisions: Iterable[Decision], asked: Settings) -> Iterator[Block]:
    shown, defaults = shown_and_defaults(decisions)
    overruled = [one for one in shown if _overrules(one, asked)]
    for title, group in (
        ("changed from what was written:", overruled),
        ("chosen automatically:", [one for one in shown if one not in overruled]),
    ):
        if group:
            yield Line(title, style="title")
        for one in group:
            yield Line(str(one), indent=2, mark=f"[{one.severity}]", style=one.severity)
    if defaults:
        yield Line(
            f"and {counted(len(defaults), 'setting')} with the defaults of DeepSpeed 0.19.8, "
            "set explicitly because defaults change; --json lists them",
            style="faint",
        )


def _overrules(one: Decision, asked: Settings) -> bool:
    """Whether the decision changes a value that the user wrote, or is a warning."""
    if one.severity != "note" or one.written is not None or one in asked.decisions:
        return True
    if one.before is None or one.before == AUTO:
        return False
    return value_at(asked.to_dict(), one.key) is not UNSET


def _finding_lines(findings: Iterable[Decision], *, title: str = "findings:") -> Iterator[Line]:
    every = tuple(findings)
    if every and title:
        yield Line(title, style="title")
    for one in every:
        text = f"{one.rule}: {one.as_error()}"
        yield Line(text, indent=2, mark=f"[{one.severity}]", style=one.severity)


_DECISION: Final = ("severity", "key", "before", "after", "why")


_FINDING: Final = ("severity", "rule", "key", "value", "reason", "fix")


def _record_data(records: Iterable[Decision], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the named attributes of each record as plain data."""
    values = [{name: getattr(one, name) for name in names} for one in records]
    return [
        {
            "reason" if name == "why" else name: None if value is UNSET else plain_value(value)
            for name, value in one.items()
        }
        for one in values
    ]


def shown_and_defaults(decisions: Iterable[Decision]) -> tuple[list[Decision], list[Decision]]:
    """Split ``decisions`` into those to show (warnings first) and DeepSpeed's defaults."""
    every = [decision for decision in decisions if decision.is_shown]
    shown = [decision for decision in every if not decision.is_default]
    defaults = [decision for decision in every if decision.is_default]
    return worst_first(shown), defaults


def _asked_rows(plan: Settings) -> list[Setting]:
    """Return the requested settings as pairs of a label and a value in words."""
    return [
        ("ZeRO stage", f"{plan.stage}: {_PARTITIONED[plan.stage]}"),
        ("optimizer state", _WHERE[plan.offload_optimizer_device]),
        ("parameters", _WHERE[plan.offload_param_device if plan.stage == 3 else "none"]),
        ("precision", plan.precision),
        ("batch", _asked_batch(plan)),
        ("clipping", _shown(plan.gradient_clipping, "1.0, DeepSpeed's default")),
        ("optimizer", _asked(plan.optimizer, "AdamW, zerotune's default")),
        ("scheduler", _asked(plan.scheduler, "none; the learning rate is constant")),
    ]


def _resolved_rows(resolved: Resolved) -> list[Setting]:
    """Return the resolved settings as pairs of a label and a value in words."""
    stage = resolved.stage
    batch = (
        f"{resolved.train_batch_size} = micro {resolved.micro_batch_size} x accumulation"
        f" {resolved.gradient_accumulation_steps} x world size {resolved.world_size}"
    )
    choice, schedule, update = resolved.optimizer, resolved.scheduler, resolved.update
    scheduler = "none; the learning rate is constant"
    if schedule is not None:
        scheduler = _call(schedule.name, schedule.params)
    rows = [
        ("engine", f"{_engine(resolved)}, {_ranks(resolved.world_size)}"),
        ("ZeRO stage", f"{stage}: {_PARTITIONED[stage]}"),
        (
            "optimizer state",
            _WHERE[resolved.offload_optimizer] + _swap_folder(resolved, "optimizer"),
        ),
        ("parameters", _weights_at(resolved)),
        *((("update", f"on the device, {_MASTERS[update.masters]}"),) if update else ()),
        ("precision", resolved.precision),
        ("batch", batch),
        ("clipping", str(resolved.gradient_clipping or "off")),
        ("optimizer", f"{_call(choice.name, choice.params)} run by {choice.implementation}"),
        ("scheduler", scheduler),
    ]
    if resolved.model is not None:
        model = resolved.model
        numbers = (
            f"{model.numel:,} elements in {len(model.parameters)} parameters,"
            f" {model.trainable_numel:,} trainable"
        )
        rows.append(("model", f"{model.name}: {numbers}"))
    return rows


def _engine(resolved: Resolved) -> str:
    if not resolved.uses_deepspeed:
        name = "host engine, fp32 weights" if resolved.is_hosted else "plain engine"
        return f"{name} (DeepSpeed is off)"
    if resolved.waits_for_proof:
        return "host engine, once zerotune doctor --prove has passed on the device"
    return "host engine" if resolved.is_hosted else "DeepSpeed"


_MASTERS: Final[Mapping[MastersName, str]] = {
    "fp32": "with fp32 master weights",
    "split": "with split master weights",
    "stochastic": "with bf16 weights that are rounded at random",
}


def _weights_at(resolved: Resolved) -> str:
    streaming = resolved.streaming
    if streaming is None:
        return _WHERE[resolved.offload_param] + _swap_folder(resolved, "param")
    room = (
        f"{streaming.window} units" if streaming.memory is None else format_size(streaming.memory)
    )
    return f"streamed from host memory, with room for {room} on the device"


def describe_plan(plan: Settings) -> str:
    """Summarise the requested settings in one line."""
    optimizer = "" if plan.optimizer is None else f", {_shown(plan.optimizer.type)}"
    return (
        f"ZeRO-{plan.stage}, optimizer {_WHERE[plan.offload_optimizer_device]}, {plan.precision},"
        f" {_asked_batch(plan)}{optimizer}, from {plan.source}"
    )


def describe(resolved: Resolved) -> str:
    """Describe the plan ``resolved`` in one line."""
    parts = [f"ZeRO-{resolved.stage}" if resolved.stage else "no partitioning"]
    if not resolved.uses_deepspeed:
        parts = ["host engine" if resolved.is_hosted else "plain engine"]
    if resolved.streaming is not None:
        parts = ["weights streamed"]
    if resolved.offload_optimizer != "none":
        parts.append(f"optimizer {_WHERE[resolved.offload_optimizer]}")
    if resolved.offload_param != "none" and resolved.streaming is None:
        parts.append(f"parameters {_WHERE[resolved.offload_param]}")
    if resolved.update is not None:
        parts.append("updated on the device")
    return ", ".join([*parts, resolved.precision, _ranks(resolved.world_size)])


def plan_data(
    plan: Settings, *, world_size: int = 1, platform: Platform | None = None
) -> dict[str, Any]:
    """Return the requested settings as a JSON-serialisable dict."""
    findings = check_plan(plan, Context(world_size=world_size, platform=platform))
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
        **{
            name: section and _as_data(section.type, section.params)
            for name, section in (("optimizer", plan.optimizer), ("scheduler", plan.scheduler))
        },
        "decisions": _record_data(plan.decisions, _DECISION),
        "findings": _record_data(findings, _FINDING),
    }


_RESOLVED: Final = (
    *("uses_deepspeed", "world_size", "stage", "offload_optimizer", "offload_param", "nvme_paths"),
    *("precision", "train_batch_size", "micro_batch_size", "gradient_accumulation_steps"),
    "gradient_clipping",
)


def resolved_data(resolved: Resolved) -> dict[str, Any]:
    """Return the resolved settings as a JSON-serialisable dict."""
    choice, schedule = resolved.optimizer, resolved.scheduler
    return {
        **{name: getattr(resolved, name) for name in _RESOLVED},
        "optimizer": _as_data(choice.name, choice.params),
        "scheduler": schedule and _as_data(schedule.name, schedule.params),
        "decisions": _record_data(resolved.decisions, _DECISION),
    }


def _asked_batch(plan: Settings) -> str:
    micro = _shown(plan.train_micro_batch_size_per_gpu, "?")
    accumulation = _shown(plan.gradient_accumulation_steps, "?")
    product = f"micro {micro} x accumulation {accumulation} x world size"
    return product if plan.train_batch_size is None else f"{plan.train_batch_size} = {product}"


def _shown(value: Any, absent: str = "unset") -> str:
    return absent if value is None else str(value)


def _call(name: Any, params: Mapping[str, Any] | None) -> str:
    arguments = ", ".join(f"{key}={value}" for key, value in (params or {}).items())
    return f"{_shown(name)}({arguments})"


def _asked(section: Any, absent: str = "unset") -> str:
    return absent if section is None else _call(section.type, section.params)


def _ranks(world_size: int) -> str:
    return "1 process" if world_size == 1 else f"{world_size} processes"


def _swap_folder(resolved: Resolved, part: str) -> str:
    if part not in resolved.nvme_paths:
        return ""
    return f" under {resolved.nvme_paths[part] or 'a leased folder'}"


def _as_data(name: Any, params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"name": name, "params": plain_value(params or {})}


brief_of.register(Settings, describe_plan)


brief_of.register(Resolved, lambda one: f"{describe(one)}; {len(one.decisions)} decisions")


page_of.register(Settings, plan_page)


page_of.register(Resolved, resolved_page)
