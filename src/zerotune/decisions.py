"""What is said of a setting: one record of choices, findings and refusals, and a log of them.

Code that reads or settles is passed a ``Log``. It records its decisions there, and the mistakes
behind which it can go on, so that a user sees every mistake at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, cast, get_args

import attrs

from zerotune.errors import PlanConflictError, ZeroTuneError, both_names, shorten

logger = logging.getLogger("zerotune")

Severity = Literal["error", "warning", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)

T = TypeVar("T")

_LONGEST_SHOWN: Final = 1000
_MOST_MISTAKES: Final = 20
"""Mistakes shown at most."""

_announced: set[tuple[str, str, str]] = set()


@attrs.frozen(kw_only=True)
class Decision:
    """What is said of one setting: what it was, what it becomes, why, and what to write instead.

    An automatic choice, the finding of a rule (``zerotune.plan.rules.Finding`` is this class), or
    what a later step refuses.
    """

    key: str
    """Path of the setting, as DeepSpeed's JSON spells it (``"zero_optimization.stage"``); empty:
    the whole."""
    before: Any
    """The value as given; ``None`` when nothing was given."""
    after: Any
    """The value that will be used; ``None`` when the setting was dropped; ``before`` when it
    stays."""
    reason: str
    """One sentence that says why."""
    severity: Severity = "note"
    """``"error"`` when it stops the plan, ``"warning"`` when the user would probably object, else
    ``"note"``."""
    fix: str = ""
    """What to write instead, where there is something to do."""
    rule: str = ""
    """Id of the rule that found it, or the step that refused it; empty: a choice."""
    written: str | None = attrs.field(default=None, eq=False, repr=False)
    """What the user's own file calls the setting, where that is not ``key``."""
    error: ZeroTuneError | None = attrs.field(default=None, eq=False, repr=False)
    """The error it was made of."""

    @classmethod
    def of(cls, error: ZeroTuneError, *, rule: str = "", severity: Severity = "error") -> Decision:
        """An error as a record.

        Args:
            error: The error; its ``others`` are not looked at.
            rule: The rule or the step that refused it.
            severity: How bad it is.
        """
        return cls(
            key=error.key or "",
            before=error.value,
            after=error.value,
            reason=error.reason,
            severity=severity,
            fix=error.fix or "",
            rule=rule,
            written=error.written,
            error=error,
        )

    @property
    def value(self) -> Any:
        """``before``, of a finding the value found; ``UNSET`` where there is none."""
        return self.before

    @property
    def why(self) -> str:
        """Reason and fix."""
        return f"{self.reason}; {self.fix}" if self.fix else self.reason

    @property
    def is_shown(self) -> bool:
        """Whether reports show it: what stays as it was is on record only, warnings excepted."""
        return self.severity != "note" or self.before != self.after

    @property
    def is_choice(self) -> bool:
        """Whether it tells what was chosen, and not what somebody should do."""
        return not self.fix and self.error is None

    def as_error(self) -> ZeroTuneError:
        """The record as an exception."""
        error = self.error
        if error is None:
            error = PlanConflictError(
                self.reason, key=self.key, value=self.before, fix=self.fix or None
            )
        return error if self.written is None else error.called(self.written)

    def __str__(self) -> str:
        if not self.is_choice and self.before == self.after:
            return str(self.as_error())
        name = "".join(both_names(self.key, self.written))
        return (
            f"{name}: {_readable_value(self.before)} -> {_readable_value(self.after)} ({self.why})"
        )


def worst_first(records: Iterable[Decision]) -> list[Decision]:
    """Records, errors first, otherwise in their order."""
    return sorted(records, key=lambda one: SEVERITIES.index(one.severity))


def _readable_value(value: Any) -> str:
    return "unset" if value is None else shorten(value, _LONGEST_SHOWN)


# -- Who decides: what the configuration says, then the run, then the launcher, then a default.


OVERRIDE, WRITTEN, RUN = "the caller", "the configuration", "the run"
_WHO: Final = {
    "override": OVERRIDE,
    "written": WRITTEN,
    "run": RUN,
    "launched": "the launcher's file",
}


