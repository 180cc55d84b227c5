"""Valid arguments of optimizers and schedules, and how each gets a value."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Final

import attrs

from zerotune._util.text import did_you_mean
from zerotune.decisions import OVERRIDE, WRITTEN, Log, Severity, precedence, raise_all
from zerotune.errors import REMOVAL, UNSET, OptimizerError, UnknownKeyError
from zerotune.plan.optimizer.entries import Parameter
from zerotune.plan.values import (
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

_SWITCH: Final = {"true": True, "false": False}


@cache
def kind_of(parameter: Parameter) -> Kind:
    """Return the ``Kind`` that checks an argument's values; it does not accept ``"auto"``."""
    if parameter.type == "any":
        return Anything()
    if parameter.type == "bool":
        return Boolean(auto=False, spellings=_SWITCH)
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
    """Convert ``value`` as ``check`` does, and also return the reason if the value changed."""
    if value is None and parameter.nullable:
        return None, None
    kind, key = kind_of(parameter), f"{section}.{parameter.name}"
    refuse_template(kind, value, key)
    return kind.read(value, key)


def check(parameter: Parameter, value: Any, *, section: str) -> Any:
    """Convert a value to the type of its argument, and check it.

    Args:
        parameter: The argument.
        value: Value as written in the configuration. A number may be a string, because YAML reads
            ``1e-4`` as a string.
        section: ``"optimizer.params"`` or ``"scheduler.params"``, for messages.

    Returns:
        A float, int, bool, str, or a tuple of floats.
    """
    return read(parameter, value, section=section)[0]


def reject_unknown(
    written: Mapping[str, Any], accepted: Collection[str], log: Log, *, section: str, owner: str
) -> None:
    """Reject arguments that ``owner`` does not have, and suggest the closest names."""
    for key, value in written.items():
        if key in accepted:
            continue
        close = did_you_mean(str(key), accepted)
        there_are = (
            f"use one of {', '.join(accepted)}"
            if accepted
            else f"remove it: {owner} accepts no arguments"
        )
        renames = ({"": UNSET, f"{section}.{each}": value} for each in close)
        log.refuse(
            UnknownKeyError(
                f"{owner} has no such argument",
                key=f"{section}.{key}",
                value=value,
                fix=f"did you mean {' or '.join(close)}?" if close else there_are,
                edits=[*renames, REMOVAL],
            )
        )


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
