"""Valid arguments of optimizers and schedules, and how each gets a value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import attrs

from zerotune._util.text import did_you_mean
from zerotune.decisions import RUN, WRITTEN, Log, Severity, precedence, raise_all
from zerotune.errors import REMOVAL, UNSET, OptimizerError, UnknownKeyError
from zerotune.plan.context import RunFacts
from zerotune.plan.optimizer.choices import BY_RUN
from zerotune.plan.optimizer.entries import Entry, Parameter
from zerotune.plan.values import (
    AUTO,
    Reading,
    is_auto,
)


def read(parameter: Parameter, value: Any, *, section: str) -> Reading:
    """Convert ``value`` as ``check`` does, and also return the reason if the value changed."""
    if value is None and parameter.nullable:
        return None, None
    kind, key = parameter.kind, f"{section}.{parameter.name}"
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
                f"did you mean {' or '.join(close)}?" if close else there_are,
                f"{section}.{key}",
                value,
                edits=[*renames, REMOVAL],
            )
        )


LENGTHS: Final = ("total_num_steps", "num_training_steps")
"""Arguments of schedules that are the run's number of optimizer steps."""
_FACTS: Final = {
    **{name: name for name in ("lr", "betas", "eps", "weight_decay")},
    **dict.fromkeys(("warmup_num_steps", "num_warmup_steps"), "warmup_steps"),
    **dict.fromkeys(LENGTHS, "total_steps"),
}
"""Attribute of ``RunFacts`` that sets an argument."""


@attrs.define(kw_only=True)
class Arguments(Log):
    """Arguments of one optimizer or schedule: the source of each value, the value, the decision.

    The configuration takes precedence over the run, then what the other of the two implies, then
    the default.
    """

    entry: Entry
    section: str
    """``"optimizer.params"`` or ``"scheduler.params"``."""
    written: Mapping[str, Any]
    """Values from the configuration; may contain ``"auto"``."""
    run: RunFacts
    implied: Mapping[str, tuple[Any, str]]
    """Values that follow from other settings, and where each comes from."""
    plain_defaults: bool = False
    """Whether a missing key gets ``Parameter.default``, like a key set to ``"auto"``, instead of
    the default of DeepSpeed's class."""
    values: dict[str, Any] = attrs.field(init=False, factory=dict)
    """Checked values; optional arguments without a value are omitted."""
    defaulted: set[str] = attrs.field(init=False, factory=set)
    """Names of the arguments left at defaults."""

    def fill(self) -> None:
        """Give every argument its value; raise all errors as one."""
        for parameter in self.entry.parameters:
            self.attempt(self._fill_one, parameter)
        raise_all(self.mistakes)

    def _fill_one(self, parameter: Parameter) -> None:
        name, key = parameter.name, f"{self.section}.{parameter.name}"
        written = self.written.get(name, UNSET)
        fact = _FACTS.get(name, "")
        of_run = getattr(self.run, fact, None)
        said = precedence(
            nothing=UNSET,
            written=UNSET if is_auto(written) else written,
            run=UNSET if of_run is None else of_run,
        )
        if not said and name in self.implied:
            said = [self.implied[name]]
        if not said:
            if not parameter.optional:
                self.values[name] = self._default(parameter, key)
            return
        value, reason = read(parameter, said[0][0], section=self.section)
        before, who = None if written is UNSET else written, said[0][1]
        if who != WRITTEN:
            source = f"{who} ({fact})" if who == RUN else who
            before, reason = before and AUTO, f"taken from {source}"
        if reason is not None:
            self.decide(key, before, value, reason)
        if who == WRITTEN and of_run is not None:
            other = check(parameter, of_run, section=self.section)
            if other != value:
                wins = f"the configuration overrides the value from the run ({fact})"
                wins += '; write "auto" to use that value'
                self.decide(key, other, value, wins, "warning")
        self.values[name] = value

    def _default(self, parameter: Parameter, key: str) -> Any:
        owner, automatic = self.entry.name, parameter.name in self.written
        plain = automatic or self.plain_defaults
        value = parameter.default if plain else parameter.unwritten
        if value is UNSET and parameter.name not in LENGTHS:
            raise OptimizerError(
                f"{owner} needs this value, but neither the configuration nor the run sets it",
                "write a number",
                key,
                AUTO if automatic else UNSET,
            )
        if value is UNSET:
            self.decide(key, AUTO if automatic else None, BY_RUN, "its number of steps is unknown")
            return BY_RUN
        if automatic:
            why = f"the run does not set this value; zerotune's default for {owner} is used"
            self.decide(key, AUTO, value, why)
        else:
            self.defaulted.add(parameter.name)
        return value

    def change(self, name: str, value: Any, reason: str, severity: Severity | None = None) -> None:
        """Change the argument ``name`` to ``value``, and record a decision.

        By default, the decision is a warning if the previous value was explicit, else a note.
        """
        written = name not in self.defaulted
        before = self.values[name] if written else None
        self.defaulted.discard(name)
        self.values[name] = value
        severity = severity or ("warning" if written else "note")
        self.decide(f"{self.section}.{name}", before, value, reason, severity)

    def record_defaults(self, keys: Collection[str]) -> None:
        """Record in one decision that the values of ``keys`` are the entry's defaults."""
        values = {key: value for key, value in self.values.items() if key in keys}
        if values:
            self.decide(
                self.section,
                None,
                values,
                f"the configuration does not set these arguments; the defaults of {self.entry.name}"
                " are written out, because defaults change between releases",
            )
