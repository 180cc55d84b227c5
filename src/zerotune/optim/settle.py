"""From the ``optimizer`` and ``scheduler`` sections to one choice each, step by step.

A request (what is asked for) becomes a runnable request (what can be had here), then complete
arguments, then the choice. Every step that changes something records why. First comes all of the
optimizer, then the schedule that drives it, counted in optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Final, Literal

import attrs

from zerotune._util.text import did_you_mean
from zerotune.decisions import OVERRIDE, WRITTEN, Decision, Log, Severity, precedence, raise_all
from zerotune.errors import (
    UNSET,
    InvalidValueError,
    MissingDependencyError,
    OptimizerError,
    UnknownKeyError,
)
from zerotune.optim.capability import (
    CONFIGURATION_ONLY,
    GROUP_RATES,
    Capability,
    CapabilityTable,
    Situation,
    capability_of,
    implementation_of,
    missing_package,
)
from zerotune.optimizers.catalogue import (
    ADAM,
    DECAY_SPELLINGS,
    DEFAULT_OPTIMIZER,
    OPTIMIZER_TYPE,
    OPTIMIZERS,
    OptimizerChoice,
    OptimizerEntry,
    OptimizerName,
    Parameter,
    SchedulerChoice,
    clipping_in_optimizer,
)
from zerotune.optimizers.schedules import (
    ONE_CYCLE_BETA2,
    SCHEDULER_TYPE,
    SCHEDULERS,
    SchedulerEntry,
)
from zerotune.plan.model import (
    AUTO,
    Anything,
    Boolean,
    Choice,
    Integer,
    Kind,
    Numbers,
    Reading,
    Real,
    RunFacts,
    Text,
    is_auto,
    refuse_template,
)

Policy = Literal["fallback", "error"]

OPTIMIZER: Final = "optimizer.params"
SCHEDULER: Final = "scheduler.params"

_TRANSLATABLE: Final = ("lr", "betas", "eps", "weight_decay")
_EVERY_ARGUMENT: Final = frozenset(
    name for entry in OPTIMIZERS.values() for name in entry.parameter_names
)


@attrs.frozen(kw_only=True)
class Request:
    """What is asked for."""

    name: OptimizerName
    params: Mapping[str, Any]
    """Arguments as written; may hold ``"auto"``."""
    configured: bool = True
    """``False`` when nothing is configured and the name is zerotune's default."""

    @property
    def entry(self) -> OptimizerEntry:
        """The catalogue's entry."""
        return OPTIMIZERS[self.name.canonical]


@attrs.frozen(kw_only=True)
class Settled:
    """The choice and everything that led to it."""

    choice: OptimizerChoice
    entry: OptimizerEntry
    decisions: tuple[Decision, ...]
    rates: Mapping[str, float] = attrs.field(factory=dict)
    """Learning rates of Muon's two kinds of groups, where somebody wrote them."""