def precedence(*, nothing: Any = None, **said: Any) -> list[tuple[Any, str]]:
    """Everything that is said about one setting, and who says it; the first of them stands.

    Args:
        nothing: The value by which somebody says nothing.
        **said: By an ``override``, ``written`` in the configuration, by the ``run``, by what is
            ``launched``.
    """
    every = ((said.get(place, nothing), who) for place, who in _WHO.items())
    return [(value, who) for value, who in every if value is not nothing]


# -- What is said while something is read or settled.


Names = Mapping[str, str]
"""Path of a setting to its name in a file where that is another (accelerate's, a trainer's)."""


def name_of(path: str | None, names: Names) -> str | None:
    """What the file calls the setting at ``path``; ``None``: the same."""
    name, below = path or "", ""
    while name not in names:
        name, dot, last = name.rpartition(".")
        if not dot:
            return None
        below = f".{last}{below}"
    return f"{names[name]}{below}"


@attrs.define(kw_only=True)
class Log:
    """The decisions and the mistakes of one reading or settling, in their order."""

    also_known: frozenset[str] = frozenset()
    """Paths of keys to pass through although neither zerotune nor DeepSpeed knows them."""
    names: dict[str, str] = attrs.field(factory=dict)
    """What the file that is read calls its settings, by path; for what is recorded from now on."""
    decisions: list[Decision] = attrs.field(factory=list)
    mistakes: list[ZeroTuneError] = attrs.field(factory=list)

    def decide(
        self, key: str, before: Any, after: Any, reason: str, severity: Severity = "note"
    ) -> None:
        """Record a decision."""
        written = name_of(key, self.names)
        one = Decision(key=key, before=before, after=after, reason=reason, severity=severity)
        self.decisions.append(attrs.evolve(one, written=written) if written else one)

    def refuse(self, error: ZeroTuneError) -> None:
        """Record a mistake, to go on without what is wrong; raise it where it is one too many."""
        if self._holds(error):
            raise error
        self._keep(error)
        if len(self.mistakes) >= _MOST_MISTAKES:
            raise self.mistakes[-1] from None

    def attempt(self, work: Callable[..., T], *arguments: Any) -> T | None:
        """What ``work`` returns; ``None`` where it makes a mistake, which is recorded."""
        try:
            return work(*arguments)
        except ZeroTuneError as error:
            self.refuse(error)
            return None

    def outcome(self, work: Callable[..., T], *arguments: Any) -> T | None:
        """What ``work`` returns; ``None`` where it ended early. Every mistake is recorded."""
        try:
            return work(*arguments)
        except ZeroTuneError as error:
            if not self._holds(error):
                self._keep(error)
            return None

    def whole(self, work: Callable[..., T], *arguments: Any) -> T:
        """What ``work`` returns; the first of all mistakes is raised, with the others."""
        result = self.outcome(work, *arguments)
        raise_all(self.mistakes)
        return cast("T", result)

    def _holds(self, error: ZeroTuneError) -> bool:
        return any(error is each for each in self.mistakes)

    def _keep(self, error: ZeroTuneError) -> None:
        for each in error.each():
            written = None if each.written else name_of(each.key, self.names)
            self.mistakes.append(each.called(written) if written else each)


def raise_all(mistakes: Sequence[ZeroTuneError]) -> None:
    """Raise ``mistakes``, if there are any, as one error: the first, with the ``others``."""
    if mistakes:
        raise mistakes[0].with_others(mistakes[1:]) from None


def announce(decisions: Iterable[Decision], *, rank: int | None = None) -> None:
    """Log each decision once per process, on rank 0 only.

    Args:
        decisions: What to log; those already announced in this process are left out.
        rank: This process's global rank; read from ``RANK`` when not given.
    """
    if rank is None:
        rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        return
    for decision in decisions:
        identity = (decision.key, shorten(decision.after, _LONGEST_SHOWN), decision.why)
        if identity in _announced:
            continue
        _announced.add(identity)
        level = logging.WARNING if decision.severity == "warning" else logging.INFO
        logger.log(level, "%s", decision)


def render_decisions(decisions: Sequence[Decision]) -> str:
    """Decisions as aligned text lines, warnings first."""
    return "\n".join(f"  [{one.severity}] {one}" for one in worst_first(decisions) if one.is_shown)
