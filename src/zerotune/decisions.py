"""Records of automatic choices, findings and errors about settings, and a log for them.

Readers and resolvers record their decisions in a ``Log``. They also record errors after which they
can continue, so that a user sees all errors at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, cast, get_args

import attrs

from zerotune.errors import Edits, PlanConflictError, ZeroTuneError, both_names, shorten

logger = logging.getLogger("zerotune")

Severity = Literal["error", "warning", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)

T = TypeVar("T")

_LONGEST_SHOWN: Final = 1000
_MOST_MISTAKES: Final = 20
"""Maximum number of errors shown."""

_announced: set[tuple[str, str, str]] = set()


class Rejected(str):
    """Reason of a decision on a value that DeepSpeed rejects and zerotune reads.

    ``plan check`` reports such decisions as errors.
    """

    __slots__ = ()


@attrs.frozen
class Decision:
    """A record about one setting: its old and new values, the reason, and the fix.

    A decision is an automatic choice, a finding of a rule (``zerotune.plan.rules.rule.Finding`` is
    an alias of this class), or an error from a later step.
    """

    key: str
    """Path of the setting in DeepSpeed's spelling (``"zero_optimization.stage"``); empty for the
    whole plan."""
    before: Any
    """The original value; ``None`` if it was not set."""
    after: Any
    """The value that will be used; ``None`` if the setting is removed; equal to ``before`` if the
    value is kept."""
    reason: str
    """The reason, in one sentence."""
    severity: Severity = "note"
    """``"error"``: the plan cannot run; ``"warning"``: probably unintended; ``"note"``: anything
    else."""
    fix: str = attrs.field(default="", kw_only=True)
    """What to write instead; empty if there is nothing to change."""
    edits: tuple[Edits, ...] = attrs.field(default=(), eq=False, repr=False, kw_only=True)
    """Alternative changes that do what ``fix`` says."""
    rule: str = attrs.field(default="", kw_only=True)
    """Id of the rule or step that created the record; empty for a choice."""
    is_default: bool = attrs.field(default=False, eq=False, repr=False, kw_only=True)
    """Whether the value is DeepSpeed's own default, which reports count and do not list."""
    written: str | None = attrs.field(default=None, eq=False, repr=False, kw_only=True)
    """Name of the setting in the user's file if it differs from ``key``."""
    error: ZeroTuneError | None = attrs.field(default=None, eq=False, repr=False, kw_only=True)
    """The error from which the record was created."""

    @classmethod
    def of(cls, error: ZeroTuneError, *, rule: str = "", severity: Severity = "error") -> Decision:
        """Create a record from an error.

        Args:
            error: The error; its ``others`` are ignored.
            rule: The rule or step that raised the error.
            severity: How serious the error is.
        """
        return cls(
            key=error.key or "",
            before=error.value,
            after=error.value,
            reason=error.reason,
            severity=severity,
            fix=error.fix or "",
            edits=error.edits,
            rule=rule,
            written=error.written,
            error=error,
        )

    @property
    def value(self) -> Any:
        """The value that a finding is about (same as ``before``); ``UNSET`` if there is none."""
        return self.before

    @property
    def why(self) -> str:
        """Reason and fix."""
        return f"{self.reason}; {self.fix}" if self.fix else self.reason

    @property
    def is_shown(self) -> bool:
        """Whether reports show the record. Notes about unchanged values are hidden."""
        return self.severity != "note" or self.before != self.after

    @property
    def is_choice(self) -> bool:
        """Whether the record describes a choice rather than a task for the user."""
        return not self.fix and self.error is None

    def as_error(self) -> ZeroTuneError:
        """Return the record as an exception."""
        error = self.error
        if error is None:
            error = PlanConflictError(
                self.reason, self.fix or None, self.key, self.before, edits=self.edits
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
    """Sort ``records`` by severity, errors first."""
    return sorted(records, key=lambda one: SEVERITIES.index(one.severity))


def _readable_value(value: Any) -> str:
    return "unset" if value is None else shorten(value, _LONGEST_SHOWN)


# -- Precedence: the configuration, then the run, the launcher and the default.


WRITTEN, RUN = "the configuration", "the run"
_WHO: Final = {
    "written": WRITTEN,
    "run": RUN,
    "launched": "the launcher's file",
}


def precedence(*, nothing: Any = None, **said: Any) -> list[tuple[Any, str]]:
    """Return the values of one setting with their sources; the first source wins.

    Args:
        nothing: The value that means "not set".
        **said: Values by source: ``written`` (the configuration),
            ``run`` (the training script) and ``launched`` (the launcher's file).
    """
    every = ((said.get(place, nothing), who) for place, who in _WHO.items())
    return [(value, who) for value, who in every if value is not nothing]


# -- Decisions and errors that occur while a plan is read or resolved.


Names = Mapping[str, str]
"""Maps the path of a setting to its name in the user's file (accelerate's or a trainer's) if the
two differ.
"""


def name_of(path: str | None, names: Names) -> str | None:
    """Return the name of the setting in the file, or ``None`` if the name equals ``path``."""
    name, below = path or "", ""
    while name not in names:
        name, dot, last = name.rpartition(".")
        if not dot:
            return None
        below = f".{last}{below}"
    return f"{names[name]}{below}"


@attrs.define(kw_only=True)
class Log:
    """Log of the decisions and errors that occur while one plan is read or resolved."""

    also_known: frozenset[str] = frozenset()
    """Paths of unknown keys to pass through."""
    names: dict[str, str] = attrs.field(factory=dict)
    """Names of settings in the current file, by path; used for records added later."""
    decisions: list[Decision] = attrs.field(factory=list)
    mistakes: list[ZeroTuneError] = attrs.field(factory=list)

    def decide(
        self,
        key: str,
        before: Any,
        after: Any,
        reason: str,
        severity: Severity = "note",
        *,
        is_default: bool = False,
    ) -> None:
        """Record a decision.

        Args:
            key: Path of the setting.
            before: The value as given; ``None`` if it was missing.
            after: The value that will be used; ``None`` if the setting is removed.
            reason: The reason, in one sentence.
            severity: ``"note"``, or ``"warning"`` if the choice is likely unwanted.
            is_default: Whether the value is DeepSpeed's own default.
        """
        self.decisions.append(
            Decision(
                key,
                before,
                after,
                reason,
                severity,
                is_default=is_default,
                written=name_of(key, self.names),
            )
        )

    def warn(self, key: str, reason: str, fix: str) -> None:
        """Record a warning; ``fix`` tells the user what to do.

        Args:
            key: Path of the setting, or name of the file.
            reason: What is wrong.
            fix: What to write instead.
        """
        error = PlanConflictError(reason, fix, key)
        self.decisions.append(Decision.of(error, severity="warning"))

    def refuse(self, error: ZeroTuneError) -> None:
        """Record ``error`` and continue; raise it if too many errors have been recorded.

        Args:
            error: The error.
        """
        if self._holds(error):
            raise error
        self._keep(error)
        if len(self.mistakes) >= _MOST_MISTAKES:
            raise self.mistakes[-1] from None

    def attempt(self, work: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of ``work``; if it raises, record the error and return ``None``.

        Args:
            work: Function to call.
            arguments: Its arguments.
        """
        try:
            return work(*arguments)
        except ZeroTuneError as error:
            self.refuse(error)
            return None

    def outcome(self, work: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of ``work``, or ``None`` if it raises. Every error is recorded.

        Args:
            work: Function to call.
            arguments: Its arguments.
        """
        try:
            return work(*arguments)
        except ZeroTuneError as error:
            if not self._holds(error):
                self._keep(error)
            return None

    def whole(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of ``work``; if errors were recorded, raise them all as one error.

        Args:
            work: Function to call.
            arguments: Its arguments.
        """
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
    """Raise the first of several errors, with the rest as its ``others``."""
    if mistakes:
        raise mistakes[0].with_others(mistakes[1:]) from None


def announce(decisions: Iterable[Decision], *, rank: int | None = None) -> None:
    """Log each decision once per process, on rank 0 only.

    Args:
        decisions: Decisions to log; those already logged in this process are skipped.
        rank: Global rank of this process; by default the environment variable ``RANK``.
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
    """Format decisions as aligned text lines, warnings first."""
    return "\n".join(f"  [{one.severity}] {one}" for one in worst_first(decisions) if one.is_shown)