@attrs.define(kw_only=True)
class Settling:
    """The way from what is asked for to one choice of optimizer."""

    asked: Request
    situation: Situation
    overrides: Mapping[str, Any]
    """Those that still have a meaning, after a fallback as well."""
    suggestions: Mapping[str, Suggestion]
    policy: Policy
    table: CapabilityTable | None = None
    log: Log = attrs.field(init=False, factory=Log)
    request: Request = attrs.field(init=False)
    """What can be had here."""
    capability: Capability = attrs.field(init=False)
    filled: Filled = attrs.field(init=False)

    def settled(self) -> Settled:
        """Settle on an optimizer."""
        self._respell_decay()
        self.log.whole(self._complete)
        self._keep_decay_meaning()
        if self.situation.bf16_states and self.filled.values.get("fp32_optimizer_states"):
            # DeepSpeed does so anyway.
            reason = "bf16.bf16_optimizer_states keeps the states in bf16"
            self.filled.change(OPTIMIZER, "fp32_optimizer_states", False, reason)
        entry, values = self.request.entry, self.filled.values
        implementation = implementation_of(entry, values, self.situation)
        params = self._constructor_arguments(implementation)
        self._record_name(implementation)
        self._record_capability()
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
        """Refuse arguments of no optimizer; under ``"error"`` those of others and overrides too."""
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
            # Who asks for an optimizer of an optional package wants that one.
            raise MissingDependencyError(
                f"{entry.name} is in the package {package}, which is not installed",
                key=OPTIMIZER_TYPE,
                value=self.asked.name.written,
                fix=f"pip install 'zerotune[{entry.extra}]'",
            )

    def _respell_decay(self) -> None:
        """DeepSpeed's classes and torch spell ``adam_w_mode`` in their own ways."""
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
                    "DeepSpeed's configuration calls it adam_w_mode",
                )
                params.setdefault("adam_w_mode", value)
        name = attrs.evolve(self.asked.name, canonical=self.asked.name.under(params))
        self.asked = attrs.evolve(self.asked, name=name, params=params)

    def _leave_out_foreign(self) -> None:
        """Leave out arguments that belong to other optimizers, and overrides of such."""
        accepted = self.request.entry.parameter_names
        for key, value in self.request.params.items():
            if key not in accepted:
                self.log.decide(
                    f"{OPTIMIZER}.{key}",
                    value,
                    None,
                    f"{self.request.entry.name} has no such argument; left out",
                    "warning",
                )
        for key in self.overrides.keys() - set(accepted):
            self.log.decide(
                f"{OPTIMIZER}.{key}",
                self.overrides[key],
                None,
                f"an override that {self.request.entry.name} has no argument for",
                "warning",
            )
        kept = {key: value for key, value in self.request.params.items() if key in accepted}
        self.overrides = {key: value for key, value in self.overrides.items() if key in accepted}
        self.request = attrs.evolve(self.request, params=kept)

    def _find_runnable(self) -> None:
        """Fall back to AdamW where another optimizer cannot run."""
        self.request, name = self.asked, self.asked.name
        self.capability = capability = capability_of(self.asked.entry, self.situation, self.table)
        if capability.runs:
            return
        if self.policy == "error" or self.asked.entry.family == "package":
            # AdamW in its place is for names of DeepSpeed's configuration: with Prodigy's lr of 1,
            # or without the memory that 8-bit states save, it would be no help.
            raise OptimizerError(
                f"{name.canonical} cannot run on {self.situation}: {capability.reason}",
                key=OPTIMIZER_TYPE,
                value=name.written,
                fix=f"use {capability.alternative}",
            )
        self.log.decide(OPTIMIZER_TYPE, name.written, DEFAULT_OPTIMIZER, self._why(), "warning")
        fallback = OptimizerName(canonical=DEFAULT_OPTIMIZER, written=name.written)
        self.request = attrs.evolve(self.asked, name=fallback, params=self._translate())
        self.capability = capability_of(self.request.entry, self.situation, self.table)

    def _why(self) -> str:
        name = self.asked.name.canonical
        text = f"{name} cannot run on {self.situation}: {self.capability.reason}"
        if self.capability.alternative not in (None, DEFAULT_OPTIMIZER):
            text += f"; nearer than {DEFAULT_OPTIMIZER} would be {self.capability.alternative}"
        if self.asked.entry.lr_scale and "lr" in self.asked.params:
            text += (
                f"; the learning rate is kept, although {name}'s is usually "
                f"{self.asked.entry.lr_scale} than {DEFAULT_OPTIMIZER}'s: check it"
            )
        return text

    def _translate(self) -> dict[str, Any]:
        """The arguments that mean the same to AdamW; the others are dropped, each with a note."""
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
                    f"{DEFAULT_OPTIMIZER} takes it as {renamed[key]}",
                )
            else:
                self.log.decide(
                    f"{OPTIMIZER}.{key}",
                    value,
                    None,
                    f"an argument of {self.asked.name.canonical} that {DEFAULT_OPTIMIZER} does not "
                    "have",
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
                "neither the configuration nor the run says it; zerotune's default for "
                f"{entry.name}",
                "warning" if self.request.configured else "note",
            )
        _check_together(entry, filled.values)

    def _keep_decay_meaning(self) -> None:
        """``Adam`` and ``adam_w_mode`` mean in DeepSpeed what few people expect."""
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
        reason = "DeepSpeed's Adam runs AdamW's decoupled decay unless adam_w_mode is false; write "
        reason += "type AdamW, or adam_w_mode false for Adam's L2 decay"
        # Without decay the two are the same algorithm.
        severity: Severity = "warning" if values["weight_decay"] > 0 else "note"
        self.filled.change(OPTIMIZER, "adam_w_mode", True, reason, severity)

    def _constructor_arguments(self, implementation: OptimizerChoice) -> dict[str, Any]:
        """What the class that really runs takes; the rest goes, audibly when somebody wrote it."""
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
            f"{implementation.implementation}, which does the update here, has no such argument "
            f"({', '.join(sorted(parameter.only))} would)"
        )
        if self.policy == "error":
            fix = 'set "torch_adam": true' if parameter.name == "amsgrad" else "leave it out"
            raise OptimizerError(reason, key=key, value=value, fix=fix)
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
                f"it names a class, and the engine picks the class itself: {canonical} runs as "
                f"{implementation.implementation} here",
                "warning",
            )
        elif self.asked.configured and name.written != canonical:
            self.log.decide(
                OPTIMIZER_TYPE,
                name.written,
                canonical,
                f"another spelling; it runs as {implementation.implementation} here",
            )

    def _record_capability(self) -> None:
        if "own implementation" in self.capability.reason:
            self.log.decide(
                "optimizer.implementation",
                self.request.name.canonical,
                f"zerotune's {self.request.name.canonical}",
                self.capability.reason,
            )
        written = {
            "zero_allow_untested_optimizer": self.situation.allow_untested,
            "zero_force_ds_cpu_optimizer": self.situation.force_cpu,
        }
        for key, value in self.capability.config.items():
            if written.get(key) == value:
                continue
            self.log.decide(
                key,
                written.get(key),
                value,
                f"{self.request.name.canonical} needs it: {self.capability.reason}",
                "warning",
            )


