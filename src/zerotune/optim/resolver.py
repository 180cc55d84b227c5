"""``OptimizerResolver`` chooses the optimizer and the schedule before anything is loaded.

The resolver replaces an optimizer that cannot run, fills in the arguments, and then chooses the
class that performs the update. Every change is recorded with its reason. The schedule depends on
the optimizer and counts optimizer steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import attrs

from zerotune._util.table import Block, Line, Page, Table
from zerotune._util.text import as_number
from zerotune.decisions import (
    OVERRIDE,
    WRITTEN,
    Decision,
    Log,
    Severity,
    announce,
    precedence,
    raise_all,
    render_decisions,
)
from zerotune.errors import (
    REMOVAL,
    UNSET,
    InvalidValueError,
    MissingDependencyError,
    OptimizerError,
    UnknownKeyError,
    writes,
)
from zerotune.optim.capability import (
    CONFIGURATION_ONLY,
    GROUP_RATES,
    LOW_BIT,
    Capability,
    Situation,
    capability_of,
    check,
    implementation_of,
    missing_package,
    read,
    reject_unknown,
)
from zerotune.optim.groups import (
    KEY,
    MuonPatterns,
    ParameterGroups,
    describe,
    group_parameters,
    muon_groups,
)
from zerotune.optimizers.catalogue import (
    ADAM,
    DECAY_SPELLINGS,
    DEFAULT_OPTIMIZER,
    OPTIMIZER_TYPE,
    OPTIMIZERS,
    GroupChoice,
    OptimizerChoice,
    OptimizerEntry,
    OptimizerName,
    Parameter,
    SchedulerChoice,
    clipping_in_optimizer,
    normalise_optimizer_name,
    parse_optimizer_name,
)
from zerotune.optimizers.schedules import (
    DEFAULT_SCHEDULER,
    ONE_CYCLE_BETA2,
    SCHEDULER_TYPE,
    SCHEDULERS,
    ScheduleCurve,
    SchedulerEntry,
    lr_at,
    normalise_scheduler_name,
    plot_curve,
    schedule_curve,
)
from zerotune.plan.context import RunFacts
from zerotune.plan.read import SHORT_NAMES, settings_by_path
from zerotune.plan.values import AUTO, is_auto

if TYPE_CHECKING:
    from zerotune.plan.plan import ResolvedPlan
    from zerotune.platform import Platform


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

    def resolve(self, resolved: ResolvedPlan) -> OptimizerResolution:
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
        resolved: ResolvedPlan,
        group: Callable[[Settled, ResolvedPlan], tuple[OptimizerChoice, tuple[Decision, ...]]],
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

    def apply(self, resolved: ResolvedPlan) -> ResolvedPlan:
        """Return the plan ``resolved`` with the choices filled in, and log the decisions.

        Raises:
            OptimizerError: As in ``resolve``.
        """
        settled = self.settled(resolved)
        announce(settled.decisions[len(resolved.decisions) :])
        return settled

    def settled(self, resolved: ResolvedPlan) -> ResolvedPlan:
        """Return the plan ``resolved`` with the choices filled in, without logging.

        Raises:
            OptimizerError: As in ``resolve``.
        """
        return _filled(resolved, self.resolve(resolved))

    def previewed(self, resolved: ResolvedPlan) -> ResolvedPlan:
        """Return the plan ``resolved`` as ``settled`` does, even if its model is unknown.

        Parameter groups, and Muon's choice of parameters, depend on the model. Without a model they
        remain undecided, and a decision records this. Such a plan can be shown, but Muon cannot
        train with it.

        Raises:
            OptimizerError: As in ``resolve``.
        """
        group = self._grouped if resolved.model is not None else self._ungrouped
        return _filled(resolved, self._resolve(resolved, group))

    def explain(self, resolved: ResolvedPlan) -> str:
        """Describe the optimizer and schedule for the plan ``resolved``, with reasons."""
        return self.resolve(resolved).explain()

    def schedule_curve(self, resolved: ResolvedPlan, *, steps: int | None = None) -> ScheduleCurve:
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
        self, resolved: ResolvedPlan, path: str | os.PathLike[str], *, steps: int | None = None
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
        self, settled: Settled, resolved: ResolvedPlan
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
        self, settled: Settled, _resolved: ResolvedPlan
    ) -> tuple[OptimizerChoice, tuple[Decision, ...]]:
        if self.groups is None and settled.choice.name != "Muon":
            return settled.choice, ()
        reason = "parameter groups depend on the model's parameters, which are unknown here"
        return settled.choice, (Decision(key=KEY, before=None, after="open", reason=reason),)


def _filled(resolved: ResolvedPlan, resolution: OptimizerResolution) -> ResolvedPlan:
    return resolved.with_choices(resolution.optimizer, resolution.scheduler, resolution.decisions)


# -- The request: the plan's sections, with overrides applied.


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


# -- From the request to one choice of optimizer, step by step.

Policy = Literal["fallback", "error"]

OPTIMIZER: Final = "optimizer.params"
SCHEDULER: Final = "scheduler.params"

_TRANSLATABLE: Final = ("lr", "betas", "eps", "weight_decay")
_EVERY_ARGUMENT: Final = frozenset(
    name for entry in OPTIMIZERS.values() for name in entry.parameter_names
)


@attrs.frozen(kw_only=True)
class Request:
    """The requested optimizer."""

    name: OptimizerName
    params: Mapping[str, Any]
    """Arguments as written; may contain ``"auto"``."""
    configured: bool = True
    """``False`` if no optimizer is configured, so that the name is zerotune's default."""

    @property
    def entry(self) -> OptimizerEntry:
        """Catalogue entry of the optimizer."""
        return OPTIMIZERS[self.name.canonical]


