"""How each argument of an optimizer or a schedule gets a value.

What a value may hold is checked by the same kinds as the settings of a plan. ``fill`` goes from the
arguments people write to complete, explicit ones, each change recorded. Precedence: an override
given to ``OptimizerResolver``, an explicit value of the configuration, what the run knows,
zerotune's or DeepSpeed's default.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Final

import attrs

from zerotune._util.text import did_you_mean
from zerotune.decisions import Log, raise_all
from zerotune.errors import UNSET, OptimizerError, UnknownKeyError
from zerotune.optimizers.parameters import Parameter
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

    Args:
        parameters: All arguments of the optimizer or schedule.
        sources: Where values may come from.

    Returns:
        Checked values. Optional parameters nobody wrote are left out.
    """
    filled = Filled()
    for parameter in parameters:
        filled.attempt(_fill_one, parameter, sources, filled)
    raise_all(filled.mistakes)
    return filled


def reject_unknown(
    written: Mapping[str, Any], known: Collection[str], log: Log, *, section: str, owner: str
) -> None:
    """Refuse arguments that ``owner`` does not have, with the closest names, and all that exist."""
    for key, value in written.items():
        if key in known:
            continue
        close = did_you_mean(str(key), known)
        there_are = f"write one of {', '.join(known)}" if known else "remove it: there are none"
        log.refuse(
            UnknownKeyError(
                f"{owner} has no argument of this name",
                key=f"{section}.{key}",
                value=value,
                fix=f"did you mean {' or '.join(close)}?" if close else there_are,
            )
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
    value = check(parameter, sources.overrides[parameter.name], section=sources.section)
    before = None if written is UNSET else written
    if before != value:
        explicit = written is not UNSET and not is_auto(written)
        filled.decide(
            f"{sources.section}.{parameter.name}",
            before,
            value,
            "given to OptimizerResolver(overrides=…), which wins over the configuration",
            "warning" if explicit else "note",
        )
    return value


def _explicit(parameter: Parameter, sources: Sources, written: Any, filled: Filled) -> Any:
    value, reason = read(parameter, written, section=sources.section)
    key = f"{sources.section}.{parameter.name}"
    if reason is not None:
        filled.decide(key, written, value, reason)
    rival = sources.suggestions.get(parameter.name)
    if rival is not None and not rival.yields:
        other = check(parameter, rival.value, section=sources.section)
        if other != value:
            filled.decide(
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
    value = check(parameter, suggestion.value, section=sources.section)
    filled.decide(
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
        filled.decide(key, AUTO, value, f"the run does not say; zerotune's default for {owner}")
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
