"""Reports of plans, estimates and advice, as pages (text, Markdown or notebook) and as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune._util.table import Block, Line, Page, Table, brief_of, page_of, plain_value
from zerotune._util.text import common_unit, counted, format_size
from zerotune.decisions import Decision, worst_first
from zerotune.errors import UNSET
from zerotune.plan.advise import Advised, Budget, Candidate, machine_needs
from zerotune.plan.context import Context, MastersName
from zerotune.plan.memory.estimate import (
    PHASES,
    PLACES,
    Estimate,
    MemoryItem,
    Phase,
    Place,
    Workload,
)
from zerotune.plan.memory.time import swap_traffic
from zerotune.plan.resolved import Resolved
from zerotune.plan.rules import check_plan
from zerotune.plan.section import value_at
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO

if TYPE_CHECKING:
    from zerotune.plan.memory.time import StepTime
    from zerotune.platform import Platform


# -- Plans.


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


def resolved_markdown(resolved: Resolved) -> str:
    """Return ``resolved_page`` and the findings of the rules as Markdown."""
    findings = check_plan(resolved.requested, resolved.context)
    page = resolved_page(resolved)
    # A resolved plan has no errors, and its warnings are among the decisions.
    notes = _finding_lines(one for one in findings if one.severity == "note")
    return attrs.evolve(page, blocks=(*page.blocks, *notes)).markdown()


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


# -- Memory against a budget.


RankBudget = Mapping[Place, int]
"""Bytes available to each rank, as a mapping with the keys ``"device"``, ``"host"`` and ``"nvme"``;
a missing key means no limit."""


@attrs.frozen(kw_only=True)
class Fit:
    """Peak use and available amount of device memory, host memory or NVMe."""

    place: Place
    needed: int
    """Bytes per rank."""
    available: int | None
    """Available bytes per rank; ``None`` if there is no limit."""

    @property
    def fits(self) -> bool:
        """Whether the peak fits in the available memory."""
        return self.available is None or self.needed <= self.available

    def words(self, unit: tuple[str, int]) -> str:
        """Return peak, budget, and free or missing memory in ``unit``.

        Args:
            unit: Name of the unit, and its size in bytes.
        """
        name, size = unit
        if self.available is None:
            return f"{self.needed / size:.2f} {name}"
        left = self.available - self.needed
        rest = f"{left / size:.2f} free" if left >= 0 else f"over by {-left / size:.2f}"
        return f"{self.needed / size:.2f} of {self.available / size:.2f} {name}, {rest}"


def fits(estimate: Estimate, budget: RankBudget | None = None) -> tuple[Fit, ...]:
    """Compare peak device, host and NVMe memory of ``estimate`` with ``budget``.

    Memory that is neither used nor limited is left out. ``budget`` has bytes per rank; a missing
    key means no limit.
    """
    limits: RankBudget = budget or {}
    every = (
        Fit(place=place, needed=estimate.peak(place).nbytes, available=limits.get(place))
        for place in PLACES
    )
    return tuple(fit for fit in every if fit.needed or fit.available)


def estimate_unit(estimate: Estimate, budget: RankBudget | None = None) -> tuple[str, int]:
    """Return the unit for all sizes of an estimate: its name, and its size in bytes."""
    return common_unit(fit.needed for fit in fits(estimate, budget))


def memory_table(estimate: Estimate, budget: RankBudget | None = None) -> Table:
    """Return a table of peak device, host and NVMe memory.

    Args:
        estimate: The memory estimate.
        budget: Bytes available to each rank, as a mapping with the keys ``"device"``, ``"host"``
            and ``"nvme"``.
    """
    unit = estimate_unit(estimate, budget)
    every = fits(estimate, budget)
    over = {PLACE_NAMES[fit.place] for fit in every if not fit.fits}
    return Table(
        rows=tuple(
            (PLACE_NAMES[fit.place], fit.words(unit), peak_words(estimate, fit.place))
            for fit in every
        ),
        head=("place", "memory per rank", "when"),
        style=lambda row: "error" if row[0] in over else "",
    )


def merged(items: Sequence[MemoryItem]) -> list[tuple[str, int]]:
    """Return the bytes of each component, summed by name, largest first."""
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.component] = sizes.get(item.component, 0) + item.nbytes
    return sorted(sizes.items(), key=lambda pair: -pair[1])


# -- Memory estimates in words, as Markdown and as data.


WIDTH: Final = 100
"""Width of estimates and advice in characters if the terminal width is unknown."""
_EMA: Final = {"host": "in host memory", "device": "on the device", "nvme": "in files (NVMe)"}
DURING: Final[Mapping[Phase, str]] = {
    "initialization": "during set-up",
    "forward and backward": "in the forward and backward pass",
    "optimizer step": "in the optimizer step",
    "checkpoint": "while a checkpoint is written",
}
"""For each phase, a phrase that can end a sentence."""
PLACE_NAMES: Final[Mapping[Place, str]] = {"device": "device", "host": "host", "nvme": "NVMe"}
"""Names that reports use for device, host and NVMe memory."""


_PLANNED: Final = (
    *("stage", "uses_deepspeed", "offload_optimizer", "offload_param"),
    *("precision", "world_size"),
)


def estimate_data(estimate: Estimate) -> dict[str, Any]:
    """Return ``estimate`` as a JSON-serialisable dict; sizes are in bytes per rank."""
    resolved, model = estimate.resolved, estimate.resolved.model
    return {
        "plan": {
            "title": describe(resolved),
            **{name: getattr(resolved, name) for name in _PLANNED},
        },
        "model": model
        and {
            "name": model.name,
            "elements": model.numel,
            "trainable_elements": model.trainable_numel,
        },
        "workload": attrs.asdict(estimate.workload),
        "places": {place: _held_at(estimate, place) for place in PLACES},
        "pinned": estimate.pinned,
        "swap_traffic": attrs.asdict(swap_traffic(estimate)),
        "notes": list(estimate.notes),
    }


def estimate_page(estimate: Estimate, *, budget: RankBudget | None = None) -> Page:
    """Return a report of peak device, host and NVMe memory, and of their components.

    Args:
        estimate: The estimate.
        budget: Bytes available to each rank, as a mapping with the keys ``"device"``, ``"host"``
            and ``"nvme"``.
    """
    blocks: list[Block] = [
        Line(f"Memory per rank: {describe(estimate.resolved)}", style="title"),
        Line(subject(estimate), indent=2),
        Line(""),
        memory_table(estimate, budget),
    ]
    for place in PLACES:
        if any(item.place == place for item in estimate.items):
            blocks += [Line(""), *_place_blocks(estimate, place)]
    traffic = swap_traffic(estimate)
    if traffic.written:
        read, written = format_size(traffic.read), format_size(traffic.written)
        text = f"each optimizer step reads {read} from swap files and writes {written}"
        blocks.append(Line(text, indent=2))
    return Page(blocks=(*blocks, *(Line(note, mark="note:") for note in estimate.notes)))


def describe_estimate(estimate: Estimate) -> str:
    """Summarise peak device, host and NVMe memory in one line."""
    needs = [(place, estimate.peak(place).nbytes) for place in PLACES]
    return f"{describe(estimate.resolved)}: {_sizes(pair for pair in needs if pair[1])} per rank"


def subject(estimate: Estimate) -> str:
    """Name the model and the workload of ``estimate`` in one line."""
    model = estimate.resolved.model
    workload = describe_workload(estimate.workload)
    if model is None:
        return workload
    count = f"{model.numel / 1e6:.1f} million"
    if model.numel >= 10**9:
        count = f"{model.numel / 1e9:.2f} billion"
    return f"{model.name} ({count} parameters), {workload}"


def peak_words(estimate: Estimate, place: Place) -> str:
    """Return a phrase, for the end of a sentence, that says when memory use peaks."""
    if len(set(_totals(estimate, place).values())) == 1:
        return "at any time"
    return f"at the peak, {DURING[estimate.peak(place).phase]}"


def describe_workload(workload: Workload) -> str:
    """Summarise the workload in one line."""
    parts = [f"batch {workload.batch}"]
    if workload.width is None or workload.height is None:
        parts.append("activations not estimated")
    else:
        frames = "" if workload.frames is None else f"{counted(workload.frames, 'frame')} of "
        parts.append(f"{frames}{workload.width} x {workload.height} pixels")
        checkpointing = "with" if workload.gradient_checkpointing else "without"
        parts.append(f"{checkpointing} gradient checkpointing")
        if workload.gradient_checkpointing and workload.activation_offload:
            parts.append("block inputs on the host")
    if workload.ema != "none":
        parts.append(f"EMA {_EMA[workload.ema]}")
    return ", ".join(parts)


def _held_at(estimate: Estimate, place: Place) -> dict[str, Any]:
    peak = estimate.peak(place)
    return {
        "peak": peak.nbytes,
        "phase": peak.phase,
        "phases": _totals(estimate, place),
        "components": [
            {
                **{name: getattr(item, name) for name in ("component", "nbytes", "pinned", "note")},
                "at_peak": peak.phase in item.phases,
                "phases": [phase for phase in PHASES if phase in item.phases],
            }
            for item in _all_at(estimate, place)
        ],
    }


def _totals(estimate: Estimate, place: Place) -> dict[Phase, int]:
    return {phase: sum(item.nbytes for item in estimate.at(place, phase)) for phase in PHASES}


def _all_at(estimate: Estimate, place: Place) -> list[MemoryItem]:
    items = [item for item in estimate.items if item.place == place]
    return sorted(items, key=lambda item: -item.nbytes)


def _place_blocks(estimate: Estimate, place: Place) -> Iterator[Block]:
    unit, size = estimate_unit(estimate)
    peak = estimate.peak(place)
    yield Line(
        f"{PLACE_NAMES[place]}: {peak.nbytes / size:.2f} {unit} {peak_words(estimate, place)}",
        style="title",
    )
    yield _items_table(estimate, place)
    totals = _totals(estimate, place)
    if len(set(totals.values())) > 1:
        by_phase = ", ".join(f"{phase} {nbytes / size:.2f}" for phase, nbytes in totals.items())
        yield Line(f"by phase, {unit}: {by_phase}", indent=2)


def _items_table(estimate: Estimate, place: Place) -> Table:
    """Return the components of a place at its peak, largest first, then those of other phases."""
    _, size = estimate_unit(estimate)
    peak = estimate.peak(place)
    later = [item for item in _all_at(estimate, place) if peak.phase not in item.phases]

    def remarks(item: MemoryItem) -> str:
        parts = [item.note, "pinned" if item.pinned else ""]
        text = ", ".join(part for part in parts if part)
        if item not in later:
            return text
        held = " and ".join(DURING[phase] for phase in PHASES if phase in item.phases)
        return f"only {held or 'never'}; {text}".rstrip("; ")

    return Table(
        rows=tuple(
            (f"{item.nbytes / size:.2f}", item.component, remarks(item))
            for item in (*peak.items, *later)
        ),
        align="r",
        widths=(8, 18),
    )


# -- Advice in words, as Markdown and as data.


Sizes = Mapping[Place, int]
"""Bytes by place."""

FOREMOST: Final = 5
"""Default number of candidates in a report."""
_GIB: Final = 1024**3


def advice_data(advice: Advised) -> dict[str, Any]:
    """Return the advice as a JSON-serialisable dict; sizes are in bytes."""
    return {
        "fits": True,
        "plan": advice.plan.to_dict(),
        "title": describe(advice.resolved),
        "streamed": advice.streamed and attrs.asdict(advice.streamed),
        "update": "host" if advice.update is None else advice.update.name,
        "budget": {**places_of(advice.budget), "reserve": advice.budget.reserve},
        "headroom": advice.headroom,
        "estimate": estimate_data(advice.estimate),
        "candidates": [
            {"chosen": one is advice.chosen, **candidate_data(one)} for one in advice.candidates
        ],
    }


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    """Return ``candidate`` as a JSON-serialisable dict; sizes are in bytes."""
    return {
        "title": candidate.title,
        "fits": candidate.fits,
        "gradient_checkpointing": candidate.gradient_checkpointing,
        "activation_offload": candidate.activation_offload,
        "streamed": candidate.streamed and attrs.asdict(candidate.streamed),
        "update": "host" if candidate.update is None else candidate.update.name,
        "needs": places_of(candidate.estimate),
        "shortfalls": dict(_shortfalls(candidate)),
        "reason": candidate.reason,
        "time": None if candidate.time is None else time_data(candidate.time),
        "plan": candidate.plan.to_dict(),
    }


def time_data(time: StepTime) -> dict[str, Any]:
    """Return a predicted step as a JSON-serialisable dict; times are in seconds."""
    return {
        "seconds": time.seconds,
        "hidden_seconds": time.hidden_seconds,
        "eager_seconds": time.eager_seconds,
        "expected_seconds": time.expected,
        "schedule": time.schedule,
        "phases": time.phases,
        "bound": time.bound.what,
        "origin": time.origin,
        "sources": time.sources,
        "notes": list(time.notes),
        "published_spread": time.published_spread,
    }


def time_words(time: StepTime) -> str:
    """Describe a predicted step: its time, its slowest part, and the origin of hardware rates."""
    bound = f"longest part: {time.bound.what}, {seconds_words(time.bound.seconds)}"
    expected, plain = seconds_words(time.expected), seconds_words(time.seconds)
    hidden = f" ({plain} without overlapping the optimizer step)" if time.hides else ""
    published = ""
    if time.published_spread is not None:
        low, high = (f"{100 * one:+.0f}" for one in time.published_spread)
        published = f", published runs lie {low} to {high} % beside predictions"
    return f"{expected} per step predicted{hidden}{published}; {bound}; rates: {time.origin}"


def seconds_words(seconds: float) -> str:
    """Format a duration of ``seconds`` in seconds or milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def advice_page(advice: Advised, *, most: int | None = None) -> Page:
    """Return a report of advice: the choice with its reason, free memory, and other candidates.

    Args:
        advice: The advice.
        most: Maximum number of candidates; ``None`` shows all.
    """
    budget, time, reserve = places_of(advice.budget), advice.chosen.time, advice.budget.reserve
    device = f"{format_size(budget['device'])} of device memory" if budget["device"] else "no GPU"
    host = format_size(budget["host"])
    nvme = f"{format_size(budget['nvme'])} of NVMe" if budget["nvme"] else "no NVMe"
    kept = f", {reserve:.0%} of device and host kept free" if reserve else ""
    headroom = [(place, advice.headroom[place]) for place in PLACES if budget[place]]
    every = advice.candidates if most is None else foremost(advice, most)
    count = len(advice.candidates)
    counted = "Candidates" if len(every) == count else f"{len(every)} of {count} candidates"
    return Page(
        blocks=(
            Line(
                f"Advice for {device}, {host} of host memory, {nvme}{kept}",
                style="title",
            ),
            Line(subject(advice.estimate), indent=2),
            Line(""),
            Line(describe(advice.resolved), mark="Chosen:", style="good"),
            Line(advice.chosen.reason, indent=2),
            Line(f"headroom: {_sizes(headroom)}", indent=2),
            *([] if time is None else [Line(time_words(time), indent=2)]),
            Line(""),
            memory_table(advice.estimate, rank_budget(budget, advice.estimate)),
            Line(""),
            Line(
                f"{counted} in order of preference, those that fit first; GiB per rank:",
                style="title",
            ),
            _candidates_table(every, chosen=advice.chosen),
        )
    )


