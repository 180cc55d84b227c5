"""From a ``scheduler`` section to one ``SchedulerChoice``, counted in optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune.decisions import Decision, Severity
from zerotune.errors import InvalidValueError
from zerotune.optim.arguments import (
    Filled,
    Sources,
    Suggestion,
    fill,
    record_defaults,
    reject_unknown,
)
from zerotune.optim.parameters import is_auto
from zerotune.optim.schedulers import SCHEDULERS, SchedulerEntry
from zerotune.plan.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.facts import RunFacts
from zerotune.plan.schedules import ONE_CYCLE_BETA2

SECTION: Final = "scheduler.params"
TYPE_KEY: Final = "scheduler.type"

DEFAULT_WARMUP: Final = 500
"""Warm-up steps when nothing says how long the run is, and the most otherwise."""
WARMUP_SHARE: Final = 20
"""The default warm-up is at most one step in this many."""


@attrs.frozen(kw_only=True)
class ScheduleRequest:
    """What is asked for."""

    name: str
    """Canonical name."""
    params: Mapping[str, Any]
    """Arguments as written; may hold ``"auto"``."""
    written: str | None = None
    """The name as written; ``None`` when nothing is configured."""
    overrides: Mapping[str, Any] = attrs.field(factory=dict)
    """Arguments that beat the written ones."""
    lr_overridden: bool = False
    """Whether the optimizer's learning rate was given to the resolver."""

    @property
    def entry(self) -> SchedulerEntry:
        """The schedule's entry."""
        return SCHEDULERS[self.name]


def settle_schedule(
    request: ScheduleRequest, optimizer: OptimizerChoice, run: RunFacts
) -> tuple[SchedulerChoice, tuple[Decision, ...]]:
    """Settle on a schedule.

    Args:
        request: What is asked for.
        optimizer: The optimizer it drives.
        run: What the run knows: ``total_steps`` and ``warmup_steps`` are used.

    Returns:
        The choice, every argument explicit, and why.

    Raises:
        OptimizerError: An argument is needed that neither the configuration nor the run says.
        UnknownKeyError: An argument the schedule does not have.
        InvalidValueError: An argument of the wrong type or out of range.
    """
    entry = request.entry
    filled = _complete(request, optimizer, run)
    _record_name(request, filled)
    _no_warmup(entry, filled, asked=request.written is not None)
    _compare_peak(entry, optimizer, filled)
    _compare_lengths(filled)
    if entry.name == "OneCycle":
        _one_cycle(optimizer, filled)
    record_defaults(filled, SECTION, entry.name, filled.defaulted)
    if entry.source == "zerotune":
        filled.record(
            TYPE_KEY,
            entry.name,
            entry.name,
            "DeepSpeed has no such class; zerotune steps diffusers' curve, once for each "
            "optimizer step",
        )
    choice = SchedulerChoice(name=entry.name, params=filled.values, source=entry.source)
    return choice, tuple(filled.decisions)


def per_group_schedule(
    choice: SchedulerChoice, optimizer: OptimizerChoice
) -> tuple[SchedulerChoice, tuple[Decision, ...]]:
    """Let zerotune step the curve where DeepSpeed's class would give all groups one rate.

    Args:
        choice: The schedule settled on.
        optimizer: The optimizer with its groups.
    """
    rates = {float(group.params.get("lr", optimizer.lr)) for group in optimizer.groups}
    if choice.source != "deepspeed" or not rates - {optimizer.lr}:
        return choice, ()
    decision = Decision(
        key=TYPE_KEY,
        before=choice.name,
        after=choice.name,
        reason=f"the groups' learning rates differ, and DeepSpeed's {choice.name} would set one "
        "for all of them; zerotune steps the same curve, scaled for each group",
    )
    return attrs.evolve(choice, source="zerotune"), (decision,)


