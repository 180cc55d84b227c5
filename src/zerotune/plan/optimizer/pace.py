"""From a request to one schedule, which depends on the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune.decisions import Log, Severity
from zerotune.errors import REMOVAL, InvalidValueError, OptimizerError
from zerotune.plan.context import RunFacts
from zerotune.plan.optimizer.arguments import (
    LENGTHS,
    Arguments,
    reject_unknown,
)
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.choices import (
    BY_RUN,
    GroupChoice,
    OptimizerChoice,
    SchedulerChoice,
)
from zerotune.plan.optimizer.schedules import (
    DEFAULT_SCHEDULER,
    SCHEDULER_TYPE,
    SCHEDULERS,
    SchedulerEntry,
    normalise_scheduler_name,
)
from zerotune.plan.sections import SchedulerSection
from zerotune.plan.values import is_auto

SCHEDULER: Final = "scheduler.params"


DEFAULT_WARMUP: Final = 500
"""Default number of warm-up steps if the run's length is unknown; otherwise the default is at most
this number."""
WARMUP_SHARE: Final = 20
"""The default warm-up is at most the run's length divided by this number."""


def requested_schedule(section: SchedulerSection | None) -> SchedulerEntry | None:
    """Return the requested schedule; ``None`` for a constant learning rate."""
    if section is None:
        return None
    name = DEFAULT_SCHEDULER if _unnamed(section) else normalise_scheduler_name(section.type)
    return SCHEDULERS[name]


def _unnamed(section: SchedulerSection) -> bool:
    return section.type is None or is_auto(section.type)


def choose_schedule(
    entry: SchedulerEntry | None,
    section: SchedulerSection | None,
    optimizer: OptimizerChoice,
    run: RunFacts,
    log: Log,
) -> SchedulerChoice | None:
    """Return the schedule for ``optimizer``, with every argument; ``None`` for a constant rate."""
    own_pace = OPTIMIZERS[optimizer.name].own_schedule
    if entry is None or section is None or (own_pace and _unnamed(section)):
        stopped = next((group for group in optimizer.groups if group.until is not None), None)
        if stopped is not None:
            return _constant_until(stopped, log, own_pace=own_pace)
        _without_schedule(optimizer, run, log, own_pace=own_pace)
        return None
    params = _begun_anew(section.params or {})
    reject_unknown(params, entry.parameter_names, log, section=SCHEDULER, owner=entry.name)
    arguments = Arguments(
        entry=entry,
        section=SCHEDULER,
        written=params,
        run=run,
        # A peak that differs from the optimizer's lr gets a decision of its own.
        implied={entry.peak: (optimizer.lr, "the optimizer's lr")} if entry.peak else {},
        decisions=log.decisions,
    )
    arguments.fill()
    if _unnamed(section):
        _default_warmup(arguments, run)
        reason = f"no scheduler is named, so {entry.name} is used"
        log.decide(SCHEDULER_TYPE, None, entry.name, reason)
    elif section.type != entry.name:
        log.decide(SCHEDULER_TYPE, section.type, entry.name, "another spelling")
    _no_warmup(arguments, "note" if _unnamed(section) else "warning")
    peak = optimizer.lr if entry.peak is None else arguments.values[entry.peak]
    if peak != optimizer.lr:
        reason = f"{entry.name} sets the learning rate from {entry.peak} and ignores the "
        reason += "optimizer's"
        log.decide("optimizer.params.lr", optimizer.lr, peak, reason, "warning")
    _compare_lengths(arguments.values, log)
    arguments.record_defaults(arguments.defaulted)
    if entry.source == "zerotune":
        reason = "DeepSpeed has no such class; zerotune applies diffusers' curve at each "
        log.decide(SCHEDULER_TYPE, entry.name, entry.name, f"{reason}optimizer step")
    choice = SchedulerChoice(name=entry.name, params=arguments.values, source=entry.source)
    return _per_group(choice, optimizer, log)


def _without_schedule(
    optimizer: OptimizerChoice, run: RunFacts, log: Log, *, own_pace: bool
) -> None:
    """Record why there is no schedule; the learning rate is then constant."""
    if run.warmup_steps and not own_pace:
        reason = "no scheduler is configured, so the learning rate stays constant without "
        reason += 'a warm-up; write scheduler.type = "WarmupLR", or "auto"'
        log.decide("run.warmup_steps", run.warmup_steps, None, reason, "warning")
        return
    reason = "no scheduler is configured, so the learning rate stays constant, as in DeepSpeed"
    if own_pace:
        reason = f"no scheduler is configured, and {optimizer.name} adapts its own learning rate"
    log.decide(SCHEDULER_TYPE, None, None, reason)


