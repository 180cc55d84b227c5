"""Markdown tables that stay tables whatever their cells hold."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune._util.text import common_unit, format_size
from zerotune.decisions import Decision, render_decisions
from zerotune.errors import UNSET
from zerotune.plan.advise import Advice, Budget, Candidate, machine_needs
from zerotune.plan.fill import DEEPSPEED_DEFAULT
from zerotune.plan.memory.model import (
    PHASES,
    PLACES,
    MemoryEstimate,
    MemoryItem,
    Phase,
    Place,
    Workload,
)
from zerotune.plan.rules import RuleContext, check_plan

if TYPE_CHECKING:
    from zerotune.plan.api import DeepSpeedPlan, ResolvedPlan
    from zerotune.plan.rules import Finding
    from zerotune.platform import Platform


_MARKUP: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", **{mark: f"\\{mark}" for mark in "\\|*[]`"}}
)


class Code(str):
    """A cell to be shown as code."""

    __slots__ = ()


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: str = "") -> str:
    """A Markdown table.

    Args:
        header: Names of the columns.
        rows: As many cells each as ``header`` has; ``Code`` cells are shown as code.
        numbers: One letter a column: ``"r"`` aligns it to the right (``"lrr"``).
    """
    sides = numbers.ljust(len(header), "l")
    rule = ["---:" if side == "r" else "---" for side in sides]
    lines = [[cell(text) for text in header], rule, *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """``text`` on one line, nothing in it markup."""
    plain = " ".join(text.split())
    if not isinstance(text, Code) or not plain:
        return plain.translate(_MARKUP)
    # A backtick span can hold neither a pipe nor a backtick inside a table.
    if any(mark in plain for mark in "|`\\"):
        return f"<code>{plain.translate(_MARKUP)}</code>"
    return f"`{plain}`"


# -- Plans in words.


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


# -- Plans in Markdown, for issues, reports and documentation.


def plan_markdown(
    plan: DeepSpeedPlan, *, world_size: int = 1, platform: Platform | None = None
) -> str:
    """What a plan asks for, what reading changed and what the rules find, as Markdown."""
    findings = plan.check(world_size=world_size, platform=platform)
    return _document(f"Plan from {plan.source}", plan_rows(plan), plan.decisions, findings)


def resolved_markdown(resolved: ResolvedPlan) -> str:
    """What will run, every decision with its reason, and what the rules find, as Markdown."""
    context = RuleContext(
        world_size=resolved.world_size,
        platform=resolved.platform,
        model=resolved.model,
        run=resolved.run,
        uses_deepspeed=resolved.uses_deepspeed,
    )
    findings = check_plan(resolved.requested, context)
    return _document(
        f"Resolved plan from {resolved.requested.source}",
        resolved_rows(resolved),
        resolved.decisions,
        # Errors cannot be here, and warnings are decisions already.
        [finding for finding in findings if finding.severity == "note"],
    )


def value_text(value: Any) -> str:
    """A value of a configuration as JSON spells it; nothing where there is none."""
    if value is None or value is UNSET:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)


def _document(
    title: str,
    rows: Iterable[Row],
    decisions: Iterable[Decision],
    findings: Iterable[Finding],
) -> str:
    parts = [f"# {cell(title)}", table(("setting", "value"), rows)]
    told, defaults = told_and_defaults(decisions)
    if told:
        rows_told = [_decision_row(one) for one in told]
        parts += ["## Decisions", table(("", "setting", "from", "to", "why"), rows_told)]
    if defaults:
        parts += [
            "## DeepSpeed's defaults, written because defaults move",
            table(("setting", "value"), [_default_row(one) for one in defaults]),
        ]
    found = [_finding_row(finding) for finding in findings]
    if found:
        header = ("", "rule", "setting", "value", "why", "fix")
        parts += ["## Findings", table(header, found)]
    return "\n\n".join(parts) + "\n"


def _decision_row(decision: Decision) -> tuple[str, ...]:
    return (
        decision.severity,
        Code(decision.key),
        Code(value_text(decision.before)),
        Code(value_text(decision.after)),
        decision.reason,
    )


def _default_row(decision: Decision) -> tuple[str, ...]:
    return Code(decision.key), Code(value_text(decision.after))


def _finding_row(finding: Finding) -> tuple[str, ...]:
    return (
        finding.severity,
        finding.rule,
        Code(finding.key),
        Code(value_text(finding.value)),
        finding.reason,
        finding.fix,
    )


# -- Memory as bars of letters, for terminals and logs.


_FREE: Final = "."
_LIMIT: Final = "|"
_NARROWEST: Final = 10
_SPARE_LETTERS: Final = "0123456789"

RankBudget = Mapping[Place, int]
"""Bytes there are at each place, per rank; a missing place is not limited."""


@attrs.frozen(kw_only=True)
class Fit:
    """What one place needs at its peak, against what there is."""

    place: Place
    needed: int
    """Bytes per rank."""
    available: int | None
    """Bytes per rank; ``None``: not limited."""

    @property
    def fits(self) -> bool:
        """Whether there is enough."""
        return self.available is None or self.needed <= self.available

    def words(self, unit: tuple[str, int]) -> str:
        """Need, budget and what is left or missing, in ``unit``."""
        name, size = unit
        if self.available is None:
            return f"{self.needed / size:.2f} {name}"
        left = self.available - self.needed
        rest = f"{left / size:.2f} free" if left >= 0 else f"over by {-left / size:.2f}"
        return f"{self.needed / size:.2f} of {self.available / size:.2f} {name}, {rest}"


def fits(estimate: MemoryEstimate, budget: RankBudget | None = None) -> tuple[Fit, ...]:
    """Every place that is used or limited, with its peak and its budget."""
    limits: RankBudget = budget or {}
    every = (
        Fit(place=place, needed=estimate.peak(place).nbytes, available=limits.get(place))
        for place in PLACES
    )
    return tuple(fit for fit in every if fit.needed or fit.available)


def estimate_unit(estimate: MemoryEstimate, budget: RankBudget | None = None) -> tuple[str, int]:
    """The unit in which every number of an estimate is shown: its name and its bytes."""
    return common_unit(fit.needed for fit in fits(estimate, budget))


def memory_bars(
    estimate: MemoryEstimate, *, budget: RankBudget | None = None, width: int = 100
) -> str:
    """One bar of letters per place, at its peak.

    A full bar is the budget of the place, or, where there is none, the largest need of those
    places; a bar that is over its budget shows where the budget ends (``|``). The letters are
    those of ``component_letters``.

    Args:
        estimate: What is needed.
        budget: Bytes per rank there are at each place.
        width: Columns of a line.
    """
    every = fits(estimate, budget)
    unit = estimate_unit(estimate, budget)
    letters = component_letters(estimate)
    words = [fit.words(unit) for fit in every]
    columns = max(width - max(map(len, words), default=0) - len("device  []  "), _NARROWEST)
    unlimited = max((fit.needed for fit in every if fit.available is None), default=0)
    lines = []
    for fit, text in zip(every, words, strict=True):
        held = [(letters[name], size) for name, size in merged(estimate.peak(fit.place).items)]
        full = max(fit.needed, unlimited if fit.available is None else fit.available)
        lines.append(f"{fit.place:<8}[{_bar(held, fit, full, columns)}]  {text}")
    return "\n".join(lines)


def component_letters(estimate: MemoryEstimate) -> dict[str, str]:
    """One letter for each component, an initial where possible, largest component first."""
    letters: dict[str, str] = {}
    for component, _ in merged(estimate.items):
        letters[component] = _letter(component, set(letters.values()))
    return letters


def merged(items: Sequence[MemoryItem]) -> list[tuple[str, int]]:
    """Components and their bytes, those of the same name added up, largest first."""
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.component] = sizes.get(item.component, 0) + item.nbytes
    return sorted(sizes.items(), key=lambda pair: -pair[1])


def _letter(component: str, taken: set[str]) -> str:
    upper = component.upper()
    initials = [word[0] for word in upper.split()]
    candidates = [*initials, *upper, *_SPARE_LETTERS]
    usable = (one for one in candidates if one.isascii() and one.isalnum() and one not in taken)
    return next(usable, "?")


def _bar(held: Sequence[tuple[str, int]], fit: Fit, full: int, columns: int) -> str:
    bar = ""
    total = 0
    for letter, nbytes in held:
        total += nbytes
        # From the sum, so that rounding cannot add up along the bar.
        bar = bar.ljust(round(total / full * columns), letter)
    bar = bar.ljust(columns, _FREE)
    if fit.fits or fit.available is None:
        return bar
    limit = min(int(fit.available / full * columns), columns - 1)
    return f"{bar[:limit]}{_LIMIT}{bar[limit + 1 :]}"


# -- Memory estimates as data, text and Markdown.


_WIDTH: Final = 100
_EMA: Final = {"host": "in host memory", "device": "on the device", "nvme": "in files (NVMe)"}
DURING: Final[Mapping[Phase, str]] = {
    "initialization": "during set-up",
    "forward and backward": "in the forward and backward pass",
    "optimizer step": "in the optimizer step",
    "checkpoint": "while a checkpoint is written",
}
"""Each phase as an end of a sentence."""
PLACE_NAMES: Final[Mapping[Place, str]] = {
    "device": "device",
    "host": "host",
    "nvme": "NVMe",
}
"""Each place as it is written in a sentence."""


def estimate_data(estimate: MemoryEstimate) -> dict[str, Any]:
    """The estimate as plain data that JSON can hold; every size in bytes per rank."""
    resolved, model = estimate.resolved, estimate.resolved.model
    return {
        "plan": {
            "title": describe(resolved),
            "stage": resolved.stage,
            "uses_deepspeed": resolved.uses_deepspeed,
            "offload_optimizer": resolved.offload_optimizer,
            "offload_param": resolved.offload_param,
            "precision": resolved.precision,
            "world_size": resolved.world_size,
        },
        "model": model
        and {
            "name": model.name,
            "elements": model.numel,
            "trainable_elements": model.trainable_numel,
        },
        "workload": attrs.asdict(estimate.workload),
        "places": {place: _place_data(estimate, place) for place in PLACES},
        "pinned": estimate.pinned,
        "swap_traffic": attrs.asdict(estimate.swap_traffic),
        "notes": list(estimate.notes),
    }


def explain_estimate(estimate: MemoryEstimate, *, budget: RankBudget | None = None) -> str:
    """The estimate as text: one bar per place, then what each place holds.

    Args:
        estimate: What is needed.
        budget: Bytes per rank there are at each place; the bars are scaled to it.
    """
    lines = [
        *_wrapped(f"Memory per rank: {describe(estimate.resolved)}", indent="  "),
        *_wrapped(f"  {subject(estimate)}", indent="  "),
        "",
        memory_bars(estimate, budget=budget, width=_WIDTH),
    ]
    for place in PLACES:
        if any(item.place == place for item in estimate.items):
            lines.extend(["", *_place_lines(estimate, place)])
    lines.extend(_traffic_lines(estimate))
    lines.extend(line for note in estimate.notes for line in _wrapped(f"note: {note}", indent="  "))
    return "\n".join(lines)


def _traffic_lines(estimate: MemoryEstimate) -> list[str]:
    traffic = estimate.swap_traffic
    if not traffic.written:
        return []
    read, written = format_size(traffic.read), format_size(traffic.written)
    return _wrapped(
        f"  each optimizer step reads {read} from swap files and writes {written}", indent="  "
    )


def markdown_estimate(estimate: MemoryEstimate, *, budget: RankBudget | None = None) -> str:
    """The estimate as Markdown: a table of the places, and one of what each holds.

    Args:
        estimate: What is needed.
        budget: Bytes per rank there are at each place.
    """
    unit, size = estimate_unit(estimate)
    places = [
        (
            PLACE_NAMES[fit.place],
            f"{fit.needed / size:.2f}",
            "" if fit.available is None else f"{fit.available / size:.2f}",
            "" if fit.available is None else f"{(fit.available - fit.needed) / size:.2f}",
            estimate.peak(fit.place).phase,
        )
        for fit in fits(estimate, budget)
    ]
    header = ("place", f"peak, {unit}", f"budget, {unit}", f"left, {unit}", "when")
    parts = [
        f"## Memory per rank: {describe(estimate.resolved)}",
        f"For {subject(estimate)}.",
        table(header, places, numbers="lrrrl"),
        table(
            ("place", "component", f"size, {unit}", "held", "note"),
            [_component_row(item, size) for place in PLACES for item in _all_at(estimate, place)],
            numbers="llrll",
        ),
    ]
    return "\n\n".join(parts) + "\n"


def subject(estimate: MemoryEstimate) -> str:
    """The model and the workload in one line."""
    model = estimate.resolved.model
    named = f"{model.name} ({_millions(model.numel)} parameters), " if model else ""
    return named + describe_workload(estimate.workload)


def peak_words(estimate: MemoryEstimate, place: Place) -> str:
    """When a place holds most, as an end of a sentence."""
    if len(set(_totals(estimate, place).values())) == 1:
        return "at any time"
    return f"at the peak, {DURING[estimate.peak(place).phase]}"


def describe_workload(workload: Workload) -> str:
    """The workload in one line."""
    parts = [f"batch {workload.batch}"]
    if workload.width is None or workload.height is None:
        parts.append("activations not estimated")
    else:
        parts.append(f"{workload.width} x {workload.height} pixels")
        checkpointing = "with" if workload.gradient_checkpointing else "without"
        parts.append(f"{checkpointing} gradient checkpointing")
        if workload.gradient_checkpointing and workload.activation_offload:
            parts.append("block inputs on the host")
    if workload.ema != "none":
        parts.append(f"EMA {_EMA[workload.ema]}")
    return ", ".join(parts)


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**9 else f"{count / 1e6:.1f} million"


def _place_data(estimate: MemoryEstimate, place: Place) -> dict[str, Any]:
    peak = estimate.peak(place)
    return {
        "peak": peak.nbytes,
        "phase": peak.phase,
        "phases": _totals(estimate, place),
        "components": [
            {
                "component": item.component,
                "nbytes": item.nbytes,
                "pinned": item.pinned,
                "at_peak": peak.phase in item.phases,
                "phases": [phase for phase in PHASES if phase in item.phases],
                "note": item.note,
            }
            for item in _all_at(estimate, place)
        ],
    }


def _totals(estimate: MemoryEstimate, place: Place) -> dict[Phase, int]:
    return {phase: sum(item.nbytes for item in estimate.at(place, phase)) for phase in PHASES}


def _all_at(estimate: MemoryEstimate, place: Place) -> list[MemoryItem]:
    items = [item for item in estimate.items if item.place == place]
    return sorted(items, key=lambda item: -item.nbytes)


def _place_lines(estimate: MemoryEstimate, place: Place) -> Iterator[str]:
    unit, size = estimate_unit(estimate)
    peak = estimate.peak(place)
    letters = component_letters(estimate)
    name = PLACE_NAMES[place]
    yield f"{name}: {peak.nbytes / size:.2f} {unit} {peak_words(estimate, place)}"
    for item in peak.items:
        yield from _item_lines(letters[item.component], item, size, _remarks(item))
    others = [item for item in _all_at(estimate, place) if peak.phase not in item.phases]
    for item in others:
        yield from _item_lines(
            " ", item, size, f"only {_when(item)}; {_remarks(item)}".rstrip("; ")
        )
    totals = _totals(estimate, place)
    if len(set(totals.values())) == 1:
        return
    by_phase = ", ".join(f"{phase} {nbytes / size:.2f}" for phase, nbytes in totals.items())
    yield from _wrapped(f"    by phase, {unit}: {by_phase}", indent="      ")


def _item_lines(letter: str, item: MemoryItem, size: int, remarks: str) -> list[str]:
    start = f"  {letter} {item.nbytes / size:>9.2f}  {item.component:<18} "
    return _wrapped(start + remarks, indent=" " * len(start))


def _wrapped(line: str, *, indent: str) -> list[str]:
    # Blanks inside a line are columns; only what does not fit is broken.
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent=indent, drop_whitespace=True, replace_whitespace=False
    )


def _remarks(item: MemoryItem) -> str:
    return ", ".join(part for part in (item.note, "pinned" if item.pinned else "") if part)


def _when(item: MemoryItem) -> str:
    held = [DURING[phase] for phase in PHASES if phase in item.phases]
    return " and ".join(held) or "never"


def _component_row(item: MemoryItem, size: int) -> tuple[str, ...]:
    held = [phase for phase in PHASES if phase in item.phases]
    return (
        PLACE_NAMES[item.place],
        item.component,
        f"{item.nbytes / size:.2f}",
        "always" if len(held) == len(PHASES) else ", ".join(held),
        _remarks(item),
    )


# -- Advice as data, text and Markdown.


Sizes = Mapping[Place, int]
"""Bytes of each kind of memory."""

_REPORT_WIDTH: Final = 100
_REASON: Final = 12
_GIB: Final = 1024**3


def advice_data(advice: Advice) -> dict[str, Any]:
    """The advice as plain data that JSON can hold; every size in bytes."""
    return {
        "fits": True,
        "plan": advice.plan.to_dict(),
        "title": describe(advice.resolved),
        "budget": {**_places(advice.budget), "reserve": advice.budget.reserve},
        "headroom": advice.headroom,
        "estimate": estimate_data(advice.estimate),
        "candidates": [
            {"chosen": one is advice.chosen, **candidate_data(one)} for one in advice.candidates
        ],
    }


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    """One candidate as plain data that JSON can hold; every size in bytes."""
    return {
        "title": candidate.title,
        "fits": candidate.fits,
        "gradient_checkpointing": candidate.gradient_checkpointing,
        "activation_offload": candidate.activation_offload,
        "needs": _places(candidate.estimate),
        "shortfalls": dict(_missing(candidate)),
        "reason": candidate.reason,
        "plan": candidate.plan.to_dict(),
    }


def explain_advice(advice: Advice) -> str:
    """The advice as text: what was chosen and why, what is left, and the other candidates."""
    lines = [
        *_reporting_wrapped(f"Advice for {_budget_words(advice.budget)}"),
        *_reporting_wrapped(subject(advice.estimate), indent=2),
        "",
        *_reporting_wrapped(f"Chosen: {describe(advice.resolved)}"),
        *_reporting_wrapped(advice.chosen.reason, indent=2),
        *_reporting_wrapped(f"headroom: {_sizes(_headroom(advice))}", indent=2),
        "",
        memory_bars(advice.estimate, budget=rank_budget(_places(advice.budget), advice.estimate)),
        "",
        *_candidate_lines(advice),
    ]
    return "\n".join(lines)


def markdown_advice(advice: Advice) -> str:
    """The advice as Markdown: what was chosen, and a table of the candidates."""
    rows = [
        (
            _state(one, one is advice.chosen),
            _title(one),
            *[f"{size / _GIB:.2f}" for size in _places(one.estimate).values()],
            _sizes(_missing(one)),
            one.reason,
        )
        for one in advice.candidates
    ]
    header = ("", "plan", "device, GiB", "host, GiB", "NVMe, GiB", "missing", "why")
    parts = [
        f"# Advice for {cell(_budget_words(advice.budget))}",
        f"For {cell(subject(advice.estimate))}.",
        f"**Chosen:** {cell(describe(advice.resolved))}.",
        f"Why: {cell(advice.chosen.reason).rstrip('.')}.",
        f"Headroom: {cell(_sizes(_headroom(advice)))}.",
        table(header, rows, numbers="llrrrll"),
    ]
    return "\n\n".join(parts) + "\n"


def explain_nearest(candidate: Candidate, *, budget: Sizes) -> str:
    """What comes nearest when nothing fits, and what it lacks, as text.

    Args:
        candidate: What ``NothingFitsError.nearest`` holds.
        budget: Bytes there are of each kind of memory, those of the host for all ranks.
    """
    lines = [
        *_reporting_wrapped(f"Nearest: {_title(candidate)}"),
        *_reporting_wrapped(f"missing: {_sizes(_missing(candidate))}", indent=2),
        *_reporting_wrapped(candidate.reason, indent=2),
        "",
        memory_bars(candidate.estimate, budget=nearest_budget(candidate, budget=budget)),
    ]
    return "\n".join(lines)


def nearest_budget(candidate: Candidate, *, budget: Sizes) -> RankBudget:
    """What one rank of a candidate that does not fit may use.

    Args:
        candidate: What ``NothingFitsError.nearest`` holds.
        budget: Bytes there are of each kind of memory, those of the host for all ranks.
    """
    needs = machine_needs(candidate.estimate)
    # A part of the memory is kept free, so that less may be used than there is.
    usable = {place: needs[place] - missing for place, missing in candidate.shortfalls.items()}
    return rank_budget({**budget, **usable}, candidate.estimate)


def rank_budget(budget: Sizes, estimate: MemoryEstimate) -> RankBudget:
    """What one rank may use: the ranks of a machine share its RAM and its files.

    Args:
        budget: Bytes per device, and of RAM and files for all ranks of a machine.
        estimate: Knows how many ranks share them.
    """
    ranks = estimate.workload.ranks_per_machine or estimate.resolved.world_size
    return {place: size if place == "device" else size // ranks for place, size in budget.items()}


def _candidate_lines(advice: Advice) -> list[str]:
    lines = [
        "Candidates, in order of preference; GiB per rank:",
        f"  {'':<8}{'device':>9}{'host':>9}{'NVMe':>9}  plan",
    ]
    for one in advice.candidates:
        sizes = "".join(f"{size / _GIB:>9.2f}" for size in _places(one.estimate).values())
        start = f"  {_state(one, one is advice.chosen):<8}{sizes}  "
        missing = _sizes(_missing(one))
        told = [f"missing {missing}"] if missing else []
        lines += _reporting_wrapped(start + _title(one), hang=len(start))
        lines += _reporting_wrapped("; ".join([*told, one.reason]), indent=_REASON, hang=0)
    return lines


def _state(candidate: Candidate, chosen: bool) -> str:
    if chosen:
        return "chosen"
    if candidate.fits:
        return "fits"
    return "too big" if _missing(candidate) else "refused"


def _title(candidate: Candidate) -> str:
    if "checkpointing" in candidate.title:
        return candidate.title
    kind = "with" if candidate.gradient_checkpointing else "without"
    offload = " and activation offload" if candidate.activation_offload else ""
    return f"{candidate.title}, {kind} checkpointing{offload}"


def _budget_words(budget: Budget) -> str:
    device, host = format_size(budget.device), format_size(budget.host)
    nvme = f"{format_size(budget.nvme)} of NVMe" if budget.nvme else "no NVMe"
    kept = f", {budget.reserve:.0%} of device and host kept free" if budget.reserve else ""
    return f"{device} of device memory, {host} of host memory, {nvme}{kept}"


def _places(sizes: Budget | MemoryEstimate) -> dict[Place, int]:
    return {"device": sizes.device, "host": sizes.host, "nvme": sizes.nvme}


def _headroom(advice: Advice) -> list[tuple[Place, int]]:
    budget = _places(advice.budget)
    return [(place, advice.headroom[place]) for place in PLACES if budget[place]]


def _missing(candidate: Candidate) -> list[tuple[Place, int]]:
    short = candidate.shortfalls
    return [(place, short[place]) for place in PLACES if place in short]


def _sizes(sizes: Iterable[tuple[Place, int]]) -> str:
    return ", ".join(f"{PLACE_NAMES[place]} {format_size(size)}" for place, size in sizes)


def _reporting_wrapped(text: str, *, indent: int = 0, hang: int = 2) -> list[str]:
    return textwrap.wrap(
        text,
        _REPORT_WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        replace_whitespace=False,
    )
