"""``OptimizerResolver`` chooses the optimizer and the schedule before anything is loaded.

The resolver replaces an optimizer that cannot run, fills in the arguments, and then chooses the
class that performs the update. Every change is recorded with its reason. The schedule depends on
the optimizer and counts optimizer steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

import attrs

from zerotune._util.table import Block, Line, Page, Table
from zerotune._util.text import as_number
from zerotune.decisions import Decision, Log, Severity, announce, render_decisions
from zerotune.errors import UNSET, InvalidValueError, UnknownKeyError
from zerotune.plan.optimizer.arguments import Suggestion
from zerotune.plan.optimizer.capability import LOW_BIT, Capability, Situation, capability_of
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.optimizer.choose import Policy, Request, Settled, Settling
from zerotune.plan.optimizer.curves import ScheduleCurve, lr_at, plot_curve, schedule_curve
from zerotune.plan.optimizer.groups import KEY, ParameterGroups, describe, group_parameters
from zerotune.plan.optimizer.muon import MuonPatterns, muon_groups
from zerotune.plan.optimizer.names import (
    DEFAULT_OPTIMIZER,
    OPTIMIZER_TYPE,
    normalise_optimizer_name,
    parse_optimizer_name,
)
from zerotune.plan.optimizer.pace import (
    ScheduleRequest,
    ScheduleSettling,
    constant_until,
    per_group_schedule,
)
from zerotune.plan.optimizer.schedules import (
    DEFAULT_SCHEDULER,
    SCHEDULER_TYPE,
    SCHEDULERS,
    normalise_scheduler_name,
)
from zerotune.plan.read import SHORT_NAMES, settings_by_path
from zerotune.plan.resolved import Resolved
from zerotune.plan.values import is_auto

if TYPE_CHECKING:
    from zerotune.platform import Platform


ResolvedT = TypeVar("ResolvedT", bound=Resolved)


@attrs.frozen(kw_only=True)
class OptimizerResolution:
    """Result of ``OptimizerResolver``, with the reason for each choice."""

    optimizer: OptimizerChoice
    """The optimizer that will run, with every argument explicit."""
    scheduler: SchedulerChoice | None
    """The learning-rate schedule; ``None`` for a constant learning rate."""
    states: tuple[str, ...]
    """Names of the fp32 tensors that the optimizer keeps for each parameter."""
    situation: Situation
    """The situation in which the optimizer runs."""
    decisions: tuple[Decision, ...]
    """All automatic choices."""

    def explain(self) -> str:
        """Describe the optimizer, the schedule at a few steps, and every decision, as text."""
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
            blocks.append(Line("parameter groups, first match wins:"))
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
    """Chooses the optimizer and the schedule for a resolved plan.

    Every automatic choice is recorded as a ``Decision``. Unknown optimizer names raise an error and
    never fall back to AdamW.
    """

    on_unsupported: Policy = attrs.field(default="fallback")
    """What to do if an optimizer cannot run here, or does not accept an argument. ``"fallback"``
    switches to AdamW with translated arguments, or removes the argument, and warns; ``"error"``
    raises an error."""
    overrides: Mapping[str, Any] | None = None
    """Values that override the configuration and the run: ``{"lr": 3e-5}``,
    ``{"scheduler.params.warmup_num_steps": 100}``, ``{"optimizer.type": "Lion"}``,
    ``{"scheduler.type": None}`` for a constant learning rate."""
    groups: ParameterGroups | None = None
    """Parameter groups; ``None`` gives all parameters the same arguments."""
    muon: MuonPatterns = attrs.field(default=MuonPatterns())
    """Parameters that Muon updates; ignored by other optimizers."""
    platform: Platform | None = None
    """Machine that ``capability`` assumes; ``resolve`` uses the plan's machine instead."""
    deepspeed_version: str | None = None
    """DeepSpeed release that ``capability`` assumes; by default the release in ``platform``."""

    @on_unsupported.validator
    def _check_policy(self, _attribute: Any, value: str) -> None:
        if value not in get_args(Policy):
            raise InvalidValueError(
                "is not a valid policy",
                key="on_unsupported",
                value=value,
                fix='use "fallback" or "error"',
            )

    def resolve(self, resolved: Resolved) -> OptimizerResolution:
        """Choose the optimizer and the schedule.

        Args:
            resolved: The plan; its ``optimizer`` and ``scheduler`` sections, run facts, platform,
                stage, offload and precision are read.

        Raises:
            OptimizerError: The name is unknown, or the optimizer cannot run here and has no
                fallback.
            UnknownKeyError: An argument is unknown.
            InvalidValueError: An argument has the wrong type or is out of range.
        """
        return self._resolve(resolved, self._grouped)

    def _resolve(
        self,
        resolved: Resolved,
        group: Callable[[Settled, Resolved], tuple[OptimizerChoice, tuple[Decision, ...]]],
    ) -> OptimizerResolution:
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
            ).settled()
        )
        choice, grouping = group(settled, resolved)
        scheduler, why = asked.settle_schedule(schedule, attrs.evolve(settled, choice=choice))
        return OptimizerResolution(
            optimizer=choice,
            scheduler=scheduler,
            states=settled.entry.states_for(settled.choice.params),
            situation=situation,
            decisions=(*settled.decisions, *grouping, *why, *_not_saved(settled)),
        )

    def apply(self, resolved: ResolvedT) -> ResolvedT:
        """Return the plan ``resolved`` with the choices filled in, and log the decisions.

        Raises:
            OptimizerError: As in ``resolve``.
        """
        settled = self.settled(resolved)
        announce(settled.decisions[len(resolved.decisions) :])
        return settled

    def settled(self, resolved: ResolvedT) -> ResolvedT:
        """Return the plan ``resolved`` with the choices filled in, without logging.

        Raises:
            OptimizerError: As in ``resolve``.
        """
        return _filled(resolved, self.resolve(resolved))

    def previewed(self, resolved: ResolvedT) -> ResolvedT:
        """Return the plan ``resolved`` as ``settled`` does, even if its model is unknown.

        Parameter groups, and Muon's choice of parameters, depend on the model. Without a model they
        remain undecided, and a decision records this. Such a plan can be shown, but Muon cannot
        train with it.

        Raises:
            OptimizerError: As in ``resolve``.
        """
        group = self._grouped if resolved.model is not None else self._ungrouped
        return _filled(resolved, self._resolve(resolved, group))

    def explain(self, resolved: Resolved) -> str:
        """Describe the optimizer and schedule for the plan ``resolved``, with reasons."""
        return self.resolve(resolved).explain()

    def schedule_curve(self, resolved: Resolved, *, steps: int | None = None) -> ScheduleCurve:
        """Return the learning rate of every optimizer step, without training.

        Args:
            resolved: The plan.
            steps: Number of steps; by default the run's ``total_steps``, or 1000 if it is unknown.

        Raises:
            OptimizerError: As in ``resolve``.
        """
        resolution = self.resolve(resolved)
        count = steps or resolved.run.total_steps or 1000
        return schedule_curve(resolution.optimizer, resolution.scheduler, count)

    def plot_schedule(
        self, resolved: Resolved, path: str | os.PathLike[str], *, steps: int | None = None
    ) -> Path:
        """Save a plot of ``schedule_curve`` as a PNG file. Requires the extra ``zerotune[plot]``.

        Args:
            resolved: The resolved plan.
            path: Path of the PNG file.
            steps: Number of steps; by default the run's ``total_steps``, or 1000 if it is unknown.

        Raises:
            MissingDependencyError: matplotlib is not installed.
            OptimizerError: As in ``resolve``.
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
        """Return whether an optimizer can run with the given stage, offload and precision.

        Args:
            name: Any spelling accepted by ``normalise_optimizer_name``.
            stage: ZeRO stage.
            offload: Location of the optimizer states: ``"none"``, ``"cpu"``, ``"nvme"``.
            precision: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
            uses_deepspeed: ``False`` selects the plain engine.

        Raises:
            OptimizerError: The name is unknown.
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
        return capability_of(OPTIMIZERS[normalise_optimizer_name(name)], situation)

    def _grouped(
        self, settled: Settled, resolved: Resolved
    ) -> tuple[OptimizerChoice, tuple[Decision, ...]]:
        choice = settled.choice
        decisions: tuple[Decision, ...] = ()
        if self.groups is not None:
            groups, decisions = group_parameters(self.groups, resolved.model, choice, settled.entry)
            choice = attrs.evolve(choice, groups=groups)
        if choice.name != "Muon":
            return choice, decisions
        # The split into Muon's and Adam's parameters replaces the groups decided above.
        return muon_groups(choice, resolved.model, self.muon, settled.rates)

    def _ungrouped(
        self, settled: Settled, _resolved: Resolved
    ) -> tuple[OptimizerChoice, tuple[Decision, ...]]:
        if self.groups is None and settled.choice.name != "Muon":
            return settled.choice, ()
        reason = "parameter groups depend on the model's parameters, which are unknown here"
        return settled.choice, (Decision(key=KEY, before=None, after="open", reason=reason),)