def nearest_page(candidate: Candidate, *, budget: Sizes) -> Page:
    """Return a report of the plan that comes closest to fitting, and of the memory it lacks.

    Args:
        candidate: The candidate in ``NothingFitsError.nearest``.
        budget: Available bytes, as a mapping with the keys ``"device"``, ``"host"`` and ``"nvme"``;
            all ranks of a machine share host and NVMe memory.
    """
    return Page(
        blocks=(
            Line(_title(candidate), mark="Nearest:", style="warning"),
            Line(f"missing: {_sizes(_shortfalls(candidate))}", indent=2),
            Line(candidate.reason, indent=2),
            Line(""),
            memory_table(candidate.estimate, nearest_budget(candidate, budget=budget)),
        )
    )


def nearest_budget(candidate: Candidate, *, budget: Sizes) -> RankBudget:
    """Return the bytes that each rank may use if it trains with the candidate's plan.

    Args:
        candidate: The candidate in ``NothingFitsError.nearest``.
        budget: Available bytes, as a mapping with the keys ``"device"``, ``"host"`` and ``"nvme"``;
            all ranks of a machine share host and NVMe memory.
    """
    needs = machine_needs(candidate.estimate)
    # A reserve is kept free, so less memory is usable than there is.
    usable = {place: needs[place] - missing for place, missing in candidate.shortfalls.items()}
    return rank_budget({**budget, **usable}, candidate.estimate)