def _complete(request: ScheduleRequest, optimizer: OptimizerChoice, run: RunFacts) -> Filled:
    entry = request.entry
    log = Filled()
    params = _scalars(_without_resume(request.params), optimizer)
    for given in (params, request.overrides):
        reject_unknown(given, entry.parameter_names, section=SECTION, owner=entry.name)
    sources = Sources(
        section=SECTION,
        written=_follow_override(request, params, optimizer, log),
        overrides=request.overrides,
        suggestions=_suggestions(entry, optimizer, run),
    )
    filled = fill(entry.parameters, sources, entry.name)
    filled.decisions[:0] = log.decisions
    if request.written is None:
        _default_warmup(filled, run)
    return filled


def _record_name(request: ScheduleRequest, filled: Filled) -> None:
    name = request.name
    if request.written is None:
        filled.record(TYPE_KEY, None, name, f"no scheduler is configured; {name} is the default")
    elif request.written != name:
        filled.record(TYPE_KEY, request.written, name, "another spelling")


def _without_resume(params: Mapping[str, Any]) -> dict[str, Any]:
    """``last_batch_iteration`` continues a schedule in DeepSpeed; a checkpoint does it here."""
    kept = dict(params)
    start = kept.pop("last_batch_iteration", -1)
    if start != -1:
        raise InvalidValueError(
            "a schedule is continued by resuming from a checkpoint, which knows the step",
            key=f"{SECTION}.last_batch_iteration",
            value=start,
            fix="leave it out",
        )
    return kept


def _scalars(params: Mapping[str, Any], optimizer: OptimizerChoice) -> dict[str, Any]:
    """Unpack lists of one value per parameter group: there is one group."""
    plain: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, (list, tuple)):
            if len(value) != 1:
                raise InvalidValueError(
                    f"one value per parameter group, and {optimizer.name} has one group",
                    key=f"{SECTION}.{key}",
                    value=value,
                    fix="write one number",
                )
            plain[key] = value[0]
        else:
            plain[key] = value
    return plain


def _follow_override(
    request: ScheduleRequest, params: dict[str, Any], optimizer: OptimizerChoice, log: Filled
) -> dict[str, Any]:
    """An overridden learning rate would be in vain if the schedule kept its own peak."""
    peak = request.entry.peak
    if not request.lr_overridden or peak != "warmup_max_lr" or peak in request.overrides:
        return params
    written = params.get(peak)
    if written is None or is_auto(written) or written == optimizer.lr:
        return params
    log.record(
        f"{SECTION}.{peak}",
        written,
        optimizer.lr,
        "follows the learning rate given to OptimizerResolver(overrides=…)",
        "warning",
    )
    return {**params, peak: optimizer.lr}


def _suggestions(
    entry: SchedulerEntry, optimizer: OptimizerChoice, run: RunFacts
) -> dict[str, Suggestion]:
    found: dict[str, Suggestion] = {}
    if entry.peak is not None:
        # A peak that differs from the optimizer's lr gets a decision of its own.
        found[entry.peak] = Suggestion(value=optimizer.lr, source="the optimizer's lr", yields=True)
    if run.warmup_steps is not None:
        warmup = Suggestion(value=run.warmup_steps, source="the run (warmup_steps)")
        found |= dict.fromkeys(("warmup_num_steps", "num_warmup_steps"), warmup)
    if run.total_steps is not None:
        total = Suggestion(value=run.total_steps, source="the run (total_steps)")
        found |= dict.fromkeys(("total_num_steps", "num_training_steps"), total)
    return {key: value for key, value in found.items() if key in entry.parameter_names}


