"""``OptimizerResolver``: what will really run, settled before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import attrs

from zerotune._util.table import Block, Line, Page, Table
from zerotune._util.text import as_number
from zerotune.decisions import Decision, Log, Severity, announce, render_decisions
from zerotune.errors import UNSET, InvalidValueError, OptimizerError, UnknownKeyError
from zerotune.optim.capability import LOW_BIT, Capability, CapabilityTable, Situation, capability_of
from zerotune.optim.groups import (
    MuonPatterns,
    ParameterGroups,
    describe,
    group_parameters,
    muon_groups,
)
from zerotune.optim.settle import (
    Policy,
    Request,
    ScheduleRequest,
    ScheduleSettling,
    Settled,
    Settling,
    Suggestion,
    per_group_schedule,
)
from zerotune.optimizers.catalogue import (
    DEFAULT_OPTIMIZER,
    OPTIMIZER_TYPE,
    OPTIMIZERS,
    GroupChoice,
    OptimizerChoice,
    SchedulerChoice,
    normalise_optimizer_name,
    parse_optimizer_name,
)
from zerotune.optimizers.schedules import (
    DEFAULT_SCHEDULER,
    SCHEDULER_TYPE,
    SCHEDULERS,
    ScheduleCurve,
    lr_at,
    normalise_scheduler_name,
    plot_curve,
    schedule_curve,
)
from zerotune.plan.model import is_auto
from zerotune.plan.read import SHORT_NAMES, settings_by_path

if TYPE_CHECKING:
    from zerotune.plan.model import ResolvedPlan
    from zerotune.platform import Platform


@attrs.frozen(kw_only=True)
class OptimizerResolution:
    """What ``OptimizerResolver`` settled on, and why."""

    optimizer: OptimizerChoice
    """The optimizer that will run, every argument explicit."""
    scheduler: SchedulerChoice | None
    """Its schedule; ``None`` for a constant learning rate."""
    states: tuple[str, ...]
    """Names of the fp32 tensors the optimizer keeps per parameter."""
    situation: Situation
    """Where it runs."""
    decisions: tuple[Decision, ...]
    """Every automatic choice."""

    def explain(self) -> str:
        """What runs, its schedule at a few steps, and every decision, as text."""
        optimizer, scheduler = self.optimizer, self.scheduler
        builder = _BUILDER.get(optimizer.source, f"of the package {optimizer.package}")
        decay = optimizer.weight_decay_mode
        blocks: list[Block] = [
            Line(f"optimizer: {optimizer.name}, runs as {optimizer.implementation} ({builder})"),
            Line(f"on {self.situation}", indent=2),
            *([] if decay is None else [Line(f"weight decay: {_DECAY[decay]}", indent=2)]),
            Line(f"states per parameter: {', '.join(self.states) or 'none'}", indent=2),
            _arguments(optimizer.params),
        ]
        if optimizer.groups:
            blocks.append(Line("parameter groups, the first match wins:"))
            blocks += [Line(describe(group), indent=2) for group in optimizer.groups]
        if scheduler is None:
            blocks.append(Line("scheduler: none, the learning rate stays constant"))
        else:
            summary = SCHEDULERS[scheduler.name].summary.lower()
            blocks.append(Line(f"scheduler: {scheduler.name}, {summary}"))
            blocks += [_arguments(scheduler.params), *_curve(scheduler, optimizer.lr)]
        if self.decisions:
            blocks += [Line("decisions:"), Line(render_decisions(self.decisions))]
        return Page(blocks=tuple(blocks)).text()


@attrs.frozen(kw_only=True)
class OptimizerResolver:
    """Settles the ``optimizer`` and ``scheduler`` sections of a resolved plan.

    Nothing is replaced in silence: every automatic choice is a ``Decision``. A name nobody knows
    is an error, never AdamW.
    """

    on_unsupported: Policy = attrs.field(default="fallback")
    """What happens to a known optimizer that cannot run here, or to an argument the optimizer
    does not have: ``"fallback"`` (AdamW, the arguments translated, with a warning) or
    ``"error"``."""
    overrides: Mapping[str, Any] | None = None
    """Values that beat the configuration and the run: ``{"lr": 3e-5}``,
    ``{"scheduler.params.warmup_num_steps": 100}``, ``{"optimizer.type": "Lion"}``,
    ``{"scheduler.type": None}`` for a constant learning rate."""
    groups: ParameterGroups | None = None
    """Which parameters get which arguments; ``None``: all get the same."""
    muon: MuonPatterns = attrs.field(default=MuonPatterns())
    """Which parameters Muon updates; without effect on other optimizers."""
    platform: Platform | None = None
    """``Platform`` that ``capability`` asks about when no plan is at hand."""
    table: CapabilityTable | None = None
    """Cells that were really run; those that come with zerotune when not given."""
    deepspeed_version: str | None = None
    """DeepSpeed release that ``capability`` asks about, instead of the platform's."""

    @on_unsupported.validator
    def _check_policy(self, _attribute: Any, value: str) -> None:
        if value not in get_args(Policy):
            raise InvalidValueError(
                "there are two policies",
                key="on_unsupported",
                value=value,
                fix='write "fallback" or "error"',
            )

    def resolve(self, resolved: ResolvedPlan) -> OptimizerResolution:
        """Settle the optimizer and the schedule.

        Args:
            resolved: The plan; its ``optimizer`` and ``scheduler`` sections, run facts, platform,
                stage, offload and precision are read.

        Raises:
            OptimizerError: An unknown name, or one that cannot run here under ``"error"``.
            UnknownKeyError: An argument nobody knows.
            InvalidValueError: An argument of the wrong type or out of range.
        """
        overrides = settings_by_path(self.overrides, _override_paths) if self.overrides else {}
        asked, situation, log = _Asked(resolved, overrides), Situation.of(resolved), Log()
        schedule = log.attempt(asked.schedule)
        settled = log.whole(
            lambda: Settling(
                asked=asked.optimizer(),
                situation=situation,
                overrides=asked.below(_OPTIMIZER_PARAMS),
                suggestions=asked.suggestions(schedule),
                policy=self.on_unsupported,
                table=self.table,
            ).settled()
        )
        choice, grouping = self._grouped(settled, resolved)
        scheduler, why = asked.settle_schedule(schedule, attrs.evolve(settled, choice=choice))
        return OptimizerResolution(
            optimizer=choice,
            scheduler=scheduler,
            states=settled.entry.states_for(settled.choice.params),
            situation=situation,
            decisions=(*settled.decisions, *grouping, *why, *_not_saved(settled)),
        )

    def apply(self, resolved: ResolvedPlan) -> ResolvedPlan:
        """``resolved`` with the choices filled in, and the decisions announced.

        Raises:
            OptimizerError: As ``resolve``.
        """
        settled = self.settled(resolved)
        announce(settled.decisions[len(resolved.decisions) :])
        return settled

    def settled(self, resolved: ResolvedPlan) -> ResolvedPlan:
        """As ``apply``, without announcing anything.

        Raises:
            OptimizerError: As ``resolve``.
        """
        resolution = self.resolve(resolved)
        return resolved.with_choices(
            resolution.optimizer, resolution.scheduler, resolution.decisions
        )

    def explain(self, resolved: ResolvedPlan) -> str:
        """What would run for ``resolved`` and why, as text."""
        return self.resolve(resolved).explain()

    def schedule_curve(self, resolved: ResolvedPlan, *, steps: int | None = None) -> ScheduleCurve:
        """The learning rate of every optimizer step, before anything is trained.

        Args:
            resolved: The plan.
            steps: How many; the run's ``total_steps`` when not given, else 1000.

        Raises:
            OptimizerError: As ``resolve``.
        """
        resolution = self.resolve(resolved)
        count = steps or resolved.run.total_steps or 1000
        return schedule_curve(resolution.optimizer, resolution.scheduler, count)

    def plot_schedule(
        self, resolved: ResolvedPlan, path: str | os.PathLike[str], *, steps: int | None = None
    ) -> Path:
        """Draw ``schedule_curve`` into a PNG file. Needs the extra ``zerotune[plot]``.

        Raises:
            MissingDependencyError: matplotlib is not installed.
            OptimizerError: As ``resolve``.
        """
        return plot_curve(self.schedule_curve(resolved, steps=steps), path)

    def capability(
        self,
        name: str,
        *,
        stage: int = 0,
        offload: str = "none",
        precision: str = "fp32",
        uses_deepspeed: bool = True,
    ) -> Capability:
        """Whether an optimizer can run, without a plan.

        Args:
            name: Any spelling ``normalise_optimizer_name`` takes.
            stage: ZeRO stage.
            offload: Where the optimizer states live: ``"none"``, ``"cpu"``, ``"nvme"``.
            precision: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
            uses_deepspeed: ``False`` asks about the plain engine.

        Raises:
            OptimizerError: Nobody knows the name.
        """
        versions = dict(self.platform.versions) if self.platform is not None else {}
        if self.deepspeed_version is not None:
            versions["deepspeed"] = self.deepspeed_version
        accelerator = "cpu"
        if self.platform is not None:
            accelerator = self.platform.deepspeed.accelerator or self.platform.accelerator
        situation = Situation(
            uses_deepspeed=uses_deepspeed,
            stage=stage,
            offload=offload,
            precision=precision,
            accelerator=accelerator,
            versions=versions,
        )
        return capability_of(OPTIMIZERS[normalise_optimizer_name(name)], situation, self.table)

    def _grouped(
        self, settled: Settled, resolved: ResolvedPlan
    ) -> tuple[OptimizerChoice, tuple[Decision, ...]]:
        choice = settled.choice
        decisions: tuple[Decision, ...] = ()
        if self.groups is not None:
            groups, decisions = group_parameters(self.groups, resolved.model, choice, settled.entry)
            choice = attrs.evolve(choice, groups=groups)
        if choice.name != "Muon":
            return choice, decisions
        # The split into Muon's and Adam's replaces the groups that were just described.
        return muon_groups(choice, resolved.model, self.muon, settled.rates)