def rank_budget(budget: Sizes, estimate: Estimate) -> RankBudget:
    """Return the bytes that one rank may use; ranks of a machine share its RAM and NVMe.

    Args:
        budget: Available bytes, as a mapping with the keys ``"device"``, ``"host"`` and ``"nvme"``;
            all ranks of a machine share host and NVMe memory.
        estimate: Estimate whose workload states the number of ranks per machine.
    """
    ranks = estimate.workload.ranks_per_machine or estimate.resolved.world_size
    return {place: size if place == "device" else size // ranks for place, size in budget.items()}


def _candidates_table(candidates: Sequence[Candidate], *, chosen: Candidate) -> Table:
    """Return a table of candidates: the choice, others that fit, then those that lack memory.

    Sentences that the report already contains are omitted.
    """
    said = set(chosen.reasons)

    def row(one: Candidate) -> tuple[str, ...]:
        state = "chosen" if one is chosen else "fits" if one.fits else "refused"
        missing = _shortfalls(one)
        lacks = [f"missing {_sizes(missing)}"] if missing else []
        new = [each for each in one.reasons if each not in said]
        said.update(new)
        why = "; ".join(lacks + new)
        return (
            "too big" if state == "refused" and missing else state,
            *(f"{size / _GIB:.2f}" for size in places_of(one.estimate).values()),
            f"{one.time.expected:.2f}" if one.time else "",
            f"{_title(one)}:\n{why}" if why else _title(one),
        )

    styles = {"chosen": "passed", "fits": "good"}
    first = sorted(candidates, key=lambda one: (one is not chosen, not one.fits))
    return Table(
        rows=tuple(map(row, first)),
        head=("", *PLACE_NAMES.values(), "s/step", "plan"),
        align="lrrrr",
        style=lambda row: styles.get(row[0], ""),
    )


def foremost(advice: Advised, most: int) -> tuple[Candidate, ...]:
    """Select at most ``most`` candidates of ``advice``, in order of preference.

    The selection contains the chosen candidate, other candidates that fit, and the candidate that
    lacks the least memory.
    """

    def lacking(candidate: Candidate) -> int:
        return sum(candidate.shortfalls.values())

    others = [one for one in advice.candidates if one is not advice.chosen]
    fitting = [one for one in others if one.fits]
    short = sorted((one for one in others if _shortfalls(one)), key=lacking)
    # One row is reserved for the candidate that lacks least, which is as informative as a fit.
    fitting = fitting[: most - 1 - bool(short)]
    kept = [advice.chosen, *fitting, *short][:most]
    return tuple(one for one in advice.candidates if any(one is other for other in kept))


def _title(candidate: Candidate) -> str:
    kind = "with" if candidate.gradient_checkpointing else "without"
    offload = " and activation offload" if candidate.activation_offload else ""
    return f"{candidate.title}, {kind} checkpointing{offload}"


def places_of(sizes: Budget | Estimate) -> dict[Place, int]:
    """Bytes by place."""
    return {"device": sizes.device, "host": sizes.host, "nvme": sizes.nvme}


def _shortfalls(candidate: Candidate) -> list[tuple[Place, int]]:
    short = candidate.shortfalls
    return [(place, short[place]) for place in PLACES if place in short]


def _sizes(sizes: Iterable[tuple[Place, int]]) -> str:
    return ", ".join(f"{PLACE_NAMES[place]} {format_size(size)}" for place, size in sizes)


brief_of.register(Settings, describe_plan)
brief_of.register(Resolved, lambda one: f"{describe(one)}; {len(one.decisions)} decisions")
brief_of.register(Estimate, describe_estimate)
brief_of.register(
    Advised, lambda one: f"{describe(one.resolved)}; of {len(one.candidates)} candidates"
)
page_of.register(Settings, plan_page)
page_of.register(Resolved, resolved_page)
page_of.register(Estimate, estimate_page)
page_of.register(Advised, partial(advice_page, most=FOREMOST))
