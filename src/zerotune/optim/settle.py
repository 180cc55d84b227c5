"""From an ``optimizer`` section to one ``OptimizerChoice``, step by step.

A request (what is asked for) becomes a runnable request (what can be had here), then complete
arguments, then the choice. Every step that changes something records why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, MissingDependencyError, OptimizerError
from zerotune.optim.capability import (
    CONFIGURATION_ONLY,
    GROUP_RATES,
    Capability,
    CapabilityTable,
    Implementation,
    Situation,
    capability_of,
    implementation_of,
    missing_package,
)
from zerotune.optim.catalogue import (
    ADAM,
    DEFAULT_OPTIMIZER,
    OPTIMIZERS,
    TYPE_KEY,
    OptimizerName,
)
from zerotune.optim.parameters import (
    Filled,
    OptimizerEntry,
    Parameter,
    Sources,
    Suggestion,
    fill,
    reject_unknown,
)
from zerotune.plan.model import OptimizerChoice

Policy = Literal["fallback", "error"]

SECTION: Final = "optimizer.params"

_DECAY_SPELLINGS: Final = ("adamw_mode", "decoupled_weight_decay")
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
    """Settle on an optimizer.

    Args:
        request: What is asked for.
        situation: Where it is to run.
        overrides: Arguments that beat the request's.
        suggestions: What the run knows.
        policy: What happens when it cannot run, or gets an argument it does not have.
        table: Cells that were run; those that come with zerotune when not given.

    Raises:
        MissingDependencyError: It is in an optional package that is not installed.
        OptimizerError: It cannot run here and ``policy`` is ``"error"``.
        UnknownKeyError: An argument that no optimizer has.
        InvalidValueError: An argument of the wrong type or out of range.
    """
    log = Filled()
    request = _respell_decay(request, log)
    _check_names(request.params, request.entry, policy)
    asked = request
    _check_overrides(overrides, request.entry)
    _check_installed(request, situation)
    request, capability = _runnable(request, situation, policy, log, table)
    request = _without_foreign(request, log)
    filled = _complete(request, _still_meant(overrides, request.entry, log), suggestions)
    _keep_decay_meaning(request, filled)
    _match_bf16_states(situation, filled)
    implementation = implementation_of(request.entry, filled.values, situation)
    params = _constructor_arguments(request, implementation, filled, policy)
    _record_name(asked, request, implementation, log)
    _record_capability(request, situation, capability, log)
    return Settled(
        choice=_choice(request, implementation, params),
        entry=request.entry,
        decisions=(*log.decisions, *filled.decisions),
        rates={key: filled.values[key] for key in GROUP_RATES if key in filled.values},
    )


def _choice(
    request: Request, implementation: Implementation, params: Mapping[str, Any]
) -> OptimizerChoice:
    return OptimizerChoice(
        name=request.name.canonical,
        params=params,
        implementation=implementation.name,
        source=implementation.source,
        package=implementation.package,
        weight_decay_mode=implementation.weight_decay_mode,
    )


# -- What is asked for.


def _refuse_clipping(params: Mapping[str, Any]) -> None:
    if "max_grad_norm" in params:
        raise InvalidValueError(
            "clipping is not an argument of the optimizer in DeepSpeed",
            key=f"{SECTION}.max_grad_norm",
            value=params["max_grad_norm"],
            fix="write gradient_clipping at the top level instead",
        )


def _check_names(params: Mapping[str, Any], entry: OptimizerEntry, policy: Policy) -> None:
    """Refuse arguments of no optimizer at all; under ``"error"`` those of others too."""
    _refuse_clipping(params)
    known = entry.parameter_names
    for key, value in params.items():
        if key not in _EVERY_ARGUMENT or policy == "error":
            reject_unknown({key: value}, known, section=SECTION, owner=entry.name)


def _check_overrides(overrides: Mapping[str, Any], entry: OptimizerEntry) -> None:
    _refuse_clipping(overrides)
    reject_unknown(overrides, entry.parameter_names, section=SECTION, owner=entry.name)


def _check_installed(request: Request, situation: Situation) -> None:
    """An optimizer of an optional package is asked for by those who want that one."""
    entry = request.entry
    package = missing_package(entry, situation)
    if package is not None and entry.family == "package":
        raise MissingDependencyError(
            f"{entry.name} is in the package {package}, which is not installed",
            key=TYPE_KEY,
            value=request.name.written,
            fix=f"pip install 'zerotune[{entry.extra}]'",
        )


def _respell_decay(request: Request, log: Filled) -> Request:
    """DeepSpeed's classes and torch spell ``adam_w_mode`` in their own ways."""
    params = dict(request.params)
    if request.entry.name not in ADAM:
        return request
    for spelling in _DECAY_SPELLINGS:
        if spelling in params:
            value = params.pop(spelling)
            log.record(
                f"{SECTION}.{spelling}",
                value,
                None,
                "DeepSpeed's configuration calls it adam_w_mode",
            )
            params.setdefault("adam_w_mode", value)
    name = request.name
    if name.implementation and params.get("adam_w_mode") is False:
        # FusedAdam(adam_w_mode=False) is L2 Adam, and AdamW would ignore the switch.
        name = attrs.evolve(name, canonical="Adam")
    return attrs.evolve(request, name=name, params=params)