def _check_together(entry: OptimizerEntry, values: Mapping[str, Any]) -> None:
    if values.get("nesterov") and (values["momentum"] <= 0 or values.get("dampening", 0) != 0):
        raise InvalidValueError(
            f"{entry.name} with nesterov needs momentum > 0 and dampening 0",
            key=f"{OPTIMIZER}.nesterov",
            value=True,
            fix='write for example "momentum": 0.9, "dampening": 0',
        )
    if entry.name == "Rprop" and not values["etas"][0] < 1 < values["etas"][1]:
        raise InvalidValueError(
            "the first factor must shrink a step and the second must grow it",
            key=f"{OPTIMIZER}.etas",
            value=values["etas"],
            fix="write for example [0.5, 1.2]",
        )


# -- The schedule.


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


@attrs.define(kw_only=True)
class ScheduleSettling:
    """The way from what is asked for to one choice of schedule."""

    request: ScheduleRequest
    optimizer: OptimizerChoice
    run: RunFacts
    filled: Filled = attrs.field(init=False)

    def settled(self) -> tuple[SchedulerChoice, tuple[Decision, ...]]:
        """Settle on a schedule."""
        self._complete()
        entry, written, filled = self.request.entry, self.request.written, self.filled
        if written is None:
            reason = f"no scheduler is named; {entry.name} is the default"
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
            reason = "DeepSpeed has no such class; zerotune steps diffusers' curve, once for each "
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
        """Unpack lists of one value per parameter group: there is one group."""
        params = self.request.params
        start = params.get("last_batch_iteration", -1)
        if start != -1:
            raise InvalidValueError(
                "a schedule is continued by resuming from a checkpoint, which knows the step",
                key=f"{SCHEDULER}.last_batch_iteration",
                value=start,
                fix="leave it out",
            )
        plain: dict[str, Any] = {}
        for key, value in params.items():
            if key == "last_batch_iteration":
                continue
            if isinstance(value, (list, tuple)):
                if len(value) != 1:
                    raise InvalidValueError(
                        f"one value per parameter group, and {self.optimizer.name} has one group",
                        key=f"{SCHEDULER}.{key}",
                        value=value,
                        fix="write one number",
                    )
                plain[key] = value[0]
            else:
                plain[key] = value
        return plain

    def _follow_override(self, params: dict[str, Any], log: Log) -> dict[str, Any]:
        """An overridden learning rate would be in vain if the schedule kept its own peak."""
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
            "follows the learning rate given to OptimizerResolver(overrides=…)",
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
            steps, reason = DEFAULT_WARMUP, "the run does not say how long it is"
        else:
            steps = min(DEFAULT_WARMUP, self.run.total_steps // WARMUP_SHARE)
            # DeepSpeed's shortest warm-up keeps two updates at the minimum.
            steps = 0 if steps < 2 else steps
            reason = f"5 % of the run's {self.run.total_steps} steps, at most {DEFAULT_WARMUP}"
        self.filled.change(SCHEDULER, "warmup_num_steps", steps, reason)

    def _no_warmup(self) -> None:
        """DeepSpeed refuses 0 warm-up steps, and its 1 still means two updates at the minimum."""
        entry, values = self.request.entry, self.filled.values
        if values.get("warmup_num_steps") != 0:
            return
        values["warmup_num_steps"] = 1
        reason = "DeepSpeed refuses 0; 1 is its shortest"
        if entry.name == "WarmupDecayLR":
            reason += ", and holds warmup_min_lr for the first two updates"
        severity: Severity = "note" if self.request.written is None else "warning"
        self.filled.decide(f"{SCHEDULER}.warmup_num_steps", 0, 1, reason, severity)
        floor = {"WarmupLR": "warmup_min_lr", "WarmupCosineLR": "warmup_min_ratio"}.get(entry.name)
        if floor is None:
            return
        peak = values["warmup_max_lr"] if entry.name == "WarmupLR" else 1.0
        reason = "no warm-up: the schedule starts at its peak"
        if entry.name == "WarmupCosineLR":
            reason += "; DeepSpeed still runs the very first update at 0"
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
                "polynomial divides by the steps after the warm-up, and there are none",
                key=f"{SCHEDULER}.{key}",
                value=total,
                fix="make the schedule longer than its warm-up",
            )
        if total is not None and warmup is not None and total < warmup:
            self.filled.decide(
                f"{SCHEDULER}.{key}",
                total,
                total,
                f"kept, but the warm-up of {warmup} steps is longer than the whole schedule",
                "warning",
            )

    def _check_one_cycle(self) -> None:
        values = self.filled.values
        betas = self.optimizer.params.get("betas")
        if values["cycle_momentum"] and betas is None:
            reason = f"{self.optimizer.name} has no betas, and DeepSpeed cycles nothing else"
            self.filled.change(SCHEDULER, "cycle_momentum", False, reason)
        elif values["cycle_momentum"]:
            self.filled.decide(
                "optimizer.params.betas",
                betas,
                (values["cycle_min_mom"], ONE_CYCLE_BETA2),
                "OneCycle cycles the first beta and sets the second to 0.99; write cycle_momentum "
                "false to keep the optimizer's",
                "warning",
            )
        if values["decay_step_size"] == 0 and values["decay_lr_rate"] > 0:
            self.filled.decide(
                f"{SCHEDULER}.decay_lr_rate",
                values["decay_lr_rate"],
                values["decay_lr_rate"],
                "kept, but DeepSpeed does not decay while decay_step_size is 0",
                "warning",
            )


