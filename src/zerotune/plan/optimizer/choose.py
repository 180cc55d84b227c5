"""Choose the optimizer and the schedule of a plan: what runs here, with every argument explicit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import attrs

from zerotune._util.text import as_number
from zerotune.decisions import Decision, Log, Severity, raise_all
from zerotune.errors import (
    REMOVAL,
    InvalidValueError,
    MissingDependencyError,
    OptimizerError,
    UnknownKeyError,
    writes,
)
from zerotune.plan.context import RunFacts
from zerotune.plan.facts import ModelFacts
from zerotune.plan.optimizer.arguments import Arguments, Suggestion, below, reject_unknown
from zerotune.plan.optimizer.capability import (
    CONFIGURATION_ONLY,
    GROUP_RATES,
    LOW_BIT,
    Capability,
    Situation,
    capability_of,
    implementation_of,
    installed_packages,
    missing_package,
)
from zerotune.plan.optimizer.catalogue import ADAM, OPTIMIZERS
from zerotune.plan.optimizer.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.optimizer.entries import OptimizerEntry, Parameter
from zerotune.plan.optimizer.groups import KEY, ParameterGroups, group_parameters
from zerotune.plan.optimizer.muon import MuonPatterns, muon_groups
from zerotune.plan.optimizer.names import (
    DECAY_SPELLINGS,
    DEFAULT_OPTIMIZER,
    OPTIMIZER_TYPE,
    OptimizerName,
    clipping_in_optimizer,
    parse_optimizer_name,
)
from zerotune.plan.optimizer.pace import SCHEDULER, ScheduleRequest, choose_schedule, open_length
from zerotune.plan.optimizer.schedules import SCHEDULER_TYPE
from zerotune.plan.read import SHORT_NAMES, settings_by_path
from zerotune.plan.sections import OptimizerSection
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO, is_auto

Policy = Literal["fallback", "error"]

OPTIMIZER: Final = "optimizer.params"
BY_CHOICE: Final = "optimizer"
"""``Decision.rule`` of all decisions about the optimizer and the schedule."""

_TYPES: Final = frozenset({OPTIMIZER_TYPE, SCHEDULER_TYPE})
_TRANSLATABLE: Final = ("lr", "betas", "eps", "weight_decay")
_EVERY_ARGUMENT: Final = frozenset(
    name for entry in OPTIMIZERS.values() for name in entry.parameter_names
)


@attrs.frozen(kw_only=True)
class ChoiceOptions:
    """How an optimizer is chosen; ``OptimizerResolver`` adds the verbs."""

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

    @on_unsupported.validator
    def _check_policy(self, _attribute: Any, value: str) -> None:
        if value not in get_args(Policy):
            raise InvalidValueError(
                "is not a valid policy", 'use "fallback" or "error"', "on_unsupported", value
            )


DEFAULTS: Final = ChoiceOptions()


@attrs.frozen(kw_only=True)
class Chosen:
    """The optimizer and the schedule of a plan, with the reason for each choice."""

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


def choose(
    plan: Settings,
    situation: Situation,
    *,
    run: RunFacts,
    model: ModelFacts | None,
    options: ChoiceOptions = DEFAULTS,
) -> Chosen:
    """Choose the optimizer and the schedule of a plan; raise all errors about both as one."""
    overrides = settings_by_path(options.overrides, _override_paths) if options.overrides else {}
    choosing = _Choosing(situation=situation, options=options, overrides=overrides)
    request = choosing.outcome(ScheduleRequest.of, plan.scheduler, overrides)
    suggestions = _suggestions(run, request)
    found = choosing.outcome(choosing.optimizer, plan.optimizer, suggestions)
    # After an error, the schedule is checked too.
    choice = _STAND_IN
    if found is not None:
        choice = choosing.outcome(choosing.grouped, *found, model) or _STAND_IN
    entry = OPTIMIZERS[choice.name]
    scheduler = choosing.outcome(choose_schedule, request, plan.scheduler, choice, run, choosing)
    raise_all(choosing.mistakes)
    choosing.warn_of_unsaved(entry)
    return Chosen(
        optimizer=choice,
        scheduler=scheduler,
        states=entry.states_for(choice.params),
        situation=situation,
        decisions=tuple([attrs.evolve(each, rule=BY_CHOICE) for each in choosing.decisions]),
    )


_STAND_IN: Final = OptimizerChoice(
    name=DEFAULT_OPTIMIZER, params={"lr": 1e-4, "betas": (0.9, 0.999)}, implementation="FusedAdam"
)


def _override_paths(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the path of an override; a name without dots is an argument of the optimizer."""
    path = name
    if "." not in name:
        short = SHORT_NAMES.get(name, "")
        of_choice = short.startswith(("optimizer.", "scheduler."))
        path = short if of_choice else f"{OPTIMIZER}.{name}"
    if path not in _TYPES and not path.startswith((f"{OPTIMIZER}.", f"{SCHEDULER}.")):
        raise UnknownKeyError(
            "is not a setting of the optimizer or the scheduler",
            f'use "{OPTIMIZER}.lr", "{SCHEDULER}.warmup_num_steps", '
            '"optimizer.type" or "scheduler.type"',
            name,
            value,
        )
    return [(path, value)]