def _begun_anew(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without DeepSpeed's ``last_batch_iteration``, which must be -1."""
    others = dict(params)
    start = others.pop("last_batch_iteration", -1)
    if start != -1:
        raise InvalidValueError(
            "a resumed run continues the schedule, because the checkpoint contains the step",
            key=f"{SCHEDULER}.last_batch_iteration",
            value=start,
            edits=[REMOVAL],
        )
    return others


def _default_warmup(arguments: Arguments, run: RunFacts) -> None:
    """Choose the warm-up length where none was requested."""
    if "warmup_num_steps" not in arguments.defaulted:
        return
    if run.total_steps is None:
        steps, reason = DEFAULT_WARMUP, "the run's length is unknown"
    else:
        steps = min(DEFAULT_WARMUP, run.total_steps // WARMUP_SHARE)
        # DeepSpeed's shortest warm-up keeps two updates at the minimum.
        steps = 0 if steps < 2 else steps
        reason = f"5 % of the run's {run.total_steps} steps, at most {DEFAULT_WARMUP}"
    arguments.change("warmup_num_steps", steps, reason)


def _no_warmup(arguments: Arguments, severity: Severity) -> None:
    """Replace 0 warm-up steps, which DeepSpeed refuses, with 1: two updates at the minimum."""
    name, values = arguments.entry.name, arguments.values
    if values.get("warmup_num_steps") != 0:
        return
    values["warmup_num_steps"] = 1
    reason = "DeepSpeed rejects 0; 1 is its minimum"
    if name == "WarmupDecayLR":
        reason += ", so the first two updates run at warmup_min_lr"
    arguments.decide(f"{SCHEDULER}.warmup_num_steps", 0, 1, reason, severity)
    floor = {"WarmupLR": "warmup_min_lr", "WarmupCosineLR": "warmup_min_ratio"}.get(name)
    if floor is None:
        return
    peak = values["warmup_max_lr"] if name == "WarmupLR" else 1.0
    reason = "no warm-up: the schedule starts at its peak"
    if name == "WarmupCosineLR":
        reason += "; DeepSpeed still runs the first update at a learning rate of 0"
    arguments.change(floor, peak, reason, "note")


def _compare_lengths(values: Mapping[str, Any], log: Log) -> None:
    key = next((key for key in LENGTHS if key in values), "")
    total, warmup = values.get(key), values.get("warmup_num_steps", values.get("num_warmup_steps"))
    if total in (None, BY_RUN) or warmup is None:
        return
    if values.get("lr_end") is not None and total == warmup:
        raise InvalidValueError(
            "the polynomial schedule divides by the number of steps after the warm-up, "
            "which is zero",
            "make the schedule longer than its warm-up",
            f"{SCHEDULER}.{key}",
            total,
        )
    if total < warmup:
        reason = f"the value is unchanged, but the warm-up of {warmup} steps is longer than the "
        log.decide(f"{SCHEDULER}.{key}", total, total, f"{reason}whole schedule", "warning")


def open_length(choice: SchedulerChoice | None) -> str | None:
    """Return the argument that the run has yet to decide; ``None`` if there is none."""
    params = {} if choice is None else choice.params
    return next((key for key in LENGTHS if params.get(key) == BY_RUN), None)


def with_length(choice: SchedulerChoice, steps: int, log: Log) -> SchedulerChoice:
    """Return a schedule with the length that its run has decided, in optimizer steps."""
    key = open_length(choice)
    if key is None:
        return choice
    params = {**choice.params, key: steps}
    log.decide(f"{SCHEDULER}.{key}", BY_RUN, steps, "taken from the run (total_steps)")
    _compare_lengths(params, log)
    return attrs.evolve(choice, params=params)


def _per_group(choice: SchedulerChoice, optimizer: OptimizerChoice, log: Log) -> SchedulerChoice:
    """Replace a DeepSpeed schedule class that would set one learning rate for all groups."""
    rates = {float(group.params.get("lr", optimizer.lr)) for group in optimizer.groups}
    stopped = any(group.until is not None for group in optimizer.groups)
    if choice.source != "deepspeed" or not (rates - {optimizer.lr} or stopped):
        return choice
    why = "a group stops before the others" if stopped else "the groups' learning rates differ"
    why += f", but DeepSpeed's {choice.name} would set one rate for all of them; "
    why += "zerotune applies the same curve, scaled for each group"
    log.decide(SCHEDULER_TYPE, choice.name, choice.name, why)
    return attrs.evolve(choice, source="zerotune")


def _constant_until(group: GroupChoice, log: Log, *, own_pace: bool) -> SchedulerChoice:
    """Return the schedule of a run that sets none, but has a group that stops early."""
    if own_pace:
        raise OptimizerError(
            "the optimizer adapts its own learning rate, but only a schedule can stop the group",
            "use AdamW, or omit until",
            f"optimizer.groups.{group.name}.until",
            group.until,
        )
    why = f"the schedule stops the training of group {group.name} after step {group.until}"
    log.decide(SCHEDULER_TYPE, None, "constant", why)
    return SchedulerChoice(name="constant", params={}, source="zerotune")
