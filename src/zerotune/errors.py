"""All errors that zerotune raises, in one class hierarchy.

::

    ZeroTuneError
    ├── PlanError (ValueError)
    │   ├── PlanFileError            a plan file is missing or cannot be read
    │   ├── PlanSyntaxError          a plan file is not valid JSON or YAML
    │   ├── UnknownKeyError          an unknown key; similar names are suggested
    │   ├── InvalidValueError        a value of the wrong type or out of range
    │   ├── PlanConflictError        values that contradict each other
    │   ├── UnresolvedPlanError      a value is still "auto"
    │   └── NothingFitsError         no plan fits the available memory
    ├── OptimizerError (ValueError)  an optimizer or scheduler that cannot run
    ├── PlatformError (RuntimeError)
    ├── EngineError (RuntimeError)
    │   ├── StepOrderError           a call that must not come now; names the next legal call
    │   ├── VerificationError        the running engine differs from the plan
    │   ├── UnsupportedEngineError   DeepSpeed lacks a required attribute
    │   └── CollectiveError          a rank is missing or disagrees
    ├── TrainingError (RuntimeError) training cannot continue
    ├── OutOfMemoryError (RuntimeError)  memory ran out; suggests a plan that fits
    ├── OffloadError (RuntimeError)
    ├── EMAError (RuntimeError)
    ├── DataError (ValueError)
    ├── CheckpointError (RuntimeError)
    │   ├── CheckpointCorruptError   a file is missing, truncated or altered
    │   ├── CheckpointNotFiniteError the checkpoint would contain NaN or infinity
    │   └── CheckpointMismatchError  wrong model, or a missing part
    └── MissingDependencyError (ImportError)

Every message reads ``key = value: reason. Fix: what to do``; these parts are also attributes of the
error. All mistakes in one input are reported together, one per line. The first of these errors is
raised, and its ``others`` contain the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self


class _Unset:
    """Marks a value that was not given, where ``None`` is a value."""

    def __repr__(self) -> str:
        return "<unset>"


UNSET: Final = _Unset()

Edits = Mapping[str, Any]
"""Changes that together mend a plan: new values by the path of the setting. ``UNSET`` removes a
setting, and an empty path means the setting at fault."""
REMOVAL: Final[Edits] = {"": UNSET}
"""Edits that remove the setting at fault."""


def writes(*values: Any) -> tuple[Edits, ...]:
    """Return the alternatives to write each of ``values`` for the setting at fault."""
    return tuple({"": value} for value in values)


def fix_of(alternatives: Iterable[Edits]) -> str:
    """Return a sentence that says what to write instead, such as ``write 0 or "auto"``."""

    def is_value(edits: Edits) -> bool:
        return edits.keys() == {""} and edits[""] is not UNSET

    def command(path: str, value: Any) -> str:
        if value is UNSET:
            return f"remove {path or 'this key'}"
        shown = json.dumps(value)
        return f"set {path} to {shown}" if path else f"write {shown}"

    sentences: list[str] = []
    for plain, group in groupby(alternatives, key=is_value):
        if plain:
            *others, last = (json.dumps(each[""]) for each in group)
            sentences.append(f"write {', '.join(others)}{' or ' if others else ''}{last}")
        else:
            sentences += [" and ".join(map(command, each, each.values())) for each in group]
    return ", or ".join(sentences)


_LONGEST_VALUE = 120
_LONGEST_NAME = 300
_LONGEST_SENTENCE = 2_000
_DEEPEST_SHOWN = 50
_LARGEST_WRITTEN_OUT = 12_000
"""Bit length above which an integer is shortened to its leading hexadecimal digits."""


def shorten(value: object, longest: int = _LONGEST_VALUE) -> str:
    """Return the ``repr`` of ``value``, truncated so that a message stays readable."""
    text = ""
    for piece in _pieces(value, longest):
        text += piece
        if len(text) > longest:
            return f"{text[: longest - 1]}…"
    return text


def _pieces(value: object, longest: int, depth: int = 0) -> Iterator[str]:
    if depth > _DEEPEST_SHOWN:
        yield "…"
    elif isinstance(value, dict) and type(value).__repr__ is dict.__repr__:
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _pieces(key, longest, depth + 1)
            yield ": "
            yield from _pieces(item, longest, depth + 1)
        yield "}"
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        opening, closing = "[]" if isinstance(value, list) else "()"
        yield opening
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(item, longest, depth + 1)
        yield f",{closing}" if opening == "(" and len(value) == 1 else closing
    elif isinstance(value, str | bytes) and len(value) > longest:
        yield repr(value[: longest + 1])
    elif isinstance(value, int) and value.bit_length() > _LARGEST_WRITTEN_OUT:
        # Python itself refuses to write more than 4300 digits.
        yield f"{'-' if value < 0 else ''}0x{abs(value) >> (value.bit_length() - 64):x}…"
    else:
        yield repr(value)


def readable(name: str) -> str:
    """Return a key or path for messages; escape control characters, and truncate long names."""
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 1]}…"
    if name.isprintable():
        return name
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in name)


def both_names(key: str, written: str | None) -> tuple[str, str]:
    """Return a setting's name in the user's file, and the setting's path if it differs."""
    if written is None:
        return readable(key), ""
    # A command's option has a hyphen for each underscore of the key.
    bare = written[2:].replace("-", "_") if written.startswith("--") else written.lstrip("-")
    # Other names begin with a file and its line, or with an option.
    alike = f".{bare.rpartition(' ')[2]}".endswith(f".{key.removeprefix('launch.')}")
    return readable(written), "" if alike else f" ({readable(key)})"


