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
    OptimizerEntry,
    OptimizerName,
    Parameter,
    clipping_in_optimizer,
)
from zerotune.optimizers.choices import OptimizerChoice, SchedulerChoice
from zerotune.optimizers.curves import ONE_CYCLE_BETA2
from zerotune.optimizers.schedules import SCHEDULER_TYPE, SCHEDULERS, SchedulerEntry
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


def settle(
    request: Request,
    situation: Situation,
    *,
    overrides: Mapping[str, Any],
    suggestions: Mapping[str, Suggestion],
    policy: Policy,
    table: CapabilityTable | None = None,
) -> Settled:
    """Settle on an optimizer."""
    log = Log()
    asked = _respell_decay(request, log)

    def completed() -> tuple[Request, Capability, Filled]:
        _check_request(asked, overrides, situation, policy, log)
        request, capability = _runnable(asked, situation, policy, log, table)
        request = _without_foreign(request, log)
        left = _still_meant(overrides, request.entry, log)
        return request, capability, _complete(request, left, suggestions)

    request, capability, filled = log.whole(completed)
    _keep_decay_meaning(request, filled)
    _match_bf16_states(situation, filled)
    implementation = implementation_of(request.entry, filled.values, situation)
    params = _constructor_arguments(request, implementation, filled, policy)
    _record_name(asked, request, implementation, log)
    _record_capability(request, situation, capability, log)
    return Settled(
        choice=attrs.evolve(implementation, params=params),
        entry=request.entry,
        decisions=(*log.decisions, *filled.decisions),
        rates={key: filled.values[key] for key in GROUP_RATES if key in filled.values},
    )


# -- What is asked for.


def _check_request(
    asked: Request,
    overrides: Mapping[str, Any],
    situation: Situation,
    policy: Policy,
    log: Log,
) -> None:
    """Refuse arguments of no optimizer; under ``"error"`` those of others, and overrides, too."""
    entry = asked.entry
    foreign = () if policy == "error" else _EVERY_ARGUMENT
    for given, others in ((asked.params, foreign), (overrides, ())):
        if (misplaced := clipping_in_optimizer(given)) is not None:
            log.refuse(misplaced)
        judged = {k: v for k, v in given.items() if k != "max_grad_norm" and k not in others}
        reject_unknown(judged, entry.parameter_names, log, section=OPTIMIZER, owner=entry.name)
    package = missing_package(entry, situation)
    if package is not None and entry.family == "package":
        # Who asks for an optimizer of an optional package wants that one.
        raise MissingDependencyError(
            f"{entry.name} is in the package {package}, which is not installed",
            key=OPTIMIZER_TYPE,
            value=asked.name.written,
            fix=f"pip install 'zerotune[{entry.extra}]'",
        )


def _respell_decay(request: Request, log: Log) -> Request:
    """DeepSpeed's classes and torch spell ``adam_w_mode`` in their own ways."""
    params = dict(request.params)
    if request.entry.name not in ADAM:
        return request
    for spelling in DECAY_SPELLINGS[1:]:
        if spelling in params:
            value = params.pop(spelling)
            log.decide(
                f"{OPTIMIZER}.{spelling}",
                value,
                None,
                "DeepSpeed's configuration calls it adam_w_mode",
            )
            params.setdefault("adam_w_mode", value)
    name = attrs.evolve(request.name, canonical=request.name.under(params))
    return attrs.evolve(request, name=name, params=params)


def _without_foreign(request: Request, log: Log) -> Request:
    """Leave out arguments that belong to other optimizers."""
    accepted = request.entry.parameter_names
    for key, value in request.params.items():
        if key not in accepted:
            log.decide(
                f"{OPTIMIZER}.{key}",
                value,
                None,
                f"{request.entry.name} has no such argument; left out",
                "warning",
            )
    kept = {key: value for key, value in request.params.items() if key in accepted}
    return attrs.evolve(request, params=kept)