def _suggestions(run: RunFacts, request: ScheduleRequest | None) -> dict[str, Suggestion]:
    """Return values for unset optimizer arguments, from the run or else from the schedule."""
    suggestions = {
        name: Suggestion(value=getattr(run, name), source=f"the run ({name})")
        for name in ("lr", "betas", "eps", "weight_decay")
        if getattr(run, name) is not None
    }
    peak = None if request is None else request.entry.peak
    if request is not None and peak is not None and "lr" not in suggestions:
        value = as_number(request.params.get(peak))
        # A peak out of range is refused under its own name, not as the optimizer's lr.
        if value is not None and value > 0:
            source = f"{SCHEDULER}.{peak}"
            suggestions["lr"] = Suggestion(value=value, source=source, yields=True)
    return suggestions


@attrs.define(kw_only=True)
class _Choosing(Log):
    """The choice of one optimizer, with its decisions and errors."""

    situation: Situation
    options: ChoiceOptions
    overrides: Mapping[str, Any]
    """Overrides by path; they hold after a fallback too."""

    @property
    def strict(self) -> bool:
        """Whether what cannot run or is not accepted is an error."""
        return self.options.on_unsupported == "error"

    def optimizer(
        self, section: OptimizerSection | None, suggestions: Mapping[str, Suggestion]
    ) -> tuple[OptimizerChoice, Arguments]:
        written = self.overrides.get(OPTIMIZER_TYPE, section.type if section else None)
        configured = written is not None and not is_auto(written)
        name = parse_optimizer_name(written if configured else DEFAULT_OPTIMIZER)
        params = dict((section.params if section else None) or {})
        if name.canonical in ADAM:
            params = self._respell_decay(params)
            name = attrs.evolve(name, canonical=name.under(params))
        asked, overrides = OPTIMIZERS[name.canonical], below(self.overrides, OPTIMIZER)
        self._refuse_unknown(asked, params, overrides)
        self._assume_package(asked, name)
        capability = capability_of(asked, self.situation)
        entry = asked
        if not capability.runs:
            entry = self._fallback(name, capability, params)
            capability = capability_of(entry, self.situation)
        params = self._accepted(asked, entry, params)
        arguments = Arguments(
            entry=entry,
            section=OPTIMIZER,
            written=params,
            overrides=self._accepted_overrides(entry, overrides),
            suggestions={key: each for key, each in suggestions.items() if entry.parameter(key)},
            plain_defaults=not params or (entry is asked and name.origin == "torch"),
            decisions=self.decisions,
        )
        arguments.fill()
        self._lr_by_default(arguments, configured=configured)
        _check_together(entry, arguments.values)
        _keep_decay_meaning(arguments, of_torch=name.origin == "torch")
        implementation = implementation_of(entry, arguments.values, self.situation)
        params = self._constructor_arguments(arguments, implementation)
        if entry is asked:
            self._record_name(name, configured, implementation)
        self._record_capability(entry, capability, implementation)
        return attrs.evolve(implementation, params=params), arguments

    def _respell_decay(self, params: dict[str, Any]) -> dict[str, Any]:
        """Rename other spellings of ``adam_w_mode``, which torch and DeepSpeed's classes use."""
        for spelling in DECAY_SPELLINGS[1:]:
            if spelling in params:
                value = params.pop(spelling)
                reason = "DeepSpeed's configuration calls this argument adam_w_mode"
                self.decide(f"{OPTIMIZER}.{spelling}", value, None, reason)
                params.setdefault("adam_w_mode", value)
        return params

    def _refuse_unknown(
        self, entry: OptimizerEntry, params: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> None:
        """Refuse unknown arguments, and overrides that the optimizer does not have.

        Arguments of other optimizers are refused only under ``"error"``.
        """
        foreign = () if self.strict else _EVERY_ARGUMENT
        for given, others in ((params, foreign), (overrides, ())):
            if (misplaced := clipping_in_optimizer(given)) is not None:
                self.refuse(misplaced)
            judged = {k: v for k, v in given.items() if k != "max_grad_norm" and k not in others}
            reject_unknown(judged, entry.parameter_names, self, section=OPTIMIZER, owner=entry.name)

    def _assume_package(self, entry: OptimizerEntry, name: OptimizerName) -> None:
        """Record that a package is missing, which only a start needs; there is no fallback."""
        package = missing_package(entry, self.situation)
        if package is not None and entry.family == "package":
            reason = f"{entry.name} needs the package {package}, which is not installed; before "
            reason += f"training, run pip install 'zerotune[{entry.extra}]'"
            self.decide(OPTIMIZER_TYPE, name.written, entry.name, reason, "warning")
            self.situation = attrs.evolve(self.situation, packages=None)

    def _fallback(
        self, name: OptimizerName, capability: Capability, params: Mapping[str, Any]
    ) -> OptimizerEntry:
        """Return AdamW's entry in place of an optimizer that cannot run."""
        entry = OPTIMIZERS[name.canonical]
        why = f"{entry.name} cannot run on {self.situation}: {capability.reason}"
        if self.strict or entry.family == "package":
            # AdamW replaces only optimizers of DeepSpeed's configuration: with Prodigy's lr of 1,
            # or without the memory that 8-bit states save, it would not help.
            raise OptimizerError(
                why,
                f"use {capability.alternative}",
                OPTIMIZER_TYPE,
                name.written,
                edits=capability.edits,
            )
        if capability.alternative not in (None, DEFAULT_OPTIMIZER):
            why += f"; a closer alternative is {capability.alternative}"
        if entry.lr_scale and "lr" in params:
            why += (
                f"; the learning rate is unchanged: check it, because {entry.name}'s is usually "
                f"{entry.lr_scale} than {DEFAULT_OPTIMIZER}'s"
            )
        self.decide(OPTIMIZER_TYPE, name.written, DEFAULT_OPTIMIZER, why, "warning")
        return OPTIMIZERS[DEFAULT_OPTIMIZER]

    def _accepted(
        self, asked: OptimizerEntry, entry: OptimizerEntry, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments that mean the same to ``entry``; drop others, each with a record."""
        kept: dict[str, Any] = {}
        names = entry.parameter_names if entry is asked else _TRANSLATABLE
        for key, value in params.items():
            severity: Severity = "note"
            if key in names:
                kept.setdefault(key, value)
                continue
            if entry is asked:
                why, severity = f"{entry.name} has no such argument, so it is removed", "warning"
            elif key in asked.renamed:
                kept[asked.renamed[key]] = value
                why = f"{entry.name} calls this argument {asked.renamed[key]}"
            else:
                why = f"{entry.name} lacks this argument of {asked.name}"
            self.decide(f"{OPTIMIZER}.{key}", value, None, why, severity)
        return kept

    def _accepted_overrides(
        self, entry: OptimizerEntry, overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        why = f"the override is ignored, because {entry.name} has no such argument"
        for key, value in overrides.items():
            if key not in entry.parameter_names:
                self.decide(f"{OPTIMIZER}.{key}", value, None, why, "warning")
        return {key: value for key, value in overrides.items() if entry.parameter(key)}

    def _lr_by_default(self, arguments: Arguments, *, configured: bool) -> None:
        if "lr" in arguments.defaulted:
            arguments.defaulted.discard("lr")
            self.decide(
                f"{OPTIMIZER}.lr",
                None,
                arguments.values["lr"],
                "neither the configuration nor the run sets the learning rate; this is "
                f"zerotune's default for {arguments.entry.name}",
                "warning" if configured else "note",
            )

    def _constructor_arguments(
        self, arguments: Arguments, implementation: OptimizerChoice
    ) -> dict[str, Any]:
        """Return the arguments that the running class accepts; report others that were set."""
        entry, kept = arguments.entry, {}
        for key, value in arguments.values.items():
            parameter = entry.parameter(key)
            if key in CONFIGURATION_ONLY:
                taken = implementation.source == "deepspeed"
            elif key in GROUP_RATES or parameter is None:
                taken = False
            else:
                taken = parameter.accepts(implementation.implementation)
                if not taken and key not in arguments.defaulted and value != parameter.default:
                    self._drop_argument(parameter, implementation, value)
            if taken:
                kept[key] = value
        arguments.record_defaults(arguments.defaulted & kept.keys())
        return kept

    def _drop_argument(
        self, parameter: Parameter, implementation: OptimizerChoice, value: Any
    ) -> None:
        key = f"{OPTIMIZER}.{parameter.name}"
        reason = (
            f"{implementation.implementation}, which performs the update here, has no "
            f"such argument (accepted only by {' and '.join(sorted(parameter.only))})"
        )
        # Without maximize, the weights would move in the opposite direction.
        if self.strict or parameter.name == "maximize":
            of_torch = parameter.only == ADAM and parameter.name in ("amsgrad", "maximize")
            edits = {f"{OPTIMIZER}.torch_adam": True} if of_torch else REMOVAL
            raise OptimizerError(reason, key=key, value=value, edits=[edits])
        self.decide(key, value, None, reason, "warning")

    def _record_name(
        self, name: OptimizerName, configured: bool, implementation: OptimizerChoice
    ) -> None:
        canonical, before = name.canonical, name.written if configured else None
        runs = f"{canonical} runs as {implementation.implementation} here"
        if not configured:
            reason = f"no optimizer is configured; {canonical} is the default"
        elif name.implementation:
            reason = f"this is the name of a class, but the engine chooses the class: {runs}"
        elif name.written != canonical:
            reason = f"the name is an alias; {runs}"
        else:
            return
        severity: Severity = "warning" if configured and name.implementation else "note"
        self.decide(OPTIMIZER_TYPE, before, canonical, reason, severity)

    def _record_capability(
        self, entry: OptimizerEntry, capability: Capability, implementation: OptimizerChoice
    ) -> None:
        why = capability.reason
        written = {
            "zero_allow_untested_optimizer": self.situation.allow_untested,
            "zero_force_ds_cpu_optimizer": self.situation.force_cpu,
        }
        for key, value in capability.config.items():
            if written.get(key) != value:
                reason = f"{entry.name} needs this value: {why}"
                self.decide(key, written.get(key), value, reason, "warning")
                why = f"see the reason given at {key}"
        if implementation.source == "zerotune":
            self.decide("optimizer.implementation", entry.name, f"zerotune's {entry.name}", why)

    def grouped(
        self, choice: OptimizerChoice, arguments: Arguments, model: ModelFacts | None
    ) -> OptimizerChoice:
        """Return the choice with its parameter groups."""
        options = self.options
        if choice.name == "Muon" and model is None:
            reason = "parameter groups depend on the model's parameters, which are unknown here"
            self.decide(KEY, None, "open", reason)
            return choice
        decisions: tuple[Decision, ...] = ()
        if options.groups is not None:
            groups, decisions = group_parameters(
                options.groups, model, choice, OPTIMIZERS[choice.name]
            )
            choice = attrs.evolve(choice, groups=groups)
        if choice.name == "Muon" and model is not None:
            # The split into Muon's and Adam's parameters replaces the groups decided above.
            choice, decisions = muon_groups(choice, model, options.muon, arguments.values)
        self.decisions.extend(decisions)
        return choice

    def warn_of_unsaved(self, entry: OptimizerEntry) -> None:
        """Record a warning about states that are not saved."""
        name = entry.name
        if name.startswith("TorchAO"):
            reason = "checkpoints do not support torchao's states, so saving will fail"
        elif name in LOW_BIT:
            reason = "checkpoints contain the moments in fp32; a resumed run may differ from an "
            reason += "uninterrupted one in the last bit of the scale of a block of moments"
        elif entry.own_schedule:
            reason = "checkpoints omit the values that the optimizer keeps for all weights "
            reason += "together, so a resumed run resets them"
            if name == "AdamWScheduleFree":
                reason += "; evaluation, EMA and exports use the trained weights, not their average"
        else:
            return
        self.decide("optimizer.state", name, name, reason, "warning")


def _keep_decay_meaning(arguments: Arguments, *, of_torch: bool) -> None:
    """Set ``adam_w_mode`` to the decay that will run, and report surprising cases."""
    values, name = arguments.values, arguments.entry.name
    if name == "AdamW" and values["adam_w_mode"] is False:
        reason = "adam_w_mode has no effect on AdamW, whose decay is decoupled; write type Adam "
        reason += "with adam_w_mode false for L2 decay"
        arguments.change("adam_w_mode", True, reason, "warning")
    if name != "Adam" or "adam_w_mode" not in arguments.defaulted:
        return
    if of_torch:
        arguments.change("adam_w_mode", False, "torch.optim.Adam decays weights by L2")
        return
    reason = "DeepSpeed's Adam applies AdamW's decoupled decay unless adam_w_mode is false; "
    reason += "write type AdamW, or adam_w_mode false for Adam's L2 decay"
    # Without decay, Adam and AdamW are the same algorithm.
    severity: Severity = "warning" if values["weight_decay"] > 0 else "note"
    arguments.change("adam_w_mode", True, reason, severity)


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
            "write for example [0.5, 1.2]",
            f"{OPTIMIZER}.etas",
            values["etas"],
            edits=writes([0.5, 1.2]),
        )


def require_startable(optimizer: OptimizerChoice, scheduler: SchedulerChoice | None) -> None:
    """Raise an error for what a start needs and a resolved plan may lack.

    Raises:
        MissingDependencyError: The optimizer's package is not installed.
        OptimizerError: Muon's parameters or the schedule's length are unknown.
    """
    entry = OPTIMIZERS[optimizer.name]
    package = missing_package(entry, Situation(packages=installed_packages()))
    if package is not None:
        raise MissingDependencyError(
            f"{entry.name} needs the package {package}, which is not installed",
            f"pip install 'zerotune[{entry.extra}]'",
            OPTIMIZER_TYPE,
            entry.name,
        )
    if entry.name == "Muon" and not optimizer.groups:
        raise OptimizerError(
            "Muon needs the names and shapes of the parameters",
            "pass them: plan.resolve(model=ModelFacts.from_module(model))",
            OPTIMIZER_TYPE,
            entry.name,
        )
    if scheduler is not None and (length := open_length(scheduler)):
        raise OptimizerError(
            f"{scheduler.name} needs this value, but neither the configuration nor the run sets it",
            "write a number, or pass RunFacts(total_steps=…) to the run",
            f"{SCHEDULER}.{length}",
            AUTO,
        )