def _default_warmup(filled: Filled, run: RunFacts) -> None:
    """Length of the warm-up nobody asked for."""
    if "warmup_num_steps" not in filled.defaulted:
        return
    filled.defaulted.discard("warmup_num_steps")
    if run.total_steps is None:
        steps, reason = DEFAULT_WARMUP, "the run does not say how long it is"
    else:
        steps = min(DEFAULT_WARMUP, run.total_steps // WARMUP_SHARE)
        # DeepSpeed's shortest warm-up keeps two updates at the minimum.
        steps = 0 if steps < 2 else steps
        reason = f"5 % of the run's {run.total_steps} steps, at most {DEFAULT_WARMUP}"
    filled.values["warmup_num_steps"] = steps
    filled.record(f"{SECTION}.warmup_num_steps", None, steps, reason)


def _no_warmup(entry: SchedulerEntry, filled: Filled, *, asked: bool) -> None:
    """DeepSpeed refuses 0 warm-up steps, and its 1 still means two updates at the minimum."""
    values = filled.values
    if values.get("warmup_num_steps") != 0:
        return
    values["warmup_num_steps"] = 1
    reason = "DeepSpeed refuses 0; 1 is its shortest"
    if entry.name == "WarmupDecayLR":
        reason += ", and holds warmup_min_lr for the first two updates"
    severity: Severity = "warning" if asked else "note"
    filled.record(f"{SECTION}.warmup_num_steps", 0, 1, reason, severity)
    floor = {"WarmupLR": "warmup_min_lr", "WarmupCosineLR": "warmup_min_ratio"}.get(entry.name)
    if floor is None:
        return
    peak = values["warmup_max_lr"] if entry.name == "WarmupLR" else 1.0
    before = None if floor in filled.defaulted else values[floor]
    filled.defaulted.discard(floor)
    values[floor] = peak
    reason = "no warm-up: the schedule starts at its peak"
    if entry.name == "WarmupCosineLR":
        reason += "; DeepSpeed still runs the very first update at 0"
    filled.record(f"{SECTION}.{floor}", before, peak, reason)


def _compare_peak(entry: SchedulerEntry, optimizer: OptimizerChoice, filled: Filled) -> None:
    if entry.peak is None or filled.values[entry.peak] == optimizer.lr:
        return
    filled.record(
        "optimizer.params.lr",
        optimizer.lr,
        filled.values[entry.peak],
        f"{entry.name} sets the learning rate from {entry.peak} and ignores the optimizer's",
        "warning",
    )


def _compare_lengths(filled: Filled) -> None:
    values = filled.values
    key = "total_num_steps" if "total_num_steps" in values else "num_training_steps"
    total, warmup = values.get(key), values.get("warmup_num_steps", values.get("num_warmup_steps"))
    if values.get("lr_end") is not None and total == warmup:
        raise InvalidValueError(
            "polynomial divides by the steps after the warm-up, and there are none",
            key=f"{SECTION}.{key}",
            value=total,
            fix="make the schedule longer than its warm-up",
        )
    if total is not None and warmup is not None and total < warmup:
        filled.record(
            f"{SECTION}.{key}",
            total,
            total,
            f"kept, but the warm-up of {warmup} steps is longer than the whole schedule",
            "warning",
        )


def _one_cycle(optimizer: OptimizerChoice, filled: Filled) -> None:
    values = filled.values
    key = f"{SECTION}.cycle_momentum"
    betas = optimizer.params.get("betas")
    if values["cycle_momentum"] and betas is None:
        explicit = "cycle_momentum" not in filled.defaulted
        filled.defaulted.discard("cycle_momentum")
        values["cycle_momentum"] = False
        reason = f"{optimizer.name} has no betas, and DeepSpeed cycles nothing else"
        filled.record(
            key, True if explicit else None, False, reason, "warning" if explicit else "note"
        )
    elif values["cycle_momentum"]:
        filled.record(
            "optimizer.params.betas",
            betas,
            (values["cycle_min_mom"], ONE_CYCLE_BETA2),
            "OneCycle cycles the first beta and sets the second to 0.99; write cycle_momentum "
            "false to keep the optimizer's",
            "warning",
        )
    if values["decay_step_size"] == 0 and values["decay_lr_rate"] > 0:
        filled.record(
            f"{SECTION}.decay_lr_rate",
            values["decay_lr_rate"],
            values["decay_lr_rate"],
            "kept, but DeepSpeed does not decay while decay_step_size is 0",
            "warning",
        )
