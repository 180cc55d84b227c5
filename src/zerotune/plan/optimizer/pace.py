"""From a request to one schedule, which depends on the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune.decisions import Decision, Log, Severity
from zerotune.errors import REMOVAL, InvalidValueError, OptimizerError
from zerotune.plan.context import RunFacts
from zerotune.plan.optimizer.arguments import Filled, Sources, Suggestion, reject_unknown
from zerotune.plan.optimizer.choices import GroupChoice, OptimizerChoice, SchedulerChoice
from zerotune.plan.optimizer.curves import ONE_CYCLE_BETA2
from zerotune.plan.optimizer.schedules import SCHEDULER_TYPE, SCHEDULERS, SchedulerEntry
from zerotune.plan.values import is_auto

SCHEDULER: Final = "scheduler.params"


DEFAULT_WARMUP: Final = 500
"""Default number of warm-up steps if the run's length is unknown; otherwise the default is at most
this number."""
WARMUP_SHARE: Final = 20
"""The default warm-up is at most the run's length divided by this number."""


@attrs.frozen(kw_only=True)
class ScheduleRequest:
    """The requested schedule."""

    name: str
    """Canonical name."""
    params: Mapping[str, Any]
    """Arguments as written; may contain ``"auto"``."""
    written: str | None = None
    """The name as written; ``None`` if nothing is configured."""
    overrides: Mapping[str, Any] = attrs.field(factory=dict)
    """Arguments that override the written ones."""
    lr_overridden: bool = False
    """Whether the resolver overrides the optimizer's learning rate."""

    @property
    def entry(self) -> SchedulerEntry:
        """Catalogue entry of the schedule."""
        return SCHEDULERS[self.name]