def _still_meant(
    overrides: Mapping[str, Any], entry: OptimizerEntry, log: Log
) -> Mapping[str, Any]:
    """The overrides that still have a meaning after a fallback to ``entry``."""
    for key in overrides.keys() - set(entry.parameter_names):
        log.decide(
            f"{OPTIMIZER}.{key}",
            overrides[key],
            None,
            f"an override that {entry.name} has no argument for",
            "warning",
        )
    return {key: value for key, value in overrides.items() if entry.parameter(key)}


# -- What can be had here.


def _runnable(
    request: Request,
    situation: Situation,
    policy: Policy,
    log: Log,
    table: CapabilityTable | None,
) -> tuple[Request, Capability]:
    capability = capability_of(request.entry, situation, table)
    if capability.runs:
        return request, capability
    name = request.name
    if policy == "error" or request.entry.family == "package":
        # AdamW in its place is for names of DeepSpeed's configuration: with Prodigy's lr of 1, or
        # without the memory that 8-bit states save, it would be no help.
        raise OptimizerError(
            f"{name.canonical} cannot run on {situation}: {capability.reason}",
            key=OPTIMIZER_TYPE,
            value=name.written,
            fix=f"use {capability.alternative}",
        )
    log.decide(
        OPTIMIZER_TYPE,
        name.written,
        DEFAULT_OPTIMIZER,
        _why(request, situation, capability),
        "warning",
    )
    fallback = attrs.evolve(
        request,
        name=OptimizerName(canonical=DEFAULT_OPTIMIZER, written=name.written),
        params=_translate(request, log),
    )
    return fallback, capability_of(fallback.entry, situation, table)


def _why(request: Request, situation: Situation, capability: Capability) -> str:
    name = request.name.canonical
    text = f"{name} cannot run on {situation}: {capability.reason}"
    if capability.alternative not in (None, DEFAULT_OPTIMIZER):
        text += f"; nearer than {DEFAULT_OPTIMIZER} would be {capability.alternative}"
    if request.entry.lr_scale and "lr" in request.params:
        text += (
            f"; the learning rate is kept, although {name}'s is usually "
            f"{request.entry.lr_scale} than {DEFAULT_OPTIMIZER}'s: check it"
        )
    return text


def _translate(request: Request, log: Log) -> dict[str, Any]:
    """The arguments that mean the same to AdamW; the others are dropped, each with a note."""
    renamed = request.entry.renamed
    params: dict[str, Any] = {}
    for key, value in request.params.items():
        if key in _TRANSLATABLE:
            params.setdefault(key, value)
        elif key in renamed:
            params[renamed[key]] = value
            log.decide(
                f"{OPTIMIZER}.{key}",
                value,
                None,
                f"{DEFAULT_OPTIMIZER} takes it as {renamed[key]}",
            )
        else:
            log.decide(
                f"{OPTIMIZER}.{key}",
                value,
                None,
                f"an argument of {request.name.canonical} that {DEFAULT_OPTIMIZER} does not have",
            )
    return params


# -- Complete arguments.


def _complete(
    request: Request, overrides: Mapping[str, Any], suggestions: Mapping[str, Suggestion]
) -> Filled:
    entry = request.entry
    sources = Sources(
        owner=entry.name,
        section=OPTIMIZER,
        written=request.params,
        overrides=overrides,
        suggestions={key: value for key, value in suggestions.items() if entry.parameter(key)},
        plain_defaults=not request.params or request.name.origin == "torch",
    )
    filled = fill(entry.parameters, sources)
    if "lr" in filled.defaulted:
        filled.defaulted.discard("lr")
        filled.decide(
            f"{OPTIMIZER}.lr",
            None,
            filled.values["lr"],
            f"neither the configuration nor the run says it; zerotune's default for {entry.name}",
            "warning" if request.configured else "note",
        )
    _check_together(entry, filled.values)
    return filled


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