@attrs.frozen(kw_only=True)
class Settled:
    """The chosen optimizer with its catalogue entry and decisions."""

    choice: OptimizerChoice
    entry: OptimizerEntry
    decisions: tuple[Decision, ...]
    rates: Mapping[str, float] = attrs.field(factory=dict)
    """Explicit learning rates for Muon and its auxiliary Adam, by key (``"muon_lr"``,
    ``"adam_lr"``)."""


@attrs.define(kw_only=True)
class Settling:
    """Chooses an optimizer for a request."""

    asked: Request
    situation: Situation
    overrides: Mapping[str, Any]
    """Arguments that override the request, even after a fallback."""
    suggestions: Mapping[str, Suggestion]
    policy: Policy
    log: Log = attrs.field(init=False, factory=Log)
    request: Request = attrs.field(init=False)
    """The request that can run here: ``asked``, or AdamW after a fallback."""
    capability: Capability = attrs.field(init=False)
    filled: Filled = attrs.field(init=False)

    def settled(self) -> Settled:
        """Choose an optimizer."""
        self._respell_decay()
        self.log.whole(self._complete)
        self._keep_decay_meaning()
        entry, values = self.request.entry, self.filled.values
        implementation = implementation_of(entry, values, self.situation)
        params = self._constructor_arguments(implementation)
        self._record_name(implementation)
        self._record_capability(implementation)
        return Settled(
            choice=attrs.evolve(implementation, params=params),
            entry=entry,
            decisions=(*self.log.decisions, *self.filled.decisions),
            rates={key: values[key] for key in GROUP_RATES if key in values},
        )

    def _complete(self) -> None:
        self._check_request()
        self._find_runnable()
        self._leave_out_foreign()
        self._fill()

    def _check_request(self) -> None:
        """Refuse unknown arguments, and overrides that the optimizer does not have.

        Arguments of other optimizers are refused only under ``"error"``.
        """
        entry = self.asked.entry
        foreign = () if self.policy == "error" else _EVERY_ARGUMENT
        for given, others in ((self.asked.params, foreign), (self.overrides, ())):
            if (misplaced := clipping_in_optimizer(given)) is not None:
                self.log.refuse(misplaced)
            judged = {k: v for k, v in given.items() if k != "max_grad_norm" and k not in others}
            reject_unknown(
                judged, entry.parameter_names, self.log, section=OPTIMIZER, owner=entry.name
            )
        package = missing_package(entry, self.situation)
        if package is not None and entry.family == "package":
            # No fallback: a user who names an optimizer of a package wants that one.
            raise MissingDependencyError(
                f"{entry.name} needs the package {package}, which is not installed",
                key=OPTIMIZER_TYPE,
                value=self.asked.name.written,
                fix=f"pip install 'zerotune[{entry.extra}]'",
            )

    def _respell_decay(self) -> None:
        """Rename other spellings of ``adam_w_mode``, which torch and DeepSpeed's classes use."""
        params = dict(self.asked.params)
        if self.asked.entry.name not in ADAM:
            return
        for spelling in DECAY_SPELLINGS[1:]:
            if spelling in params:
                value = params.pop(spelling)
                self.log.decide(
                    f"{OPTIMIZER}.{spelling}",
                    value,
                    None,
                    "DeepSpeed's configuration calls this argument adam_w_mode",
                )
                params.setdefault("adam_w_mode", value)
        name = attrs.evolve(self.asked.name, canonical=self.asked.name.under(params))
        self.asked = attrs.evolve(self.asked, name=name, params=params)

    def _leave_out_foreign(self) -> None:
        """Drop arguments and overrides of other optimizers, with a warning for each."""
        accepted = self.request.entry.parameter_names
        for key, value in self.request.params.items():
            if key not in accepted:
                self.log.decide(
                    f"{OPTIMIZER}.{key}",
                    value,
                    None,
                    f"{self.request.entry.name} has no such argument, so it is removed",
                    "warning",
                )
        for key in self.overrides.keys() - set(accepted):
            self.log.decide(
                f"{OPTIMIZER}.{key}",
                self.overrides[key],
                None,
                f"the override is ignored, because {self.request.entry.name} has no such argument",
                "warning",
            )
        kept = {key: value for key, value in self.request.params.items() if key in accepted}
        self.overrides = {key: value for key, value in self.overrides.items() if key in accepted}
        self.request = attrs.evolve(self.request, params=kept)

    def _find_runnable(self) -> None:
        """Fall back to AdamW if a different optimizer cannot run."""
        self.request, name = self.asked, self.asked.name
        self.capability = capability = capability_of(self.asked.entry, self.situation)
        if capability.runs:
            return
        if self.policy == "error" or self.asked.entry.family == "package":
            # AdamW replaces only optimizers of DeepSpeed's configuration: with Prodigy's lr of 1,
            # or without the memory that 8-bit states save, it would not help.
            raise OptimizerError(
                f"{name.canonical} cannot run on {self.situation}: {capability.reason}",
                key=OPTIMIZER_TYPE,
                value=name.written,
                fix=f"use {capability.alternative}",
                edits=capability.edits,
            )
        self.log.decide(OPTIMIZER_TYPE, name.written, DEFAULT_OPTIMIZER, self._why(), "warning")
        fallback = OptimizerName(canonical=DEFAULT_OPTIMIZER, written=name.written)
        self.request = attrs.evolve(self.asked, name=fallback, params=self._translate())
        self.capability = capability_of(self.request.entry, self.situation)

    def _why(self) -> str:
        name = self.asked.name.canonical
        text = f"{name} cannot run on {self.situation}: {self.capability.reason}"
        if self.capability.alternative not in (None, DEFAULT_OPTIMIZER):
            text += f"; a closer alternative is {self.capability.alternative}"
        if self.asked.entry.lr_scale and "lr" in self.asked.params:
            text += (
                f"; the learning rate is unchanged: check it, because {name}'s is usually "
                f"{self.asked.entry.lr_scale} than {DEFAULT_OPTIMIZER}'s"
            )
        return text

    def _translate(self) -> dict[str, Any]:
        """Return the arguments that mean the same to AdamW; drop the others, each with a note."""
        renamed = self.asked.entry.renamed
        params: dict[str, Any] = {}
        for key, value in self.asked.params.items():
            if key in _TRANSLATABLE:
                params.setdefault(key, value)
            elif key in renamed:
                params[renamed[key]] = value
                self.log.decide(
                    f"{OPTIMIZER}.{key}",
                    value,
                    None,
                    f"{DEFAULT_OPTIMIZER} calls this argument {renamed[key]}",
                )
            else:
                self.log.decide(
                    f"{OPTIMIZER}.{key}",
                    value,
                    None,
                    f"{DEFAULT_OPTIMIZER} lacks this argument of {self.asked.name.canonical}",
                )
        return params

    def _fill(self) -> None:
        entry = self.request.entry
        sources = Sources(
            owner=entry.name,
            section=OPTIMIZER,
            written=self.request.params,
            overrides=self.overrides,
            suggestions={
                key: value for key, value in self.suggestions.items() if entry.parameter(key)
            },
            plain_defaults=not self.request.params or self.request.name.origin == "torch",
        )
        self.filled = filled = sources.fill(entry.parameters)
        if "lr" in filled.defaulted:
            filled.defaulted.discard("lr")
            filled.decide(
                f"{OPTIMIZER}.lr",
                None,
                filled.values["lr"],
                "neither the configuration nor the run sets the learning rate; this is "
                f"zerotune's default for {entry.name}",
                "warning" if self.request.configured else "note",
            )
        _check_together(entry, filled.values)

    def _keep_decay_meaning(self) -> None:
        """Set ``adam_w_mode`` to the decay that will run, and report surprising cases."""
        values, entry = self.filled.values, self.request.entry
        if entry.name == "AdamW" and values["adam_w_mode"] is False:
            reason = (
                "adam_w_mode has no effect on AdamW, whose decay is decoupled; write type Adam "
            )
            reason += "with adam_w_mode false for L2 decay"
            self.filled.change(OPTIMIZER, "adam_w_mode", True, reason, "warning")
        if entry.name != "Adam" or "adam_w_mode" not in self.filled.defaulted:
            return
        if self.request.name.origin == "torch":
            reason = "torch.optim.Adam decays weights by L2"
            self.filled.change(OPTIMIZER, "adam_w_mode", False, reason)
            return
        reason = "DeepSpeed's Adam applies AdamW's decoupled decay unless adam_w_mode is false; "
        reason += "write type AdamW, or adam_w_mode false for Adam's L2 decay"
        # Without decay, Adam and AdamW are the same algorithm.
        severity: Severity = "warning" if values["weight_decay"] > 0 else "note"
        self.filled.change(OPTIMIZER, "adam_w_mode", True, reason, severity)

    def _constructor_arguments(self, implementation: OptimizerChoice) -> dict[str, Any]:
        """Return the arguments that the running class accepts; report others that were set."""
        entry = self.request.entry
        kept: dict[str, Any] = {}
        for key, value in self.filled.values.items():
            parameter = entry.parameter(key)
            if key in CONFIGURATION_ONLY:
                taken = implementation.source == "deepspeed"
            else:
                accepted = parameter is not None and parameter.accepts(
                    implementation.implementation
                )
                taken = accepted and key not in GROUP_RATES
            if taken:
                kept[key] = value
            elif key not in self.filled.defaulted and key not in CONFIGURATION_ONLY | GROUP_RATES:
                self._drop_argument(parameter, implementation, value)
        self.filled.record_defaults(OPTIMIZER, entry.name, self.filled.defaulted & kept.keys())
        return kept

    def _drop_argument(
        self, parameter: Parameter | None, implementation: OptimizerChoice, value: Any
    ) -> None:
        if parameter is None or value == parameter.default:
            return
        key = f"{OPTIMIZER}.{parameter.name}"
        reason = (
            f"{implementation.implementation}, which performs the update here, has no "
            f"such argument (accepted only by {' and '.join(sorted(parameter.only))})"
        )
        # Without maximize, the weights would move in the opposite direction.
        if self.policy == "error" or parameter.name == "maximize":
            of_torch = parameter.only == ADAM and parameter.name in ("amsgrad", "maximize")
            edits = {f"{OPTIMIZER}.torch_adam": True} if of_torch else REMOVAL
            raise OptimizerError(reason, key=key, value=value, edits=[edits])
        self.filled.decide(key, value, None, reason, "warning")

    def _record_name(self, implementation: OptimizerChoice) -> None:
        name, canonical = self.asked.name, self.asked.name.canonical
        if not self.asked.configured:
            self.log.decide(
                OPTIMIZER_TYPE,
                None,
                canonical,
                f"no optimizer is configured; {canonical} is the default",
            )
        if self.request.name.canonical != canonical:
            return
        if name.implementation:
            self.log.decide(
                OPTIMIZER_TYPE,
                name.written,
                canonical,
                "this is the name of a class, but the engine chooses the class: "
                f"{canonical} runs as {implementation.implementation} here",
                "warning",
            )
        elif self.asked.configured and name.written != canonical:
            self.log.decide(
                OPTIMIZER_TYPE,
                name.written,
                canonical,
                f"the name is an alias; {canonical} runs as {implementation.implementation} here",
            )

    def _record_capability(self, implementation: OptimizerChoice) -> None:
        name, why = self.request.name.canonical, self.capability.reason
        written = {
            "zero_allow_untested_optimizer": self.situation.allow_untested,
            "zero_force_ds_cpu_optimizer": self.situation.force_cpu,
        }
        for key, value in self.capability.config.items():
            if written.get(key) != value:
                reason = f"{name} needs this value: {why}"
                self.log.decide(key, written.get(key), value, reason, "warning")
                why = f"see the reason given at {key}"
        if implementation.source == "zerotune":
            self.log.decide("optimizer.implementation", name, f"zerotune's {name}", why)