@attrs.define(kw_only=True)
class ScheduleSettling:
    """Chooses a schedule for a request."""

    request: ScheduleRequest
    optimizer: OptimizerChoice
    run: RunFacts
    filled: Filled = attrs.field(init=False)

    def settled(self) -> tuple[SchedulerChoice, tuple[Decision, ...]]:
        """Choose a schedule."""
        self._complete()
        entry, written, filled = self.request.entry, self.request.written, self.filled
        if written is None:
            reason = f"no scheduler is named, so {entry.name} is used"
            filled.decide(SCHEDULER_TYPE, None, entry.name, reason)
        elif written != entry.name:
            filled.decide(SCHEDULER_TYPE, written, entry.name, "another spelling")
        self._no_warmup()
        peak = self.optimizer.lr if entry.peak is None else filled.values[entry.peak]
        if peak != self.optimizer.lr:
            reason = f"{entry.name} sets the learning rate from {entry.peak} and ignores the "
            reason += "optimizer's"
            filled.decide("optimizer.params.lr", self.optimizer.lr, peak, reason, "warning")
        self._compare_lengths()
        if entry.name == "OneCycle":
            self._check_one_cycle()
        filled.record_defaults(SCHEDULER, entry.name, filled.defaulted)
        if entry.source == "zerotune":
            reason = "DeepSpeed has no such class; zerotune applies diffusers' curve at each "
            filled.decide(SCHEDULER_TYPE, entry.name, entry.name, f"{reason}optimizer step")
        choice = SchedulerChoice(name=entry.name, params=filled.values, source=entry.source)
        return choice, tuple(filled.decisions)

    def _complete(self) -> None:
        entry, log = self.request.entry, Log()

        def completed() -> Filled:
            params = self._scalars()
            for given in (params, self.request.overrides):
                reject_unknown(
                    given, entry.parameter_names, log, section=SCHEDULER, owner=entry.name
                )
            sources = Sources(
                owner=entry.name,
                section=SCHEDULER,
                written=self._follow_override(params, log),
                overrides=self.request.overrides,
                suggestions=self._schedule_suggestions(),
            )
            return sources.fill(entry.parameters)

        self.filled = log.whole(completed)
        self.filled.decisions[:0] = log.decisions
        if self.request.written is None and "warmup_num_steps" in self.filled.defaulted:
            self._default_warmup()

    def _scalars(self) -> dict[str, Any]:
        """Unpack lists of one value per parameter group, because there is only one group."""
        params = self.request.params
        start = params.get("last_batch_iteration", -1)
        if start != -1:
            raise InvalidValueError(
                "a resumed run continues the schedule, because the checkpoint contains the step",
                key=f"{SCHEDULER}.last_batch_iteration",
                value=start,
                edits=[REMOVAL],
            )
        plain: dict[str, Any] = {}
        for key, value in params.items():
            if key == "last_batch_iteration":
                continue
            if isinstance(value, (list, tuple)):
                if len(value) != 1:
                    raise InvalidValueError(
                        f"expected one value, because {self.optimizer.name} has one "
                        "parameter group",
                        key=f"{SCHEDULER}.{key}",
                        value=value,
                        fix="write one number",
                    )
                plain[key] = value[0]
            else:
                plain[key] = value
        return plain

    def _follow_override(self, params: dict[str, Any], log: Log) -> dict[str, Any]:
        """Set the schedule's peak to an overridden learning rate, which otherwise has no effect."""
        peak = self.request.entry.peak
        if (
            not self.request.lr_overridden
            or peak != "warmup_max_lr"
            or peak in self.request.overrides
        ):
            return params
        written = params.get(peak)
        if written is None or is_auto(written) or written == self.optimizer.lr:
            return params
        log.decide(
            f"{SCHEDULER}.{peak}",
            written,
            self.optimizer.lr,
            "follows the learning rate set by OptimizerResolver(overrides=…)",
            "warning",
        )
        return {**params, peak: self.optimizer.lr}

    def _schedule_suggestions(self) -> dict[str, Suggestion]:
        entry, run = self.request.entry, self.run
        suggestions: dict[str, Suggestion] = {}
        if entry.peak is not None:
            # A peak that differs from the optimizer's lr gets a decision of its own.
            suggestions[entry.peak] = Suggestion(
                value=self.optimizer.lr, source="the optimizer's lr", yields=True
            )
        if run.warmup_steps is not None:
            warmup = Suggestion(value=run.warmup_steps, source="the run (warmup_steps)")
            suggestions |= dict.fromkeys(("warmup_num_steps", "num_warmup_steps"), warmup)
        if run.total_steps is not None:
            total = Suggestion(value=run.total_steps, source="the run (total_steps)")
            suggestions |= dict.fromkeys(("total_num_steps", "num_training_steps"), total)
        return {key: value for key, value in suggestions.items() if key in entry.parameter_names}

    def _default_warmup(self) -> None:
        """Choose the warm-up length where none was requested."""
        if self.run.total_steps is None:
            steps, reason = DEFAULT_WARMUP, "the run's length is unknown"
        else:
            steps = min(DEFAULT_WARMUP, self.run.total_steps // WARMUP_SHARE)
            # DeepSpeed's shortest warm-up keeps two updates at the minimum.
            steps = 0 if steps < 2 else steps
            reason = f"5 % of the run's {self.run.total_steps} steps, at most {DEFAULT_WARMUP}"
        self.filled.change(SCHEDULER, "warmup_num_steps", steps, reason)

    def _no_warmup(self) -> None:
        """Replace 0 warm-up steps, which DeepSpeed refuses, with 1: two updates at the minimum."""
        entry, values = self.request.entry, self.filled.values
        if values.get("warmup_num_steps") != 0:
            return
        values["warmup_num_steps"] = 1
        reason = "DeepSpeed rejects 0; 1 is its minimum"
        if entry.name == "WarmupDecayLR":
            reason += ", so the first two updates run at warmup_min_lr"
        severity: Severity = "note" if self.request.written is None else "warning"
        self.filled.decide(f"{SCHEDULER}.warmup_num_steps", 0, 1, reason, severity)
        floor = {"WarmupLR": "warmup_min_lr", "WarmupCosineLR": "warmup_min_ratio"}.get(entry.name)
        if floor is None:
            return
        peak = values["warmup_max_lr"] if entry.name == "WarmupLR" else 1.0
        reason = "no warm-up: the schedule starts at its peak"
        if entry.name == "WarmupCosineLR":
            reason += "; DeepSpeed still runs the first update at a learning rate of 0"
        self.filled.change(SCHEDULER, floor, peak, reason, "note")

    def _compare_lengths(self) -> None:
        values = self.filled.values
        key = "total_num_steps" if "total_num_steps" in values else "num_training_steps"
        total, warmup = (
            values.get(key),
            values.get("warmup_num_steps", values.get("num_warmup_steps")),
        )
        if values.get("lr_end") is not None and total == warmup:
            raise InvalidValueError(
                "the polynomial schedule divides by the number of steps after the warm-up, "
                "which is zero",
                key=f"{SCHEDULER}.{key}",
                value=total,
                fix="make the schedule longer than its warm-up",
            )
        if total is not None and warmup is not None and total < warmup:
            self.filled.decide(
                f"{SCHEDULER}.{key}",
                total,
                total,
                f"the value is unchanged, but the warm-up of {warmup} steps is longer than the "
                "whole schedule",
                "warning",
            )

    def _check_one_cycle(self) -> None:
        values = self.filled.values
        betas = self.optimizer.params.get("betas")
        if values["cycle_momentum"] and betas is None:
            reason = f"DeepSpeed cycles only betas, which {self.optimizer.name} does not have"
            self.filled.change(SCHEDULER, "cycle_momentum", False, reason)
        elif values["cycle_momentum"]:
            self.filled.decide(
                "optimizer.params.betas",
                betas,
                (values["cycle_min_mom"], ONE_CYCLE_BETA2),
                "OneCycle cycles the first beta and sets the second to 0.99; set "
                "cycle_momentum to false to keep the optimizer's betas",
                "warning",
            )
        if values["decay_step_size"] == 0 and values["decay_lr_rate"] > 0:
            self.filled.decide(
                f"{SCHEDULER}.decay_lr_rate",
                values["decay_lr_rate"],
                values["decay_lr_rate"],
                "the value is unchanged, but DeepSpeed does not decay while decay_step_size is 0",
                "warning",
            )


def per_group_schedule(
    choice: SchedulerChoice, optimizer: OptimizerChoice
) -> tuple[SchedulerChoice, tuple[Decision, ...]]:
    """Replace a DeepSpeed schedule class that would set one learning rate for all groups."""
    rates = {float(group.params.get("lr", optimizer.lr)) for group in optimizer.groups}
    stopped = any(group.until is not None for group in optimizer.groups)
    if choice.source != "deepspeed" or not (rates - {optimizer.lr} or stopped):
        return choice, ()
    why = "a group stops before the others" if stopped else "the groups' learning rates differ"
    decision = Decision(
        key=SCHEDULER_TYPE,
        before=choice.name,
        after=choice.name,
        reason=f"{why}, but DeepSpeed's {choice.name} would set one rate for all of them; "
        "zerotune applies the same curve, scaled for each group",
    )
    return attrs.evolve(choice, source="zerotune"), (decision,)


def constant_until(
    group: GroupChoice, *, own_pace: bool
) -> tuple[SchedulerChoice, tuple[Decision, ...]]:
    """Return the schedule of a run that sets none, but has a group that stops early."""
    key = f"optimizer.groups.{group.name}.until"
    if own_pace:
        raise OptimizerError(
            "the optimizer adapts its own learning rate, but only a schedule can stop the group",
            key=key,
            value=group.until,
            fix="use AdamW, or omit until",
        )
    decision = Decision(
        key=SCHEDULER_TYPE,
        before=None,
        after="constant",
        reason=f"the schedule stops the training of group {group.name} after step {group.until}",
    )
    return SchedulerChoice(name="constant", params={}, source="zerotune"), (decision,)