def _cut(sentence: str) -> str:
    whole = len(sentence) <= _LONGEST_SENTENCE
    return sentence if whole else f"{sentence[: _LONGEST_SENTENCE - 1]}…"


_ErrorT = TypeVar("_ErrorT", bound="ZeroTuneError")


class ZeroTuneError(Exception):
    """Base of every error raised by zerotune.

    Attributes:
        key: Path of the offending setting (``"zero_optimization.stage"``), or ``None``.
        written: Name of the setting in the user's file if it differs from ``key``; messages show
            both.
        value: The offending value; ``UNSET`` if there is none.
        reason: What is wrong.
        fix: What to write or do instead, or ``None``.
        others: Other errors found in the same input.
        rank: Rank on which the error occurred; ``None`` if it occurred in this process.
        edits: Alternative changes that mend the plan; the default of ``fix`` says them.
        shell_fix: What to do on a command line, if ``fix`` is only possible in Python.
    """

    shell_fix: str | None = None
    written: str | None = None
    edits: tuple[Edits, ...] = ()
    others: tuple[ZeroTuneError, ...] = ()
    rank: int | None = None

    def __init__(
        self,
        reason: str,
        fix: str | None = None,
        key: str | None = None,
        value: Any = UNSET,
        *,
        edits: Iterable[Edits] = (),
        shell_fix: str | None = None,
    ) -> None:
        self.key = key
        self.value = value
        self.reason = reason
        self.edits = tuple(edits)
        self.fix = fix_of(self.edits) if fix is None and self.edits else fix
        if shell_fix is not None:
            self.shell_fix = shell_fix
        super().__init__(self._message())

    def each(self) -> tuple[ZeroTuneError, ...]:
        """Yield this error without its ``others``, then each error in ``others``."""
        return (self.with_others(()), *self.others) if self.others else (self,)

    def with_others(self, others: Iterable[ZeroTuneError]) -> Self:
        """Return a copy of this error with the given ``others``."""
        state = {**self.__dict__, "others": tuple(others)}
        return _rebuild(type(self), state) if state["others"] or self.others else self

    def called(self, written: str) -> Self:
        """Return a copy of this error with ``written``, the setting's name in the user's file."""
        return _rebuild(type(self), {**self.__dict__, "written": written})

    def in_shell(self) -> Self:
        """Return a copy of this error that names command-line options, not Python arguments."""
        if self.shell_fix is None:
            return self
        return _rebuild(type(self), {**self.__dict__, "fix": self.shell_fix})

    def below(self, section: str) -> Self:
        """Return a copy of this error with ``section`` prepended to its key."""
        if not section or self.key is None:
            return self
        return _rebuild(type(self), {**self.__dict__, "key": f"{section}.{self.key}"})

    def passed_on(self, rank: int) -> Self:
        """Return a copy of this error for the other processes to raise.

        Args:
            rank: Rank on which the error occurred.
        """
        reason = f"rank {rank} reports: {self.reason}"
        return _rebuild(type(self), {**self.__dict__, "rank": rank, "reason": reason})

    def _message(self) -> str:
        return "\n".join([self._sentences(), *map(str, self.others)])

    def _sentences(self) -> str:
        key = self.key if isinstance(self.key, str) else ""
        subject, path = both_names(key, self.written)
        if not isinstance(self.value, _Unset):
            subject = f"{subject} = {shorten(self.value)}" if subject else shorten(self.value)
        subject += path
        sentence = _cut(self.reason).rstrip(".") + "."
        text = f"{subject}: {sentence}" if subject else sentence
        if not self.fix:
            return text
        fix = _cut(self.fix).rstrip(".")
        return f"{text} Fix: {fix}" if fix.endswith("?") else f"{text} Fix: {fix}."

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process boundaries in launchers; the default protocol would call
        # __init__ with the finished message and lose the parts.
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(cls: type[_ErrorT], state: dict[str, Any]) -> _ErrorT:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    error.args = (error._message(),)
    return error