def _keep_decay_meaning(request: Request, filled: Filled) -> None:
    """``Adam`` and ``adam_w_mode`` mean in DeepSpeed what few people expect."""
    values, entry = filled.values, request.entry
    if entry.name == "AdamW" and values["adam_w_mode"] is False:
        reason = "adam_w_mode has no effect on AdamW, whose decay is decoupled; write type Adam "
        reason += "with adam_w_mode false for L2 decay"
        filled.change(OPTIMIZER, "adam_w_mode", True, reason, "warning")
    if entry.name != "Adam" or "adam_w_mode" not in filled.defaulted:
        return
    if request.name.origin == "torch":
        reason = "torch.optim.Adam decays weights by L2"
        filled.change(OPTIMIZER, "adam_w_mode", False, reason)
        return
    reason = "DeepSpeed's Adam runs AdamW's decoupled decay unless adam_w_mode is false; write "
    reason += "type AdamW, or adam_w_mode false for Adam's L2 decay"
    # Without decay the two are the same algorithm.
    severity: Severity = "warning" if values["weight_decay"] > 0 else "note"
    filled.change(OPTIMIZER, "adam_w_mode", True, reason, severity)


def _match_bf16_states(situation: Situation, filled: Filled) -> None:
    """Say what DeepSpeed does anyway when the plan keeps optimizer states in bf16."""
    if situation.bf16_states and filled.values.get("fp32_optimizer_states"):
        reason = "bf16.bf16_optimizer_states keeps the states in bf16"
        filled.change(OPTIMIZER, "fp32_optimizer_states", False, reason)


def _constructor_arguments(
    request: Request, implementation: OptimizerChoice, filled: Filled, policy: Policy
) -> dict[str, Any]:
    """What the class that really runs takes; the rest goes, audibly when somebody wrote it."""
    entry = request.entry
    kept: dict[str, Any] = {}
    for key, value in filled.values.items():
        parameter = entry.parameter(key)
        if key in CONFIGURATION_ONLY:
            taken = implementation.source == "deepspeed"
        else:
            accepted = parameter is not None and parameter.accepts(implementation.implementation)
            taken = accepted and key not in GROUP_RATES
        if taken:
            kept[key] = value
        elif key not in filled.defaulted and key not in CONFIGURATION_ONLY | GROUP_RATES:
            _drop_argument(parameter, implementation, value, filled, policy)
    filled.record_defaults(OPTIMIZER, entry.name, filled.defaulted & kept.keys())
    return kept


def _drop_argument(
    parameter: Parameter | None,
    implementation: OptimizerChoice,
    value: Any,
    filled: Filled,
    policy: Policy,
) -> None:
    if parameter is None or value == parameter.default:
        return
    key = f"{OPTIMIZER}.{parameter.name}"
    reason = (
        f"{implementation.implementation}, which does the update here, has no such argument "
        f"({', '.join(sorted(parameter.only))} would)"
    )
    if policy == "error":
        fix = 'set "torch_adam": true' if parameter.name == "amsgrad" else "leave it out"
        raise OptimizerError(reason, key=key, value=value, fix=fix)
    filled.decide(key, value, None, reason, "warning")


# -- What is said about it.


def _record_name(
    asked: Request, request: Request, implementation: OptimizerChoice, log: Log
) -> None:
    name, canonical = asked.name, asked.name.canonical
    if not asked.configured:
        log.decide(
            OPTIMIZER_TYPE,
            None,
            canonical,
            f"no optimizer is configured; {canonical} is the default",
        )
    if request.name.canonical != canonical:
        return
    if name.implementation:
        log.decide(
            OPTIMIZER_TYPE,
            name.written,
            canonical,
            f"it names a class, and the engine picks the class itself: {canonical} runs as "
            f"{implementation.implementation} here",
            "warning",
        )
    elif asked.configured and name.written != canonical:
        log.decide(
            OPTIMIZER_TYPE,
            name.written,
            canonical,
            f"another spelling; it runs as {implementation.implementation} here",
        )