def per_group_schedule(
    choice: SchedulerChoice, optimizer: OptimizerChoice
) -> tuple[SchedulerChoice, tuple[Decision, ...]]:
    """Let zerotune step the curve where DeepSpeed's class would give all groups one rate."""
    rates = {float(group.params.get("lr", optimizer.lr)) for group in optimizer.groups}
    stopped = any(group.until is not None for group in optimizer.groups)
    if choice.source != "deepspeed" or not (rates - {optimizer.lr} or stopped):
        return choice, ()
    why = "a group stops before the others" if stopped else "the groups' learning rates differ"
    decision = Decision(
        key=SCHEDULER_TYPE,
        before=choice.name,
        after=choice.name,
        reason=f"{why}, and DeepSpeed's {choice.name} would set one "
        "rate for all of them; zerotune steps the same curve, scaled for each group",
    )
    return attrs.evolve(choice, source="zerotune"), (decision,)


# -- How each argument of an optimizer or a schedule gets a value.


_SWITCH: Final = {"true": True, "false": False}


@cache
def kind_of(parameter: Parameter) -> Kind:
    """What an argument may hold; ``"auto"`` is never handed to it."""
    if parameter.type == "any":
        return Anything()
    if parameter.type == "bool":
        return Boolean(auto=False, words=_SWITCH)
    if parameter.type == "str":
        return Choice(choices=parameter.choices) if parameter.choices else Text()
    low, high = parameter.low, parameter.high
    bounds: dict[str, Any] = {
        "minimum": -math.inf if low is None else low,
        "maximum": math.inf if high is None else high,
        "above": low if parameter.low_open else None,
        "below": high if parameter.high_open else None,
    }
    if parameter.type == "int":
        return Integer(auto=False, **bounds)
    real = Real(auto=False, **bounds)
    return real if parameter.type == "float" else Numbers(each=real, length=parameter.length or 1)


def read(parameter: Parameter, value: Any, *, section: str) -> Reading:
    """``check`` that also says why the value differs from what was written, if it does."""
    if value is None and parameter.nullable:
        return None, None
    kind, key = kind_of(parameter), f"{section}.{parameter.name}"
    refuse_template(kind, value, key)
    return kind.read(value, key)


def check(parameter: Parameter, value: Any, *, section: str) -> Any:
    """Return ``value`` in its proper type.

    Args:
        parameter: The argument.
        value: As written; numbers may be text (YAML reads ``1e-4`` as text).
        section: ``"optimizer.params"`` or ``"scheduler.params"``, for the message.

    Returns:
        A float, int, bool, str, or a tuple of floats.
    """
    return read(parameter, value, section=section)[0]


