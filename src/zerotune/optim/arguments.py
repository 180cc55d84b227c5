"""From the arguments people write to complete, explicit ones, each change recorded.

Precedence: an override given to ``OptimizerResolver``, an explicit value of the configuration,
what the run knows, zerotune's or DeepSpeed's default. This module knows nothing of optimizers in
particular; schedules are filled by the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import attrs

from zerotune._util.text import did_you_mean
from zerotune.decisions import Decision, Severity
from zerotune.errors import UNSET, OptimizerError, UnknownKeyError
from zerotune.optim.parameters import AUTO, Parameter, is_auto


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


def fill(parameters: Collection[Parameter], sources: Sources, owner: str) -> Filled:
    """Give every parameter a value.

    Args:
        parameters: All arguments of the optimizer or schedule.
        sources: Where values may come from.
        owner: Canonical name, for the reasons.

    Returns:
        Checked values. Optional parameters nobody wrote are left out.

    Raises:
        InvalidValueError: A value of the wrong type or out of range.
        OptimizerError: A required argument that nothing gives a value for.
    """
    filled = Filled()
    for parameter in parameters:
        _fill_one(parameter, sources, owner, filled)
    return filled


def record_defaults(filled: Filled, section: str, owner: str, keys: Collection[str]) -> None:
    """Sum up in one decision what was written out although nobody asked for it."""
    values = {key: filled.values[key] for key in filled.values if key in keys}
    if values:
        filled.record(
            section,
            None,
            values,
            f"not written; defaults for {owner}, made explicit because defaults move "
            "between releases",
        )


def _fill_one(parameter: Parameter, sources: Sources, owner: str, filled: Filled) -> None:
    name = parameter.name
    written = sources.written.get(name, UNSET)
    if name in sources.overrides:
        filled.values[name] = _overridden(parameter, sources, written, filled)
    elif written is not UNSET and not is_auto(written):
        filled.values[name] = _explicit(parameter, sources, written, filled)
    elif name in sources.suggestions:
        filled.values[name] = _suggested(parameter, sources, written, filled)
    elif not parameter.optional:
        filled.values[name] = _defaulted(parameter, sources, owner, written, filled)


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
    value = parameter.check(written, section=sources.section)
    key = f"{sources.section}.{parameter.name}"
    if isinstance(written, str) and not isinstance(value, str):
        filled.record(key, written, value, "a number or switch written as text")
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


def _defaulted(
    parameter: Parameter, sources: Sources, owner: str, written: Any, filled: Filled
) -> Any:
    key = f"{sources.section}.{parameter.name}"
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
        listed = ", ".join(known)
        raise UnknownKeyError(
            f"{owner} has no argument of this name",
            key=f"{section}.{key}",
            value=value,
            fix=f"did you mean {' or '.join(close)}?" if close else f"use {listed}",
        )