def _check_together(entry: OptimizerEntry, values: Mapping[str, Any]) -> None:
    if values.get("nesterov") and (values["momentum"] <= 0 or values.get("dampening", 0) != 0):
        raise InvalidValueError(
            f"{entry.name} with nesterov needs momentum > 0 and dampening 0",
            key=f"{OPTIMIZER}.nesterov",
            value=True,
            edits=[{f"{OPTIMIZER}.momentum": 0.9, f"{OPTIMIZER}.dampening": 0}],
        )
    if entry.name == "Rprop" and not values["etas"][0] < 1 < values["etas"][1]:
        raise InvalidValueError(
            "the first factor must be below 1 and the second above 1",
            key=f"{OPTIMIZER}.etas",
            value=values["etas"],
            fix="write for example [0.5, 1.2]",
            edits=writes([0.5, 1.2]),
        )


# -- The schedule.


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


# -- How each argument of an optimizer or a schedule gets a value.


@attrs.frozen(kw_only=True)
class Suggestion:
    """A value for an unset argument, and where it comes from."""

    value: Any
    source: str
    """Where the value comes from; completes the phrase "taken from …"."""
    yields: bool = False
    """Whether an explicit argument overrides the value without a warning."""


@attrs.frozen(kw_only=True)
class Sources:
    """Values from which the arguments of one optimizer or schedule are filled in."""

    owner: str
    """Canonical name of the optimizer or schedule, for the recorded reasons."""
    section: str
    """``"optimizer.params"`` or ``"scheduler.params"``."""
    written: Mapping[str, Any]
    """Values from the configuration; may contain ``"auto"``."""
    overrides: Mapping[str, Any]
    """Values passed to the resolver, which take precedence."""
    suggestions: Mapping[str, Suggestion]
    """Values that the run provides."""
    plain_defaults: bool = False
    """Whether a missing key gets ``Parameter.default``, like a key set to ``"auto"``, instead of
    the default of DeepSpeed's class."""

    def fill(self, parameters: Collection[Parameter]) -> Filled:
        """Return checked values for the parameters; omit optional parameters without a value."""
        filled = Filled()
        for parameter in parameters:
            filled.attempt(self._fill_one, parameter, filled)
        raise_all(filled.mistakes)
        return filled

    def _fill_one(self, parameter: Parameter, filled: Filled) -> None:
        name, key = parameter.name, f"{self.section}.{parameter.name}"
        written = self.written.get(name, UNSET)
        explicit = UNSET if is_auto(written) else written
        rival = self.suggestions.get(name)
        said = precedence(
            nothing=UNSET,
            override=self.overrides.get(name, UNSET),
            written=explicit,
            run=UNSET if rival is None else rival.value,
        )
        if not said:
            if not parameter.optional:
                filled.values[name] = self._default(parameter, filled)
            return
        value, reason = read(parameter, said[0][0], section=self.section)
        before, severity, who = None if written is UNSET else written, _NOTE, said[0][1]
        if who == OVERRIDE:
            wins = "set by OptimizerResolver(overrides=…), which overrides the configuration"
            reason = None if before == value else wins
            severity = _NOTE if explicit is UNSET else "warning"
        elif who != WRITTEN and rival is not None:
            before, reason = before and AUTO, f"taken from {rival.source}"
        if reason is not None:
            filled.decide(key, before, value, reason, severity)
        if who == WRITTEN and rival is not None and not rival.yields:
            other = check(parameter, rival.value, section=self.section)
            if other != value:
                wins = f"the configuration overrides the value from {rival.source}"
                wins += '; write "auto" to use that value'
                filled.decide(key, other, value, wins, "warning")
        filled.values[name] = value

    def _default(self, parameter: Parameter, filled: Filled) -> Any:
        key, owner = f"{self.section}.{parameter.name}", self.owner
        automatic = parameter.name in self.written
        plain = automatic or self.plain_defaults
        value = parameter.default if plain else parameter.unwritten
        if value is UNSET:
            fact = _RUN_FACT.get(parameter.name)
            raise OptimizerError(
                f"{owner} needs this value, but neither the configuration nor the run sets it",
                key=key,
                value=AUTO if automatic else UNSET,
                fix=f"write a number, or pass RunFacts({fact}=…) to the run"
                if fact
                else "write a number",
            )
        if automatic:
            filled.decide(
                key,
                AUTO,
                value,
                f"the run does not set this value; zerotune's default for {owner} is used",
            )
        else:
            filled.defaulted.add(parameter.name)
        return value