@attrs.frozen(kw_only=True)
class Suggestion:
    """A value for an argument the configuration leaves open, and where it comes from."""

    value: Any
    source: str
    """Completes "taken from …"."""
    yields: bool = False
    """Whether it is silent when an explicit value differs from it."""


@attrs.frozen(kw_only=True)
class Sources:
    """Where the values of one section come from."""

    owner: str
    """Canonical name of the optimizer or schedule, for the reasons."""
    section: str
    """``"optimizer.params"`` or ``"scheduler.params"``."""
    written: Mapping[str, Any]
    """What the configuration says; may hold ``"auto"``."""
    overrides: Mapping[str, Any]
    """What was given to the resolver; beats everything."""
    suggestions: Mapping[str, Suggestion]
    """What the run knows."""
    plain_defaults: bool = False
    """Use ``Parameter.default`` for unwritten keys too, not what DeepSpeed's class would use."""

    def fill(self, parameters: Collection[Parameter]) -> Filled:
        """Give every parameter a checked value; omit optional ones that are not set."""
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
            wins = "given to OptimizerResolver(overrides=…), which wins over the configuration"
            reason = None if before == value else wins
            severity = _NOTE if explicit is UNSET else "warning"
        elif who != WRITTEN and rival is not None:
            before, reason = before and AUTO, f"taken from {rival.source}"
        if reason is not None:
            filled.decide(key, before, value, reason, severity)
        if who == WRITTEN and rival is not None and not rival.yields:
            other = check(parameter, rival.value, section=self.section)
            if other != value:
                wins = f"the configuration's explicit value wins over the one from {rival.source}"
                filled.decide(
                    key, other, value, f'{wins}; write "auto" to let that one in', "warning"
                )
        filled.values[name] = value

    def _default(self, parameter: Parameter, filled: Filled) -> Any:
        key, owner = f"{self.section}.{parameter.name}", self.owner
        automatic = parameter.name in self.written
        plain = automatic or self.plain_defaults
        value = parameter.default if plain else parameter.unwritten
        if value is UNSET:
            fact = _RUN_FACT.get(parameter.name)
            raise OptimizerError(
                f"{owner} needs it, and neither the configuration nor the run says it",
                key=key,
                **({"value": AUTO} if automatic else {}),
                fix=f"write a number, or give the run RunFacts({fact}=…)"
                if fact
                else "write a number",
            )
        if automatic:
            filled.decide(key, AUTO, value, f"the run does not say; zerotune's default for {owner}")
        else:
            filled.defaulted.add(parameter.name)
        return value


@attrs.define(kw_only=True)
class Filled(Log):
    """Values by argument, the decisions behind them, and which are defaults."""

    values: dict[str, Any] = attrs.field(factory=dict)
    defaulted: set[str] = attrs.field(factory=set)

    def change(
        self, section: str, name: str, value: Any, reason: str, severity: Severity | None = None
    ) -> None:
        """Change an argument's value; a warning if the former value was set explicitly."""
        written = name not in self.defaulted
        before = self.values[name] if written else None
        self.defaulted.discard(name)
        self.values[name] = value
        severity = severity or ("warning" if written else "note")
        self.decide(f"{section}.{name}", before, value, reason, severity)

    def record_defaults(self, section: str, owner: str, keys: Collection[str]) -> None:
        """Summarise in one decision the defaults that were written out."""
        values = {key: value for key, value in self.values.items() if key in keys}
        if values:
            self.decide(
                section,
                None,
                values,
                f"not written; defaults for {owner}, made explicit because defaults move "
                "between releases",
            )


def reject_unknown(
    written: Mapping[str, Any], accepted: Collection[str], log: Log, *, section: str, owner: str
) -> None:
    """Refuse arguments that ``owner`` does not have, with the closest names, and all that exist."""
    for key, value in written.items():
        if key in accepted:
            continue
        close = did_you_mean(str(key), accepted)
        there_are = (
            f"write one of {', '.join(accepted)}" if accepted else "remove it: there are none"
        )
        log.refuse(
            UnknownKeyError(
                f"{owner} has no argument of this name",
                key=f"{section}.{key}",
                value=value,
                fix=f"did you mean {' or '.join(close)}?" if close else there_are,
            )
        )


_NOTE: Final[Severity] = "note"
_RUN_FACT: Final[Mapping[str, str]] = {
    "total_num_steps": "total_steps",
    "warmup_num_steps": "warmup_steps",
    "num_training_steps": "total_steps",
}