class PlanError(ZeroTuneError, ValueError):
    """A plan that cannot be read, understood or run."""


class PlanFileError(PlanError):
    """A plan file is missing or cannot be read."""


class PlanSyntaxError(PlanError):
    """A plan file is not valid JSON or YAML.

    Attributes:
        source: Name of the file or ``"<string>"``.
        line: 1-based line of the error.
        column: 1-based column of the error.
    """

    def __init__(
        self,
        reason: str,
        *,
        source: str,
        line: int,
        column: int,
        fix: str | None = None,
    ) -> None:
        self.source = source
        self.line = line
        self.column = column
        super().__init__(
            f"{reason.rstrip('.')} (line {line}, column {column})", key=source, fix=fix
        )


class UnknownKeyError(PlanError):
    """A key unknown to zerotune and DeepSpeed."""


class InvalidValueError(PlanError):
    """A value of the wrong type or outside its range."""


class PlanConflictError(PlanError):
    """Values that are valid alone but contradict each other."""


class UnresolvedPlanError(PlanError):
    """A value is still ``"auto"`` but must be resolved."""


class NothingFitsError(PlanError):
    """No plan fits the available memory.

    Attributes:
        nearest: The candidate that exceeds the limits least (a ``Candidate`` of
            ``zerotune.plan.candidates``).
        remedies: Settings to change so that the model fits or needs less memory
            (``zerotune.plan.remedies.Remedy``).
        more: Description of the additional memory that would suffice.
    """

    def __init__(
        self,
        reason: str,
        *,
        nearest: Any,
        remedies: tuple[Any, ...],
        key: str,
        value: Any,
        fix: str,
    ) -> None:
        self.nearest = nearest
        self.remedies = remedies
        self.more = fix
        super().__init__(
            reason,
            key=key,
            value=value,
            fix="; ".join([fix, *(each.in_python() for each in remedies)]),
            shell_fix="; ".join([fix, *(each.in_shell() for each in remedies)]),
        )


class OptimizerError(ZeroTuneError, ValueError):
    """An optimizer or scheduler that is unknown or cannot run on this machine."""


class PlatformError(ZeroTuneError, RuntimeError):
    """This machine does not support the request."""


class EngineError(ZeroTuneError, RuntimeError):
    """The training engine cannot be started or used."""


class StepOrderError(EngineError):
    """An engine's method was called out of order; ``fix`` names the next legal call."""


class VerificationError(EngineError):
    """The running engine differs from the resolved plan."""


class UnsupportedEngineError(EngineError):
    """The installed DeepSpeed lacks an attribute that zerotune needs."""


class CollectiveError(EngineError):
    """A rank is missing from a collective operation or disagrees with the others."""


class TrainingError(ZeroTuneError, RuntimeError):
    """Training cannot continue: the loss is not finite, or the loop contradicts the plan."""


class OutOfMemoryError(ZeroTuneError, RuntimeError):
    """Memory ran out during startup or training.

    Attributes:
        original: Exception raised by torch or Python.
        plan: A ``DeepSpeedPlan`` that fits; ``None`` if no plan fits or the model is unknown.
    """

    def __init__(
        self, reason: str, *, key: str, fix: str, original: BaseException, plan: Any
    ) -> None:
        super().__init__(reason, key=key, fix=fix)
        self.original = original
        self.plan = plan


class OffloadError(ZeroTuneError, RuntimeError):
    """A swap folder cannot be leased, used or cleaned."""


class EMAError(ZeroTuneError, RuntimeError):
    """An EMA shadow is empty, is detached, or belongs to a different model."""


class DataError(ZeroTuneError, ValueError):
    """Training data cannot be read or do not fit the model."""


class CheckpointError(ZeroTuneError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint file is missing, truncated or altered."""


class CheckpointNotFiniteError(CheckpointError):
    """The checkpoint would contain NaN or infinity."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint belongs to a different model, or lacks a requested part."""


class MissingDependencyError(ZeroTuneError, ImportError):
    """An optional package is required but not installed."""
