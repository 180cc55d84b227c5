"""Plans and resolved plans as data, and as reports of these data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from zerotune._util.table import Block, Line, Page, Table, brief_of, page_of, plain_value
from zerotune._util.text import counted, format_size
from zerotune.decisions import SEVERITIES, Decision
from zerotune.errors import UNSET
from zerotune.plan.context import Context, MastersName
from zerotune.plan.optimizer.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.optimizer.choose import Chosen
from zerotune.plan.resolved import Resolved
from zerotune.plan.rules.table import check_plan
from zerotune.plan.section import value_at
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO
from zerotune.platform.facts import Platform

Data = Mapping[str, Any]

_LABEL_WIDTH: Final = 15
_CONSTANT: Final = "none; the learning rate is constant"
_PARTITIONED: Final[Mapping[Any, str]] = {
    0: "nothing is partitioned; every rank holds everything",
    1: "optimizer states and master weights are partitioned over the ranks",
    2: "optimizer states, master weights and gradients are partitioned over the ranks",
    3: "optimizer states, gradients and parameters are partitioned over the ranks",
    "auto": "chosen when the plan is resolved",
}
_WHERE: Final = {
    "none": "on the device",
    "cpu": "in host memory",
    "nvme": "in files (NVMe)",
    "auto": "chosen when the plan is resolved",
}
_MASTERS: Final[Mapping[MastersName, str]] = {
    "fp32": "with fp32 master weights",
    "split": "with split master weights",
    "stochastic": "with bf16 weights that are rounded at random",
}


# -- Data.


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
            name: section and {"name": section.type, "params": plain_value(section.params or {})}
            for name, section in (("optimizer", plan.optimizer), ("scheduler", plan.scheduler))
        },
        "decisions": _decisions_data(plan.decisions, plan),
        "findings": [_finding_data(one) for one in findings],
    }


_RESOLVED: Final = (
    *("uses_deepspeed", "world_size", "stage", "offload_optimizer", "offload_param", "nvme_paths"),
    *("precision", "train_batch_size", "micro_batch_size", "gradient_accumulation_steps"),
    "gradient_clipping",
)


def resolved_data(
    resolved: Resolved, decisions: Iterable[Decision] | None = None
) -> dict[str, Any]:
    """Return the resolved settings as a JSON-serialisable dict.

    Args:
        resolved: The plan.
        decisions: Decisions to list; by default those of the plan.
    """
    model, streaming, update = resolved.model, resolved.streaming, resolved.update
    decisions = resolved.decisions if decisions is None else decisions
    return {
        "source": resolved.requested.source,
        "title": describe(resolved),
        "engine": _engine(resolved),
        **{name: getattr(resolved, name) for name in _RESOLVED},
        "streamed": streaming and {"window": streaming.window, "memory": streaming.memory},
        "masters": update and update.masters,
        **_choice_data(resolved.optimizer, resolved.scheduler),
        "model": model
        and {
            "name": model.name,
            "elements": model.numel,
            "trainable_elements": model.trainable_numel,
            "parameters": len(model.parameters),
        },
        "decisions": _decisions_data(decisions, resolved.requested),
    }


def chosen_data(chosen: Chosen) -> dict[str, Any]:
    """Return a choice of optimizer and schedule as a JSON-serialisable dict."""
    choice = _choice_data(chosen.optimizer, chosen.scheduler)
    return {**choice, "decisions": _decisions_data(chosen.decisions, Settings())}


def _choice_data(optimizer: OptimizerChoice, scheduler: SchedulerChoice | None) -> dict[str, Any]:
    return {
        "optimizer": {
            "name": optimizer.name,
            "params": plain_value(optimizer.params),
            "implementation": optimizer.implementation,
        },
        "scheduler": scheduler
        and {"name": scheduler.name, "params": plain_value(scheduler.params)},
    }


def _engine(resolved: Resolved) -> str:
    if not resolved.uses_deepspeed:
        name = "host engine, fp32 weights" if resolved.is_hosted else "plain engine"
        return f"{name} (DeepSpeed is off)"
    if resolved.waits_for_proof:
        return "host engine, once zerotune doctor --prove has passed on the device"
    return "host engine" if resolved.is_hosted else "DeepSpeed"


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


def _decisions_data(decisions: Iterable[Decision], asked: Settings) -> list[dict[str, Any]]:
    return [
        {
            "severity": one.severity,
            "key": one.key,
            "before": _plain(one.before),
            "after": _plain(one.after),
            "reason": one.why,
            "kind": _kind_of(one, asked),
            "text": str(one),
        }
        for one in decisions
    ]


def _kind_of(one: Decision, asked: Settings) -> str:
    """Return whether a decision changes what the user wrote, chooses, or changes nothing."""
    if not one.is_shown:
        return "kept"
    if one.is_default:
        return "default"
    if one.severity != "note" or one.written is not None or one in asked.decisions:
        return "changed"
    if one.before is None or one.before == AUTO:
        return "chosen"
    return "chosen" if value_at(asked.to_dict(), one.key) is UNSET else "changed"


def _finding_data(one: Decision) -> dict[str, Any]:
    names = ("severity", "rule", "key", "value", "reason", "fix")
    data = {name: _plain(getattr(one, name)) for name in names}
    return {**data, "text": f"{one.rule}: {one.as_error()}"}


def _plain(value: Any) -> Any:
    return None if value is UNSET else plain_value(value)


# -- Reports of the data.


def plan_page(data: Data) -> Page:
    """Return a report of ``plan_data``: errors, settings, changes made on reading, findings."""
    errors = [one for one in data["findings"] if one["severity"] == "error"]
    others = [one for one in data["findings"] if one["severity"] != "error"]
    title = f"Plan from {data['source']}"
    return Page(
        title=f"{title}: cannot run, {counted(len(errors), 'error')}" if errors else title,
        blocks=(
            *_lines("", errors),
            _settings_table(data),
            *_decision_lines(data),
            *_lines("findings:", others),
        ),
    )


def resolved_page(data: Data) -> Page:
    """Return a report of ``resolved_data``: settings, and all decisions with reasons."""
    title = f"Resolved plan from {data['source']}"
    return Page(title=title, blocks=(_settings_table(data), *_decision_lines(data)))


def chosen_page(data: Data) -> Page:
    """Return a report of ``chosen_data``: optimizer and schedule, and the decisions behind them."""
    rows = tuple((name, _call(data[name], _CONSTANT)) for name in ("optimizer", "scheduler"))
    table = Table(rows=rows, widths=(_LABEL_WIDTH,), gap=1)
    return Page(title="Optimizer and schedule", blocks=(table, *_decision_lines(data)))


def running_page(data: Data) -> Page:
    """Return a short report of ``resolved_data`` for a running plan: settings and warnings."""
    shown = [one for one in data["decisions"] if one["kind"] in ("changed", "chosen")]
    warnings = [one for one in shown if one["severity"] == "warning"]
    return Page(
        title=f"Training: {data['title']}",
        blocks=(
            _settings_table(data),
            *_lines("changed from what was written:", warnings),
            Line(f"explain() lists all {len(shown)} decisions", indent=2, style="faint"),
        ),
    )


def _settings_table(data: Data) -> Table:
    stage, train = data["stage"], data["train_batch_size"]
    micro, steps = data["micro_batch_size"], data["gradient_accumulation_steps"]
    batch = (
        f"micro {_shown(micro, '?')} x accumulation {_shown(steps, '?')} x world size"
        f" {data.get('world_size', '')}"
    )
    clipping = _shown(data["gradient_clipping"], "1.0, DeepSpeed's default")
    rows = {
        "engine": data.get("engine") and f"{data['engine']}, {_ranks(data['world_size'])}",
        "ZeRO stage": f"{stage}: {_PARTITIONED[stage]}",
        "optimizer state": _place(data, "optimizer"),
        "parameters": _place(data, "param"),
        "update": data.get("masters") and f"on the device, {_MASTERS[data['masters']]}",
        "precision": data["precision"],
        "batch": (batch if train is None else f"{train} = {batch}").rstrip(),
        "clipping": clipping if data["gradient_clipping"] != 0 else "off",
        "optimizer": _call(data["optimizer"], "AdamW, zerotune's default"),
        "scheduler": _call(data["scheduler"], _CONSTANT),
        "model": data.get("model") and _model(data["model"]),
    }
    shown = tuple((label, value) for label, value in rows.items() if value)
    return Table(rows=shown, widths=(_LABEL_WIDTH,), gap=1)


def _place(data: Data, part: str) -> str:
    """Say where the parameters or the optimizer's states are."""
    if part == "param" and data.get("streamed"):
        window, memory = data["streamed"]["window"], data["streamed"]["memory"]
        room = f"{window} units" if memory is None else format_size(memory)
        return f"streamed from host memory, with room for {room} on the device"
    if part == "param" and data["stage"] != 3:
        return _WHERE["none"]
    where, folders = _WHERE[data[f"offload_{part}"]], data.get("nvme_paths", {})
    return f"{where} under {folders[part] or 'a leased folder'}" if part in folders else where


