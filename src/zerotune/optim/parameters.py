"""What an optimizer or a schedule takes, and how each of its arguments gets a value.

The catalogue describes optimizers and schedules with ``Parameter`` and ``Entry``; what a value may
hold is said by the same kinds as for the settings of a plan. ``fill`` goes from the arguments
people write to complete, explicit ones, each change recorded. Precedence: an override given to
``OptimizerResolver``, an explicit value of the configuration, what the run knows, zerotune's or
DeepSpeed's default.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, Final, Literal

import attrs

from zerotune._util.mistakes import noted, together
from zerotune._util.text import did_you_mean
from zerotune.decisions import Decision, Severity
from zerotune.errors import UNSET, OptimizerError, UnknownKeyError
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
    Text,
    is_auto,
    refuse_template,
)

ParameterType = Literal["float", "int", "bool", "floats", "str", "any"]

_SWITCH: Final = {"true": True, "false": False}


@attrs.frozen(kw_only=True)
class Parameter:
    """One argument, described by data so that a page or a table can be made of it."""

    name: str
    """Key under ``params``, as DeepSpeed or torch spells it."""
    type: ParameterType = "float"
    """``"floats"`` is a fixed number of floats (``betas``); ``"any"`` is passed on unchecked."""
    default: Any = UNSET
    """Value for ``"auto"``; ``UNSET`` when there is none and it must be given."""
    native: Any = UNSET
    """What DeepSpeed's class uses when the key is not written, where that is not ``default``."""
    low: float | None = None
    """Smallest value allowed (of each element)."""
    high: float | None = None
    """Largest value allowed (of each element)."""
    low_open: bool = False
    """Whether ``low`` itself is refused."""
    high_open: bool = False
    """Whether ``high`` itself is refused."""
    length: int | None = None
    """Number of elements of ``"floats"``."""
    choices: tuple[str, ...] = ()
    """Allowed words of a ``"str"``."""
    nullable: bool = False
    """Whether ``None`` is a value."""
    optional: bool = False
    """Whether it is left out unless somebody writes it (a switch without effect on results)."""
    only: frozenset[str] = frozenset()
    """Classes whose constructor takes it; empty means all of them."""

    @cached_property
    def kind(self) -> Kind:
        """What it may hold; ``"auto"`` is never handed to it."""
        if self.type == "any":
            return Anything()
        if self.type == "bool":
            return Boolean(auto=False, words=_SWITCH)
        if self.type == "str":
            return Choice(choices=self.choices) if self.choices else Text()
        bounds: dict[str, Any] = {
            "minimum": -math.inf if self.low is None else self.low,
            "maximum": math.inf if self.high is None else self.high,
            "above": self.low if self.low_open else None,
            "below": self.high if self.high_open else None,
        }
        if self.type == "int":
            return Integer(auto=False, **bounds)
        real = Real(auto=False, **bounds)
        return real if self.type == "float" else Numbers(each=real, length=self.length or 1)

    @property
    def unwritten(self) -> Any:
        """The value it has when nobody writes the key."""
        return self.default if self.native is UNSET else self.native

    @property
    def range(self) -> str:
        """The allowed values in short, for a table."""
        if self.type == "bool":
            return "true or false"
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        noun = {"int": "a whole number", "floats": f"{self.length} numbers"}.get(
            self.type, "a number"
        )
        bounds = [
            f"{'>' if self.low_open else '>='} {self.low:g}" if self.low is not None else "",
            f"{'<' if self.high_open else '<='} {self.high:g}" if self.high is not None else "",
        ]
        return " ".join([noun, " and ".join(bound for bound in bounds if bound)]).strip()

    def accepts(self, implementation: str) -> bool:
        """Whether the class called ``implementation`` takes this argument."""
        return not self.only or implementation in self.only

    def read(self, value: Any, *, section: str) -> Reading:
        """``check`` that also tells why the value differs from what was written, if it does."""
        if value is None and self.nullable:
            return None, None
        refuse_template(self.kind, value, f"{section}.{self.name}")
        return self.kind.read(value, f"{section}.{self.name}")

    def check(self, value: Any, *, section: str) -> Any:
        """Return ``value`` in its proper type.

        Args:
            value: As written; numbers may be text (YAML reads ``1e-4`` as text).
            section: ``"optimizer.params"`` or ``"scheduler.params"``, for the message.

        Returns:
            A float, int, bool, str, or a tuple of floats.

        Raises:
            InvalidValueError: Wrong type, outside the range, or not finite.
        """
        value, _ = self.read(value, section=section)
        return value