def _without_foreign(request: Request, log: Filled) -> Request:
    """Leave out arguments that belong to other optimizers."""
    known = request.entry.parameter_names
    for key, value in request.params.items():
        if key not in known:
            log.record(
                f"{SECTION}.{key}",
                value,
                None,
                f"{request.entry.name} has no such argument; left out",
                "warning",
            )
    own = {key: value for key, value in request.params.items() if key in known}
    return attrs.evolve(request, params=own)


def _still_meant(
    overrides: Mapping[str, Any], entry: OptimizerEntry, log: Filled
) -> Mapping[str, Any]:
    """The overrides that still have a meaning after a fallback to ``entry``."""
    for key in overrides.keys() - set(entry.parameter_names):
        log.record(
            f"{SECTION}.{key}",
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
    log: Filled,
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
            key=TYPE_KEY,
            value=name.written,
            fix=f"use {capability.alternative}",
        )
    log.record(
        TYPE_KEY, name.written, DEFAULT_OPTIMIZER, _why(request, situation, capability), "warning"
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


def _translate(request: Request, log: Filled) -> dict[str, Any]:
    """The arguments that mean the same to AdamW; the others are dropped, each with a note."""
    renamed = request.entry.renamed
    params: dict[str, Any] = {}
    for key, value in request.params.items():
        if key in _TRANSLATABLE:
            params.setdefault(key, value)
        elif key in renamed:
            params[renamed[key]] = value
            log.record(
                f"{SECTION}.{key}",
                value,
                None,
                f"{DEFAULT_OPTIMIZER} takes it as {renamed[key]}",
            )
        else:
            log.record(
                f"{SECTION}.{key}",
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
        section=SECTION,
        written=request.params,
        overrides=overrides,
        suggestions={key: value for key, value in suggestions.items() if entry.parameter(key)},
        plain_defaults=not request.params or request.name.origin == "torch",
    )
    filled = fill(entry.parameters, sources)
    if "lr" in filled.defaulted:
        filled.defaulted.discard("lr")
        filled.record(
            f"{SECTION}.lr",
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
            key=f"{SECTION}.nesterov",
            value=True,
            fix='write for example "momentum": 0.9, "dampening": 0',
        )
    if entry.name == "Rprop" and not values["etas"][0] < 1 < values["etas"][1]:
        raise InvalidValueError(
            "the first factor must shrink a step and the second must grow it",
            key=f"{SECTION}.etas",
            value=values["etas"],
            fix="write for example [0.5, 1.2]",
        )


def _keep_decay_meaning(request: Request, filled: Filled) -> None:
    """``Adam`` and ``adam_w_mode`` mean in DeepSpeed what few people expect."""
    values, entry = filled.values, request.entry
    key = f"{SECTION}.adam_w_mode"
    if entry.name == "AdamW" and values["adam_w_mode"] is False:
        values["adam_w_mode"] = True
        filled.record(
            key,
            False,
            True,
            "adam_w_mode has no effect on AdamW, whose decay is decoupled; write type Adam with "
            "adam_w_mode false for L2 decay",
            "warning",
        )
    if entry.name != "Adam" or "adam_w_mode" not in filled.defaulted:
        return
    filled.defaulted.discard("adam_w_mode")
    if request.name.origin == "torch":
        values["adam_w_mode"] = False
        filled.record(key, None, False, "torch.optim.Adam decays weights by L2")
        return
    filled.record(
        key,
        None,
        True,
        "DeepSpeed's Adam runs AdamW's decoupled decay unless adam_w_mode is false; write type "
        "AdamW, or adam_w_mode false for Adam's L2 decay",
        # Without decay the two are the same algorithm.
        "warning" if values["weight_decay"] > 0 else "note",
    )


def _match_bf16_states(situation: Situation, filled: Filled) -> None:
    """Say what DeepSpeed does anyway when the plan keeps optimizer states in bf16."""
    if situation.bf16_states and filled.values.get("fp32_optimizer_states"):
        explicit = "fp32_optimizer_states" not in filled.defaulted
        filled.defaulted.discard("fp32_optimizer_states")
        filled.values["fp32_optimizer_states"] = False
        filled.record(
            f"{SECTION}.fp32_optimizer_states",
            True if explicit else None,
            False,
            "bf16.bf16_optimizer_states keeps the states in bf16",
            "warning" if explicit else "note",
        )


def _constructor_arguments(
    request: Request, implementation: Implementation, filled: Filled, policy: Policy
) -> dict[str, Any]:
    """What the class that really runs takes; the rest goes, audibly when somebody wrote it."""
    entry = request.entry
    kept: dict[str, Any] = {}
    for key, value in filled.values.items():
        if implementation.takes(entry, key):
            kept[key] = value
        elif key not in filled.defaulted and key not in CONFIGURATION_ONLY | GROUP_RATES:
            _drop(entry.parameter(key), implementation, value, filled, policy)
    filled.record_defaults(SECTION, entry.name, filled.defaulted & kept.keys())
    return kept


def _drop(
    parameter: Parameter | None,
    implementation: Implementation,
    value: Any,
    filled: Filled,
    policy: Policy,
) -> None:
    if parameter is None or value == parameter.default:
        return
    key = f"{SECTION}.{parameter.name}"
    reason = (
        f"{implementation.name}, which does the update here, has no such argument "
        f"({', '.join(sorted(parameter.only))} would)"
    )
    if policy == "error":
        raise OptimizerError(reason, key=key, value=value, fix=_fix_for_dropped(parameter.name))
    filled.record(key, value, None, reason, "warning")


def _fix_for_dropped(key: str) -> str:
    return 'set "torch_adam": true' if key == "amsgrad" else "leave it out"


# -- What is said about it.


def _record_name(
    asked: Request, request: Request, implementation: Implementation, log: Filled
) -> None:
    name, canonical = asked.name, asked.name.canonical
    if not asked.configured:
        log.record(
            TYPE_KEY, None, canonical, f"no optimizer is configured; {canonical} is the default"
        )
    if request.name.canonical != canonical:
        return
    if name.implementation:
        log.record(
            TYPE_KEY,
            name.written,
            canonical,
            f"it names a class, and the engine picks the class itself: {canonical} runs as "
            f"{implementation.name} here",
            "warning",
        )
    elif asked.configured and name.written != canonical:
        log.record(
            TYPE_KEY,
            name.written,
            canonical,
            f"another spelling; it runs as {implementation.name} here",
        )


def _record_capability(
    request: Request, situation: Situation, capability: Capability, log: Filled
) -> None:
    if "own implementation" in capability.reason:
        log.record(
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
        log.record(
            key,
            written.get(key),
            value,
            f"{request.name.canonical} needs it: {capability.reason}",
            "warning",
        )