@attrs.define(kw_only=True)
class Filled(Log):
    """Values by argument, with decisions; ``defaulted`` names the arguments left at defaults."""

    values: dict[str, Any] = attrs.field(factory=dict)
    defaulted: set[str] = attrs.field(factory=set)

    def change(
        self, section: str, name: str, value: Any, reason: str, severity: Severity | None = None
    ) -> None:
        """Change the argument ``name`` to ``value``, and record a decision.

        By default, the decision is a warning if the previous value was explicit, else a note.
        """
        written = name not in self.defaulted
        before = self.values[name] if written else None
        self.defaulted.discard(name)
        self.values[name] = value
        severity = severity or ("warning" if written else "note")
        self.decide(f"{section}.{name}", before, value, reason, severity)

    def record_defaults(self, section: str, owner: str, keys: Collection[str]) -> None:
        """Record in one decision that the values of ``keys`` are the defaults of ``owner``."""
        values = {key: value for key, value in self.values.items() if key in keys}
        if values:
            self.decide(
                section,
                None,
                values,
                f"the configuration does not set these arguments; the defaults of {owner} "
                "are written out, because defaults change between releases",
            )


_NOTE: Final[Severity] = "note"
_RUN_FACT: Final[Mapping[str, str]] = {
    "total_num_steps": "total_steps",
    "warmup_num_steps": "warmup_steps",
    "num_training_steps": "total_steps",
}


# -- What checkpoints and exports will lack.


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


# -- As text.


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


def _constant_until(
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