# -- What is asked for: the sections of the plan under the overrides.


_OPTIMIZER_PARAMS: Final = "optimizer.params."
_SCHEDULER_PARAMS: Final = "scheduler.params."
_TYPES: Final = frozenset({OPTIMIZER_TYPE, SCHEDULER_TYPE})


def _override_paths(name: str, value: Any) -> list[tuple[str, Any]]:
    """Where an override goes; a bare name is an argument of the optimizer."""
    path = name
    if "." not in name:
        short = SHORT_NAMES.get(name, "")
        path = (
            short
            if short.startswith(("optimizer.", "scheduler."))
            else f"{_OPTIMIZER_PARAMS}{name}"
        )
    if path not in _TYPES and not path.startswith((_OPTIMIZER_PARAMS, _SCHEDULER_PARAMS)):
        raise UnknownKeyError(
            "overrides reach the optimizer and the scheduler only",
            key=name,
            value=value,
            fix=f'write "{_OPTIMIZER_PARAMS}lr", "{_SCHEDULER_PARAMS}warmup_num_steps", '
            '"optimizer.type" or "scheduler.type"',
        )
    return [(path, value)]


@attrs.frozen
class _Asked:
    """What a plan asks for, under the overrides."""

    resolved: ResolvedPlan
    overrides: Mapping[str, Any]

    def below(self, prefix: str) -> dict[str, Any]:
        return {
            path.removeprefix(prefix): value
            for path, value in self.overrides.items()
            if path.startswith(prefix)
        }

    def optimizer(self) -> Request:
        section = self.resolved.plan.optimizer
        written = self.overrides.get(OPTIMIZER_TYPE, None if section is None else section.type)
        configured = written is not None and not is_auto(written)
        return Request(
            name=parse_optimizer_name(written if configured else DEFAULT_OPTIMIZER),
            params={} if section is None else dict(section.params or {}),
            configured=configured,
        )

    def schedule(self) -> ScheduleRequest | None:
        section = self.resolved.plan.scheduler
        written = self.overrides.get(SCHEDULER_TYPE, UNSET)
        if written is None:
            return None
        if written is UNSET:
            if section is None and not self.below(_SCHEDULER_PARAMS):
                return None
            written = None if section is None else section.type
        if is_auto(written):
            written = None
        return ScheduleRequest(
            name=DEFAULT_SCHEDULER if written is None else normalise_scheduler_name(written),
            params={} if section is None else dict(section.params or {}),
            written=written,
            overrides=self.below(_SCHEDULER_PARAMS),
            lr_overridden=f"{_OPTIMIZER_PARAMS}lr" in self.overrides,
        )

    def suggestions(self, schedule: ScheduleRequest | None) -> dict[str, Suggestion]:
        """What the run, or failing that the schedule, says about the optimizer's arguments."""
        run = self.resolved.run
        suggestions = {
            name: Suggestion(value=getattr(run, name), source=f"the run ({name})")
            for name in ("lr", "betas", "eps", "weight_decay")
            if getattr(run, name) is not None
        }
        peak = None if schedule is None or schedule.entry.peak is None else schedule.entry.peak
        if "lr" not in suggestions and schedule is not None and peak is not None:
            value = as_number(schedule.params.get(peak))
            # A peak out of range is refused under its own name, not under the optimizer's.
            if value is not None and value > 0:
                suggestions["lr"] = Suggestion(
                    value=value, source=f"scheduler.params.{peak}", yields=True
                )
        return suggestions

    def settle_schedule(
        self, request: ScheduleRequest | None, settled: Settled
    ) -> tuple[SchedulerChoice | None, tuple[Decision, ...]]:
        own_pace = settled.entry.own_schedule
        if request is None or (own_pace and request.written is None):
            stopped = next((g for g in settled.choice.groups if g.until is not None), None)
            if stopped is not None:
                return _constant_until(stopped, own_pace=own_pace)
            overridden = request is None and self.resolved.plan.scheduler is not None
            return None, (self._without_schedule(settled, overridden=overridden),)
        settling = ScheduleSettling(
            request=request, optimizer=settled.choice, run=self.resolved.run
        )
        scheduler, decisions = settling.settled()
        scheduler, own_curve = per_group_schedule(scheduler, settled.choice)
        return scheduler, (*decisions, *own_curve)

    def _without_schedule(self, settled: Settled, *, overridden: bool) -> Decision:
        """Why there is no schedule, which in DeepSpeed means a constant learning rate."""
        section, warmup = self.resolved.plan.scheduler, self.resolved.run.warmup_steps
        key: str = SCHEDULER_TYPE
        before: Any = section.type if section and overridden else None
        severity: Severity = "warning" if overridden else "note"
        if overridden:
            reason = "overrides ask for no schedule: the learning rate stays constant"
        elif settled.entry.own_schedule:
            reason = f"no scheduler is configured, and {settled.choice.name} sets its own pace"
        elif warmup:
            key, before, severity = "run.warmup_steps", warmup, "warning"
            reason = "no scheduler is configured, so the learning rate stays constant and nothing "
            reason += 'warms up; write scheduler.type = "WarmupLR", or "auto"'
        else:
            reason = "no scheduler is configured: the learning rate stays constant, as in DeepSpeed"
        return Decision(key=key, before=before, after=None, reason=reason, severity=severity)


