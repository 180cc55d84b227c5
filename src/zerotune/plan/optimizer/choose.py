"""From a request to one optimizer, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from zerotune.decisions import Decision, Log, Severity
from zerotune.errors import (
    REMOVAL,
    InvalidValueError,
    MissingDependencyError,
    OptimizerError,
    writes,
)
from zerotune.plan.optimizer.arguments import Filled, Sources, Suggestion, reject_unknown
from zerotune.plan.optimizer.capability import (
    CONFIGURATION_ONLY,
    GROUP_RATES,
    Capability,
    Situation,
    capability_of,
    implementation_of,
    missing_package,
)
from zerotune.plan.optimizer.catalogue import ADAM, OPTIMIZERS
from zerotune.plan.optimizer.choices import OptimizerChoice
from zerotune.plan.optimizer.entries import OptimizerEntry, Parameter
from zerotune.plan.optimizer.names import (
    DECAY_SPELLINGS,
    DEFAULT_OPTIMIZER,
    OPTIMIZER_TYPE,
    OptimizerName,
    clipping_in_optimizer,
)

Policy = Literal["fallback", "error"]

OPTIMIZER: Final = "optimizer.params"

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