def _record_capability(
    request: Request, situation: Situation, capability: Capability, log: Log
) -> None:
    if "own implementation" in capability.reason:
        log.decide(
            "optimizer.implementation",
            request.name.canonical,
            f"zerotune's {request.name.canonical}",
            capability.reason,
        )
    written = {
        "zero_allow_untested_optimizer": situation.allow_untested,
        "zero_force_ds_cpu_optimizer": situation.force_cpu,
    }
    for key, value in capability.config.items():
        if written.get(key) == value:
            continue
        log.decide(
            key,
            written.get(key),
            value,
            f"{request.name.canonical} needs it: {capability.reason}",
            "warning",
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


def settle_schedule(
    request: ScheduleRequest, optimizer: OptimizerChoice, run: RunFacts
) -> tuple[SchedulerChoice, tuple[Decision, ...]]:
    """Settle on a schedule."""
    entry = request.entry
    filled = _complete_schedule(request, optimizer, run)
    if request.written is None:
        reason = f"no scheduler is named; {entry.name} is the default"
        filled.decide(SCHEDULER_TYPE, None, entry.name, reason)
    elif request.written != entry.name:
        filled.decide(SCHEDULER_TYPE, request.written, entry.name, "another spelling")
    _no_warmup(entry, filled, asked=request.written is not None)
    _compare_peak(entry, optimizer, filled)
    _compare_lengths(filled)
    if entry.name == "OneCycle":
        _check_one_cycle(optimizer, filled)
    filled.record_defaults(SCHEDULER, entry.name, filled.defaulted)
    if entry.source == "zerotune":
        filled.decide(
            SCHEDULER_TYPE,
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
    """Let zerotune step the curve where DeepSpeed's class would give all groups one rate."""
    rates = {float(group.params.get("lr", optimizer.lr)) for group in optimizer.groups}
    if choice.source != "deepspeed" or not rates - {optimizer.lr}:
        return choice, ()
    decision = Decision(
        key=SCHEDULER_TYPE,
        before=choice.name,
        after=choice.name,
        reason=f"the groups' learning rates differ, and DeepSpeed's {choice.name} would set one "
        "for all of them; zerotune steps the same curve, scaled for each group",
    )
    return attrs.evolve(choice, source="zerotune"), (decision,)


def _complete_schedule(
    request: ScheduleRequest, optimizer: OptimizerChoice, run: RunFacts
) -> Filled:
    entry = request.entry
    log = Log()

    def completed() -> Filled:
        params = _scalars(request.params, optimizer)
        for given in (params, request.overrides):
            reject_unknown(given, entry.parameter_names, log, section=SCHEDULER, owner=entry.name)
        sources = Sources(
            owner=entry.name,
            section=SCHEDULER,
            written=_follow_override(request, params, optimizer, log),
            overrides=request.overrides,
            suggestions=_schedule_suggestions(entry, optimizer, run),
        )
        return fill(entry.parameters, sources)

    filled = log.whole(completed)
    filled.decisions[:0] = log.decisions
    if request.written is None:
        _default_warmup(filled, run)
    return filled


def _scalars(params: Mapping[str, Any], optimizer: OptimizerChoice) -> dict[str, Any]:
    """Unpack lists of one value per parameter group: there is one group."""
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
                    f"one value per parameter group, and {optimizer.name} has one group",
                    key=f"{SCHEDULER}.{key}",
                    value=value,
                    fix="write one number",
                )
            plain[key] = value[0]
        else:
            plain[key] = value
    return plain


def _follow_override(
    request: ScheduleRequest, params: dict[str, Any], optimizer: OptimizerChoice, log: Log
) -> dict[str, Any]:
    """An overridden learning rate would be in vain if the schedule kept its own peak."""
    peak = request.entry.peak
    if not request.lr_overridden or peak != "warmup_max_lr" or peak in request.overrides:
        return params
    written = params.get(peak)
    if written is None or is_auto(written) or written == optimizer.lr:
        return params
    log.decide(
        f"{SCHEDULER}.{peak}",
        written,
        optimizer.lr,
        "follows the learning rate given to OptimizerResolver(overrides=…)",
        "warning",
    )
    return {**params, peak: optimizer.lr}


def _schedule_suggestions(
    entry: SchedulerEntry, optimizer: OptimizerChoice, run: RunFacts
) -> dict[str, Suggestion]:
    suggestions: dict[str, Suggestion] = {}
    if entry.peak is not None:
        # A peak that differs from the optimizer's lr gets a decision of its own.
        suggestions[entry.peak] = Suggestion(
            value=optimizer.lr, source="the optimizer's lr", yields=True
        )
    if run.warmup_steps is not None:
        warmup = Suggestion(value=run.warmup_steps, source="the run (warmup_steps)")
        suggestions |= dict.fromkeys(("warmup_num_steps", "num_warmup_steps"), warmup)
    if run.total_steps is not None:
        total = Suggestion(value=run.total_steps, source="the run (total_steps)")
        suggestions |= dict.fromkeys(("total_num_steps", "num_training_steps"), total)
    return {key: value for key, value in suggestions.items() if key in entry.parameter_names}


def _default_warmup(filled: Filled, run: RunFacts) -> None:
    """Length of the warm-up nobody asked for."""
    if "warmup_num_steps" not in filled.defaulted:
        return
    if run.total_steps is None:
        steps, reason = DEFAULT_WARMUP, "the run does not say how long it is"
    else:
        steps = min(DEFAULT_WARMUP, run.total_steps // WARMUP_SHARE)
        # DeepSpeed's shortest warm-up keeps two updates at the minimum.
        steps = 0 if steps < 2 else steps
        reason = f"5 % of the run's {run.total_steps} steps, at most {DEFAULT_WARMUP}"
    filled.change(SCHEDULER, "warmup_num_steps", steps, reason)


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
    filled.decide(f"{SCHEDULER}.warmup_num_steps", 0, 1, reason, severity)
    floor = {"WarmupLR": "warmup_min_lr", "WarmupCosineLR": "warmup_min_ratio"}.get(entry.name)
    if floor is None:
        return
    peak = values["warmup_max_lr"] if entry.name == "WarmupLR" else 1.0
    reason = "no warm-up: the schedule starts at its peak"
    if entry.name == "WarmupCosineLR":
        reason += "; DeepSpeed still runs the very first update at 0"
    filled.change(SCHEDULER, floor, peak, reason, "note")


def _compare_peak(entry: SchedulerEntry, optimizer: OptimizerChoice, filled: Filled) -> None:
    if entry.peak is None or filled.values[entry.peak] == optimizer.lr:
        return
    filled.decide(
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
            key=f"{SCHEDULER}.{key}",
            value=total,
            fix="make the schedule longer than its warm-up",
        )
    if total is not None and warmup is not None and total < warmup:
        filled.decide(
            f"{SCHEDULER}.{key}",
            total,
            total,
            f"kept, but the warm-up of {warmup} steps is longer than the whole schedule",
            "warning",
        )


def _check_one_cycle(optimizer: OptimizerChoice, filled: Filled) -> None:
    values = filled.values
    betas = optimizer.params.get("betas")
    if values["cycle_momentum"] and betas is None:
        reason = f"{optimizer.name} has no betas, and DeepSpeed cycles nothing else"
        filled.change(SCHEDULER, "cycle_momentum", False, reason)
    elif values["cycle_momentum"]:
        filled.decide(
            "optimizer.params.betas",
            betas,
            (values["cycle_min_mom"], ONE_CYCLE_BETA2),
            "OneCycle cycles the first beta and sets the second to 0.99; write cycle_momentum "
            "false to keep the optimizer's",
            "warning",
        )
    if values["decay_step_size"] == 0 and values["decay_lr_rate"] > 0:
        filled.decide(
            f"{SCHEDULER}.decay_lr_rate",
            values["decay_lr_rate"],
            values["decay_lr_rate"],
            "kept, but DeepSpeed does not decay while decay_step_size is 0",
            "warning",
        )


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


@attrs.define(kw_only=True)
class Filled(Log):
    """Values by argument, the decisions behind them, and which nobody asked for."""

    values: dict[str, Any] = attrs.field(factory=dict)
    defaulted: set[str] = attrs.field(factory=set)

    def change(
        self, section: str, name: str, value: Any, reason: str, severity: Severity | None = None
    ) -> None:
        """Give an argument another value; a warning where somebody wrote the former."""
        written = name not in self.defaulted
        before = self.values[name] if written else None
        self.defaulted.discard(name)
        self.values[name] = value
        severity = severity or ("warning" if written else "note")
        self.decide(f"{section}.{name}", before, value, reason, severity)

    def record_defaults(self, section: str, owner: str, keys: Collection[str]) -> None:
        """Sum up in one decision what was written out although nobody asked for it."""
        values = {key: value for key, value in self.values.items() if key in keys}
        if values:
            self.decide(
                section,
                None,
                values,
                f"not written; defaults for {owner}, made explicit because defaults move "
                "between releases",
            )


def fill(parameters: Collection[Parameter], sources: Sources) -> Filled:
    """Give every parameter a value.

    Returns:
        Checked values. Optional parameters nobody wrote are left out.
    """
    filled = Filled()
    for parameter in parameters:
        filled.attempt(_fill_one, parameter, sources, filled)
    raise_all(filled.mistakes)
    return filled


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


def _fill_one(parameter: Parameter, sources: Sources, filled: Filled) -> None:
    name, key = parameter.name, f"{sources.section}.{parameter.name}"
    written = sources.written.get(name, UNSET)
    explicit = UNSET if is_auto(written) else written
    rival = sources.suggestions.get(name)
    said = precedence(
        nothing=UNSET,
        override=sources.overrides.get(name, UNSET),
        written=explicit,
        run=UNSET if rival is None else rival.value,
    )
    if not said:
        if not parameter.optional:
            filled.values[name] = _default(parameter, sources, filled)
        return
    value, reason = read(parameter, said[0][0], section=sources.section)
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
        other = check(parameter, rival.value, section=sources.section)
        if other != value:
            wins = f"the configuration's explicit value wins over the one from {rival.source}"
            filled.decide(key, other, value, f'{wins}; write "auto" to let that one in', "warning")
    filled.values[name] = value


def _default(parameter: Parameter, sources: Sources, filled: Filled) -> Any:
    key, owner = f"{sources.section}.{parameter.name}", sources.owner
    automatic = parameter.name in sources.written
    plain = automatic or sources.plain_defaults
    value = parameter.default if plain else parameter.unwritten
    if value is UNSET:
        fact = _RUN_FACT.get(parameter.name)
        raise OptimizerError(
            f"{owner} needs it, and neither the configuration nor the run says it",
            key=key,
            **({"value": AUTO} if automatic else {}),
            fix=f"write a number, or give the run RunFacts({fact}=…)" if fact else "write a number",
        )
    if automatic:
        filled.decide(key, AUTO, value, f"the run does not say; zerotune's default for {owner}")
    else:
        filled.defaulted.add(parameter.name)
    return value


_NOTE: Final[Severity] = "note"
_RUN_FACT: Final[Mapping[str, str]] = {
    "total_num_steps": "total_steps",
    "warmup_num_steps": "warmup_steps",
    "num_training_steps": "total_steps",
}