def _filled(resolved: ResolvedT, resolution: OptimizerResolution) -> ResolvedT:
    return resolved.with_choices(resolution.optimizer, resolution.scheduler, resolution.decisions)


_OPTIMIZER_PARAMS: Final = "optimizer.params."
_SCHEDULER_PARAMS: Final = "scheduler.params."
_TYPES: Final = frozenset({OPTIMIZER_TYPE, SCHEDULER_TYPE})


def _override_paths(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the path of an override; a name without dots is an argument of the optimizer."""
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
            "is not a setting of the optimizer or the scheduler",
            key=name,
            value=value,
            fix=f'use "{_OPTIMIZER_PARAMS}lr", "{_SCHEDULER_PARAMS}warmup_num_steps", '
            '"optimizer.type" or "scheduler.type"',
        )
    return [(path, value)]


@attrs.frozen
class _Asked:
    """Requested optimizer and schedule of a plan, after overrides."""

    resolved: Resolved
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
        """Return values for unset optimizer arguments, from the run or else from the schedule."""
        run = self.resolved.run
        suggestions = {
            name: Suggestion(value=getattr(run, name), source=f"the run ({name})")
            for name in ("lr", "betas", "eps", "weight_decay")
            if getattr(run, name) is not None
        }
        peak = None if schedule is None or schedule.entry.peak is None else schedule.entry.peak
        if "lr" not in suggestions and schedule is not None and peak is not None:
            value = as_number(schedule.params.get(peak))
            # A peak out of range is refused under its own name, not as the optimizer's lr.
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
                return constant_until(stopped, own_pace=own_pace)
            overridden = request is None and self.resolved.plan.scheduler is not None
            return None, (self._without_schedule(settled, overridden=overridden),)
        settling = ScheduleSettling(
            request=request, optimizer=settled.choice, run=self.resolved.run
        )
        scheduler, decisions = settling.settled()
        scheduler, own_curve = per_group_schedule(scheduler, settled.choice)
        return scheduler, (*decisions, *own_curve)

    def _without_schedule(self, settled: Settled, *, overridden: bool) -> Decision:
        """Record why there is no schedule; the learning rate is then constant."""
        section, warmup = self.resolved.plan.scheduler, self.resolved.run.warmup_steps
        key: str = SCHEDULER_TYPE
        before: Any = section.type if section and overridden else None
        severity: Severity = "warning" if overridden else "note"
        if overridden:
            reason = "an override disables the schedule, so the learning rate stays constant"
        elif settled.entry.own_schedule:
            reason = (
                f"no scheduler is configured, and {settled.choice.name} adapts its own "
                "learning rate"
            )
        elif warmup:
            key, before, severity = "run.warmup_steps", warmup, "warning"
            reason = "no scheduler is configured, so the learning rate stays constant without "
            reason += 'a warm-up; write scheduler.type = "WarmupLR", or "auto"'
        else:
            reason = (
                "no scheduler is configured, so the learning rate stays constant, as in DeepSpeed"
            )
        return Decision(key=key, before=before, after=None, reason=reason, severity=severity)


def _not_saved(settled: Settled) -> tuple[Decision, ...]:
    """Return warnings about states that are not saved."""
    name = settled.choice.name
    if name in LOW_BIT:
        reason = "checkpoints do not support 8-bit or 4-bit states, so saving will fail"
    elif settled.entry.own_schedule:
        reason = (
            "checkpoints omit the values that the optimizer keeps for all weights together, so "
        )
        reason += "a resumed run resets them"
        if name == "AdamWScheduleFree":
            reason += "; evaluation, EMA and exports use the trained weights, not their average"
    else:
        return ()
    return (
        Decision(key="optimizer.state", before=name, after=name, reason=reason, severity="warning"),
    )


_BUILDER: Final = {
    "deepspeed": "built by DeepSpeed",
    "torch": "of torch.optim",
    "zerotune": "zerotune's own",
}

_DECAY: Final = {
    "decoupled": "decoupled from the gradient, as in AdamW",
    "l2": "L2, added to the gradient as in Adam",
}


def _arguments(params: Mapping[str, Any]) -> Table:
    return Table(rows=tuple((name, _value_text(value)) for name, value in params.items()))


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_value_text(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _curve(scheduler: SchedulerChoice, base_lr: float) -> tuple[Line, Table]:
    """Return a heading and a table of learning rates at the steps where the schedule turns."""
    params = scheduler.params
    warmup = params.get("warmup_num_steps", params.get("num_warmup_steps"))
    total = params.get("total_num_steps", params.get("num_training_steps"))
    steps = {0, 1, 2, 10, 100, 1000}
    steps |= {warmup + 1} if warmup is not None else set()
    steps = {step for step in steps if total is None or step < total}
    steps |= {total - 1} if total is not None else set()
    rows = tuple((str(step), f"{lr_at(scheduler, step, base_lr):.6g}") for step in sorted(steps))
    return (
        Line("learning rate by optimizer step (from 0)", indent=2),
        Table(rows=rows, align="r", indent=4),
    )