def _call(choice: Data | None, absent: str) -> str:
    if choice is None:
        return absent
    arguments = ", ".join(f"{key}={value}" for key, value in choice["params"].items())
    runs = f" run by {choice['implementation']}" if "implementation" in choice else ""
    return f"{_shown(choice['name'], 'unset')}({arguments}){runs}"


def _model(model: Data) -> str:
    return (
        f"{model['name']}: {model['elements']:,} elements in {model['parameters']} parameters,"
        f" {model['trainable_elements']:,} trainable"
    )


def _decision_lines(data: Data) -> Iterator[Block]:
    kinds = {"changed": "changed from what was written:", "chosen": "chosen automatically:"}
    for kind, title in kinds.items():
        yield from _lines(title, [one for one in data["decisions"] if one["kind"] == kind])
    defaults = sum(one["kind"] == "default" for one in data["decisions"])
    if defaults:
        yield Line(
            f"and {counted(defaults, 'setting')} with the defaults of DeepSpeed 0.19.8, "
            "set explicitly because defaults change; --json lists them",
            style="faint",
        )


def _lines(title: str, records: list[dict[str, Any]]) -> Iterator[Line]:
    """Yield a title and the records' texts, worst first; nothing if there are none."""
    if records and title:
        yield Line(title, style="title")
    for one in sorted(records, key=lambda one: SEVERITIES.index(one["severity"])):
        yield Line(one["text"], indent=2, mark=f"[{one['severity']}]", style=one["severity"])


def _shown(value: Any, absent: str) -> str:
    return absent if value is None else str(value)


def _ranks(world_size: int) -> str:
    return counted(world_size, "process", "processes")


# -- One-line summaries, and reports by class.


def describe_plan(plan: Settings) -> str:
    """Summarise the requested settings in one line."""
    optimizer = "" if plan.optimizer is None else f", {_shown(plan.optimizer.type, 'unset')}"
    return (
        f"ZeRO-{plan.stage}, optimizer {_WHERE[plan.offload_optimizer_device]}, {plan.precision}"
        f"{optimizer}, from {plan.source}"
    )


brief_of.register(Settings, describe_plan)
brief_of.register(Resolved, lambda one: f"{describe(one)}; {len(one.decisions)} decisions")
page_of.register(Settings, lambda plan: plan_page(plan_data(plan)))
page_of.register(Chosen, lambda chosen: chosen_page(chosen_data(chosen)))
page_of.register(Resolved, lambda resolved: resolved_page(resolved_data(resolved)))