def number(name: str, default: float, *, low: float | None = 0, **kwargs: Any) -> Parameter:
    """A float, not negative unless said otherwise."""
    return Parameter(name=name, default=default, low=low, **kwargs)


def integer(name: str, default: Any = UNSET, *, low: int = 1, **kwargs: Any) -> Parameter:
    """A whole number, positive unless said otherwise."""
    return Parameter(name=name, type="int", default=default, low=low, **kwargs)


def flag(name: str, default: bool = False, **kwargs: Any) -> Parameter:
    """A switch."""
    return Parameter(name=name, type="bool", default=default, **kwargs)


# -- Entries of the catalogue.


Family = Literal["deepspeed", "torch", "package", "zerotune"]


@attrs.frozen(kw_only=True)
class Entry:
    """An optimizer or a schedule that has a name and takes arguments."""

    name: str
    """Canonical name (``"AdamW"``, ``"WarmupLR"``)."""
    summary: str
    """One line for a table."""
    parameters: tuple[Parameter, ...]
    """All arguments a configuration may write."""

    def parameter(self, name: str) -> Parameter | None:
        """The argument called ``name``, or ``None``."""
        return self._by_name.get(name)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of all arguments."""
        return tuple(self._by_name)

    @cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {item.name: item for item in self.parameters}


@attrs.frozen(kw_only=True)
class OptimizerEntry(Entry):
    """One optimizer: its arguments, its states, and what it asks for."""

    family: Family
    """``"deepspeed"`` for the names of DeepSpeed's configuration, ``"torch"`` for the classes
    of ``torch.optim`` that DeepSpeed only knows by lookup, ``"package"`` for those of optional
    packages, ``"zerotune"`` for those that nobody else has."""
    states: tuple[str, ...] = ()
    """Tensors kept per parameter, each of the parameter's size; fp32 unless ``summary`` says."""
    conditional_states: Mapping[str, str] = attrs.field(factory=dict)
    """Further states, by the argument that asks for each when it is not zero or false."""
    adam_like: bool = False
    """Whether it keeps Adam's two moments, and decay can be decoupled or L2."""
    requires: tuple[str, ...] = ()
    """What it needs, in words."""
    package: str | None = None
    """Module of an optional package that has it (``"prodigyopt"``, ``"mup"``)."""
    implementation: str | None = None
    """Its class there, where that is not ``name``."""
    extra: str | None = None
    """Extra of zerotune that installs the package."""
    own_schedule: bool = False
    """Whether it sets its own pace, so that no schedule is the right default."""
    renamed: Mapping[str, str] = attrs.field(factory=dict)
    """Its own arguments that mean one of AdamW's, for a fallback."""
    lr_scale: str | None = None
    """How its usual learning rate differs from AdamW's; ``None`` when it does not."""

    def states_for(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the fp32 states per parameter that ``params`` lead to.

        Args:
            params: The optimizer's arguments (``{"momentum": 0.9}``).
        """
        extra = tuple(state for key, state in self.conditional_states.items() if params.get(key))
        return self.states + extra


# -- Filling in.


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


@attrs.define
class Filled:
    """Values by argument, the decisions behind them, and which nobody asked for."""

    values: dict[str, Any] = attrs.field(factory=dict)
    decisions: list[Decision] = attrs.field(factory=list)
    defaulted: set[str] = attrs.field(factory=set)

    def record(
        self, key: str, before: Any, after: Any, reason: str, severity: Severity = "note"
    ) -> None:
        """Append a decision."""
        self.decisions.append(
            Decision(key=key, before=before, after=after, reason=reason, severity=severity)
        )

    def record_defaults(self, section: str, owner: str, keys: Collection[str]) -> None:
        """Sum up in one decision what was written out although nobody asked for it."""
        values = {key: value for key, value in self.values.items() if key in keys}
        if values:
            self.record(
                section,
                None,
                values,
                f"not written; defaults for {owner}, made explicit because defaults move "
                "between releases",
            )


def fill(parameters: Collection[Parameter], sources: Sources) -> Filled:
    """Give every parameter a value.

    Args:
        parameters: All arguments of the optimizer or schedule.
        sources: Where values may come from.

    Returns:
        Checked values. Optional parameters nobody wrote are left out.

    Raises:
        InvalidValueError: A value of the wrong type or out of range.
        OptimizerError: A required argument that nothing gives a value for.
    """
    filled = Filled()
    with together():
        for parameter in parameters:
            with noted():
                _fill_one(parameter, sources, filled)
    return filled


def reject_unknown(
    written: Mapping[str, Any], known: Collection[str], *, section: str, owner: str
) -> None:
    """Refuse arguments that ``owner`` does not have.

    Raises:
        UnknownKeyError: With the closest names, and all that exist.
    """
    for key, value in written.items():
        if key in known:
            continue
        close = did_you_mean(str(key), known)
        there_are = f"write one of {', '.join(known)}" if known else "remove it: there are none"
        with noted():
            raise UnknownKeyError(
                f"{owner} has no argument of this name",
                key=f"{section}.{key}",
                value=value,
                fix=f"did you mean {' or '.join(close)}?" if close else there_are,
            )


def _fill_one(parameter: Parameter, sources: Sources, filled: Filled) -> None:
    name = parameter.name
    written = sources.written.get(name, UNSET)
    if name in sources.overrides:
        filled.values[name] = _overridden(parameter, sources, written, filled)
    elif written is not UNSET and not is_auto(written):
        filled.values[name] = _explicit(parameter, sources, written, filled)
    elif name in sources.suggestions:
        filled.values[name] = _suggested(parameter, sources, written, filled)
    elif not parameter.optional:
        filled.values[name] = _defaulted(parameter, sources, written, filled)


def _overridden(parameter: Parameter, sources: Sources, written: Any, filled: Filled) -> Any:
    value = parameter.check(sources.overrides[parameter.name], section=sources.section)
    before = None if written is UNSET else written
    if before != value:
        explicit = written is not UNSET and not is_auto(written)
        filled.record(
            f"{sources.section}.{parameter.name}",
            before,
            value,
            "given to OptimizerResolver(overrides=…), which wins over the configuration",
            "warning" if explicit else "note",
        )
    return value


def _explicit(parameter: Parameter, sources: Sources, written: Any, filled: Filled) -> Any:
    value, reason = parameter.read(written, section=sources.section)
    key = f"{sources.section}.{parameter.name}"
    if reason is not None:
        filled.record(key, written, value, reason)
    rival = sources.suggestions.get(parameter.name)
    if rival is not None and not rival.yields:
        other = parameter.check(rival.value, section=sources.section)
        if other != value:
            filled.record(
                key,
                other,
                value,
                f"the configuration's explicit value wins over the one from {rival.source}; "
                'write "auto" to let that one in',
                "warning",
            )
    return value


def _suggested(parameter: Parameter, sources: Sources, written: Any, filled: Filled) -> Any:
    suggestion = sources.suggestions[parameter.name]
    value = parameter.check(suggestion.value, section=sources.section)
    filled.record(
        f"{sources.section}.{parameter.name}",
        None if written is UNSET else AUTO,
        value,
        f"taken from {suggestion.source}",
    )
    return value


def _defaulted(parameter: Parameter, sources: Sources, written: Any, filled: Filled) -> Any:
    key, owner = f"{sources.section}.{parameter.name}", sources.owner
    automatic = written is not UNSET
    plain = automatic or sources.plain_defaults
    value = parameter.default if plain else parameter.unwritten
    if value is UNSET:
        raise OptimizerError(
            f"{owner} needs it, and neither the configuration nor the run says it",
            key=key,
            **({"value": AUTO} if automatic else {}),
            fix=_how_to_give(parameter.name),
        )
    if automatic:
        filled.record(key, AUTO, value, f"the run does not say; zerotune's default for {owner}")
    else:
        filled.defaulted.add(parameter.name)
    return value


_RUN_FACT: Final[Mapping[str, str]] = {
    "total_num_steps": "total_steps",
    "warmup_num_steps": "warmup_steps",
    "num_training_steps": "total_steps",
}


def _how_to_give(name: str) -> str:
    fact = _RUN_FACT.get(name)
    return f"write a number, or give the run RunFacts({fact}=…)" if fact else "write a number"