# -- The schedule, and what is said about the states.


def _not_saved(settled: Settled) -> tuple[Decision, ...]:
    """What checkpoints and exports will lack."""
    name = settled.choice.name
    if name in LOW_BIT:
        reason = "checkpoints take no states in 8 or 4 bits: saving them will be refused"
    elif settled.entry.own_schedule:
        reason = "the numbers it keeps for all weights together are not in checkpoints: a resumed "
        reason += "run starts them anew"
        if name == "AdamWScheduleFree":
            reason += "; evaluation, EMA and exports see the weights trained, not their average"
    else:
        return ()
    return (
        Decision(key="optimizer.state", before=name, after=name, reason=reason, severity="warning"),
    )


# -- As text.


_BUILDER: Final = {
    "deepspeed": "built by DeepSpeed",
    "torch": "of torch.optim",
    "zerotune": "zerotune's own",
}

_DECAY: Final = {
    "decoupled": "decoupled from the gradient, as AdamW",
    "l2": "L2, added to the gradient as in Adam",
}


def _arguments(params: Mapping[str, Any]) -> Table:
    return Table(rows=tuple((name, _value_text(value)) for name, value in params.items()))


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_value_text(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _curve(scheduler: SchedulerChoice, base_lr: float) -> tuple[Line, Table]:
    """The learning rate where the schedule turns."""
    params = scheduler.params
    warmup = params.get("warmup_num_steps", params.get("num_warmup_steps"))
    total = params.get("total_num_steps", params.get("num_training_steps"))
    steps = {0, 1, 2, 10, 100, 1000}
    steps |= {warmup + 1} if warmup is not None else set()
    steps = {step for step in steps if total is None or step < total}
    steps |= {total - 1} if total is not None else set()
    rows = tuple((str(step), f"{lr_at(scheduler, step, base_lr):.6g}") for step in sorted(steps))
    return (
        Line("learning rate of update number (from 0)", indent=2),
        Table(rows=rows, align="r", indent=4),
    )


def _constant_until(
    group: GroupChoice, *, own_pace: bool
) -> tuple[SchedulerChoice, tuple[Decision, ...]]:
    """The schedule of a run that names none, where a group stops before the others."""
    key = f"optimizer.groups.{group.name}.until"
    if own_pace:
        raise OptimizerError(
            "the optimizer sets its own pace, and a schedule would have to end the training",
            key=key,
            value=group.until,
            fix="use AdamW, or leave until out",
        )
    decision = Decision(
        key=SCHEDULER_TYPE,
        before=None,
        after="constant",
        reason=f"it is what ends the training of {group.name} after step {group.until}",
    )
    return SchedulerChoice(name="constant", params={}, source="zerotune"), (decision,)
