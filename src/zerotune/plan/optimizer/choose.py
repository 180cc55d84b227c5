"""Choose the optimizer and the schedule of a plan: what runs here, with every argument explicit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune._util.text import as_number
from zerotune.decisions import Decision, Log, Severity, raise_all
from zerotune.errors import (
    REMOVAL,
    InvalidValueError,
    MissingDependencyError,
    OptimizerError,
    writes,
)
from zerotune.plan.context import RunFacts
from zerotune.plan.facts import ModelFacts
from zerotune.plan.optimizer.arguments import Arguments, reject_unknown
from zerotune.plan.optimizer.capability import (
    CONFIGURATION_ONLY,
    GROUP_RATES,
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
from zerotune.plan.optimizer.groups import KEY, ParameterGroups, group_parameters, record_groups
from zerotune.plan.optimizer.muon import muon_groups
from zerotune.plan.optimizer.names import (
    DECAY_SPELLINGS,
    DEFAULT_OPTIMIZER,
    OPTIMIZER_TYPE,
    OptimizerName,
    parse_optimizer_name,
)
from zerotune.plan.optimizer.pace import (
    SCHEDULER,
    choose_schedule,
    open_length,
    requested_schedule,
)
from zerotune.plan.optimizer.schedules import SchedulerEntry
from zerotune.plan.sections import OptimizerSection, SchedulerSection
from zerotune.plan.settings import Settings
from zerotune.plan.values import AUTO, is_auto

OPTIMIZER: Final = "optimizer.params"
BY_CHOICE: Final = "optimizer"
"""``Decision.rule`` of all decisions about the optimizer and the schedule."""


@attrs.frozen(kw_only=True)
class Chosen:
    """The optimizer and the schedule of a plan, with the reason for each choice."""

    optimizer: OptimizerChoice
    """The optimizer that will run, with every argument explicit."""
    scheduler: SchedulerChoice | None
    """The learning-rate schedule; ``None`` for a constant learning rate."""
    decisions: tuple[Decision, ...]
    """All automatic choices."""


def choose(
    plan: Settings,
    situation: Situation,
    *,
    run: RunFacts,
    model: ModelFacts | None,
    groups: ParameterGroups | None = None,
) -> Chosen:
    """Choose the optimizer and the schedule of a plan; raise all errors about both as one.

    Args:
        plan: The plan.
        situation: Where the optimizer runs.
        run: Values from the training script.
        model: Names and shapes of the parameters, for groups.
        groups: As in ``OptimizerResolver``.
    """
    choosing, section = _Choosing(situation=situation), plan.scheduler
    requested = choosing.outcome(requested_schedule, section)
    found = choosing.outcome(choosing.optimizer, plan.optimizer, run, _implied(requested, section))
    # After an error, the schedule is checked too.
    choice = _STAND_IN
    if found is not None:
        choice = choosing.outcome(choosing.grouped, *found, model, groups) or _STAND_IN
    scheduler = choosing.outcome(choose_schedule, requested, section, choice, run, choosing)
    raise_all(choosing.mistakes)
    if choice.name in _UNSAVED:
        name = choice.name
        choosing.decide("optimizer.state", name, name, _UNSAVED[name], "warning")
    return Chosen(
        optimizer=choice,
        scheduler=scheduler,
        decisions=tuple([attrs.evolve(each, rule=BY_CHOICE) for each in choosing.decisions]),
    )


_STAND_IN: Final = OptimizerChoice(
    name=DEFAULT_OPTIMIZER, params={"lr": 1e-4, "betas": (0.9, 0.999)}, implementation="FusedAdam"
)


def _implied(
    requested: SchedulerEntry | None, section: SchedulerSection | None
) -> dict[str, tuple[float, str]]:
    """Return the learning rate that a schedule's peak implies, and the peak's path."""
    peak = requested.peak if requested else None
    params = (section.params if section else None) or {}
    value = None if peak is None else as_number(params.get(peak))
    # A peak out of range is refused under its own name, not as the optimizer's lr.
    return {"lr": (value, f"{SCHEDULER}.{peak}")} if value is not None and value > 0 else {}


@attrs.define(kw_only=True)
class _Choosing(Log):
    """The choice of one optimizer, with its decisions and errors."""

    situation: Situation

    def optimizer(
        self,
        section: OptimizerSection | None,
        run: RunFacts,
        implied: Mapping[str, tuple[Any, str]],
    ) -> tuple[OptimizerChoice, Arguments]:
        written = section.type if section else None
        configured = written is not None and not is_auto(written)
        name = parse_optimizer_name(written if configured else DEFAULT_OPTIMIZER)
        params = dict((section.params if section else None) or {})
        if name.canonical in ADAM:
            params = self._respell_decay(params)
            name = attrs.evolve(name, canonical=name.under(params))
        entry = OPTIMIZERS[name.canonical]
        reject_unknown(params, entry.parameter_names, self, section=OPTIMIZER, owner=entry.name)
        self._assume_package(entry, name)
        capability = capability_of(entry, self.situation)
        if not capability.runs:
            raise OptimizerError(
                f"{entry.name} cannot run on {self.situation}: {capability.reason}",
                f"use {capability.alternative}",
                OPTIMIZER_TYPE,
                name.written,
                edits=capability.edits,
            )
        arguments = Arguments(
            entry=entry,
            section=OPTIMIZER,
            written=params,
            run=run,
            implied=implied,
            plain_defaults=not params,
            decisions=self.decisions,
        )
        arguments.fill()
        self._lr_by_default(arguments, configured=configured)
        _check_together(entry, arguments.values)
        _keep_decay_meaning(arguments)
        implementation = implementation_of(entry, arguments.values, self.situation)
        params = self._constructor_arguments(arguments, implementation)
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

    def _assume_package(self, entry: OptimizerEntry, name: OptimizerName) -> None:
        """Record that a package is missing, which only a start needs."""
        package = missing_package(entry, self.situation.packages)
        if package is not None:
            reason = f"{entry.name} needs the package {package}, which is not installed; before "
            reason += "training, run pip install 'zerotune[optimizers]'"
            self.decide(OPTIMIZER_TYPE, name.written, entry.name, reason, "warning")
            self.situation = attrs.evolve(self.situation, packages=None)

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
        if parameter.name == "maximize":
            edits = {f"{OPTIMIZER}.torch_adam": True} if parameter.only == ADAM else REMOVAL
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
        self,
        choice: OptimizerChoice,
        arguments: Arguments,
        model: ModelFacts | None,
        groups: ParameterGroups | None,
    ) -> OptimizerChoice:
        """Return the choice with its parameter groups."""
        is_muon = choice.name == "Muon"
        if is_muon and model is None:
            reason = "parameter groups depend on the model's parameters, which are unknown here"
            self.decide(KEY, None, "open", reason)
            return choice
        if groups is not None:
            chosen = group_parameters(groups, model, choice, OPTIMIZERS[choice.name])
            choice = attrs.evolve(choice, groups=chosen)
        if is_muon and model is not None:
            return muon_groups(choice, model, arguments.values, self)
        if choice.groups:
            record_groups(choice.groups, self)
        return choice


_RESET: Final = (
    "checkpoints omit the values that the optimizer keeps for all weights together, so a resumed "
    "run resets them"
)
_UNSAVED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("TorchAOAdamW8bit", "TorchAOAdamW4bit"),
        "checkpoints do not support torchao's states, so saving will fail",
    ),
    "AdamW8bit": "checkpoints contain the moments in fp32; a resumed run may differ from an "
    "uninterrupted one in the last bit of the scale of a block of moments",
    "Prodigy": _RESET,
    "AdamWScheduleFree": f"{_RESET}; evaluation, EMA and exports use the trained weights, not "
    "their average",
}
"""What checkpoints lack of an optimizer's states."""


def _keep_decay_meaning(arguments: Arguments) -> None:
    """Set ``adam_w_mode`` to the decay that will run, and report surprising cases."""
    values, name = arguments.values, arguments.entry.name
    if name == "AdamW" and values["adam_w_mode"] is False:
        reason = "adam_w_mode has no effect on AdamW, whose decay is decoupled; write type Adam "
        reason += "with adam_w_mode false for L2 decay"
        arguments.change("adam_w_mode", True, reason, "warning")
    if name != "Adam" or "adam_w_mode" not in arguments.defaulted:
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
    package = missing_package(entry, installed_packages())
    if package is not None:
        raise MissingDependencyError(
            f"{entry.name} needs the package {package}, which is not installed",
            "pip install 'zerotune[optimizers]'",
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
