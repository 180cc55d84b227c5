"""Types of settings: what a setting may hold, strictly for values and leniently for files.

Every modelled setting has a *kind*, and so has every argument of an optimizer or a schedule
(``zerotune.optim``). ``read`` accepts what people write (``2e8`` for an integer, ``"CPU"`` for a
device) and returns the canonical form with the reason of the change. ``check`` is what an attrs
validator runs: it accepts only what reading keeps.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import attrs

from zerotune._util.text import as_number, is_integer, is_number
from zerotune.decisions import Log, Rejected
from zerotune.errors import InvalidValueError, writes

Auto = Literal["auto"]
AUTO: Final[Auto] = "auto"
"""Placeholder for a value that ``resolve`` chooses."""

LARGEST_INTEGER = 2**63 - 1

TEXT: Final[frozenset[type]] = frozenset((str,))
NULL: Final[frozenset[type]] = frozenset((type(None),))

Reading = tuple[Any, "str | None"]
"""The canonical value, and why it differs from the written value (``None`` if it does not)."""


def is_auto(value: object) -> bool:
    """Whether ``value`` requests an automatic choice."""
    return isinstance(value, str) and value.strip().lower() == AUTO


@attrs.frozen(kw_only=True)
class Kind:
    """Type of a setting: converts written values to canonical form, which reading keeps."""

    auto: bool = False
    """Whether ``"auto"``, which leaves the value to zerotune, is a value."""
    null: str | None = None
    """Value that ``null`` stands for; if ``None``, ``null`` leaves the key unset."""
    rejected: frozenset[type] = frozenset()
    """Types of written values that DeepSpeed rejects and ``read_into`` accepts."""

    why: ClassVar[str] = "is not an allowed value"
    """What is wrong with a value of another kind."""

    @property
    def words(self) -> str:
        """The allowed values in words, as in "a number of at least 0 and less than 1"."""
        return ""

    @property
    def suggestions(self) -> tuple[Any, ...]:
        """Values to offer instead of an invalid one."""
        return ()

    def read(self, value: Any, key: str) -> Reading:
        """Convert a written value to canonical form, or raise ``InvalidValueError``.

        Args:
            value: Value as written in the configuration.
            key: Path of the setting, for messages.
        """
        if self.auto and is_auto(value):
            return AUTO, None if value == AUTO else "written as DeepSpeed spells it"
        return self._read(value, key)

    def check(self, value: Any, key: str) -> None:
        """Raise ``InvalidValueError`` unless ``value`` is in canonical form.

        Args:
            value: Value of the setting.
            key: Path of the setting, for messages.
        """
        if self.read(value, key) != (value, None):
            raise self._refused(value, key)

    def read_into(self, log: Log, value: Any, key: str) -> Any:
        """Convert ``value`` as ``read`` does, and log a decision if the result differs.

        Args:
            log: Log that receives decisions.
            value: Value as written in the configuration.
            key: Path of the setting.
        """
        unset = value is None and self.null is None
        result, reason = (None, "null is read as an unset key") if unset else self.read(value, key)
        if reason is not None:
            if type(value) in self.rejected and result != AUTO:
                reason = Rejected(f"{reason}; DeepSpeed rejects {'null' if unset else 'text'} here")
            log.decide(key, "null" if unset else value, result, reason)
        return result

    def _read(self, value: Any, key: str) -> Reading:
        raise NotImplementedError

    def _refused(self, value: Any, key: str, why: str = "", fix: str = "") -> InvalidValueError:
        fix = fix or f"write {self.words}" + (f', or "{AUTO}"' if self.auto else "")
        edits = writes(*self.suggestions, *([AUTO] if self.auto else []))
        return InvalidValueError(why or self.why, fix, key, value, edits=edits)


@attrs.frozen(kw_only=True)
class Number(Kind):
    """A finite real number."""

    auto: bool = True
    minimum: float = 0.0
    maximum: float = math.inf
    above: float | None = None
    """Exclusive lower bound."""
    below: float | None = None
    """Exclusive upper bound."""
    remark: str = ""
    """Explanation of a value with a special meaning."""

    why: ClassVar[str] = "must be a finite number"
    noun: ClassVar[str] = "a number"

    @property
    def suggestions(self) -> tuple[Any, ...]:
        """The bounds; a negative bound has a special meaning."""
        bounds = (self.minimum if self.above is None else -1, self.maximum)
        return tuple(
            int(each) if each == int(each) else each
            for each in bounds
            if 0 <= each < LARGEST_INTEGER
        )

    @property
    def words(self) -> str:
        """The allowed values in words, as in "a number of at least 0 and less than 1"."""
        remark = f" ({self.remark})" if self.remark else ""
        return f"{self.noun}{self.bounds}{remark}"

    @property
    def bounds(self) -> str:
        """The bounds in words, as in " of at least 0 and less than 1"; empty without bounds."""
        low = ("at least", self.minimum) if self.above is None else ("more than", self.above)
        high = ("at most", self.maximum) if self.below is None else ("less than", self.below)
        ends = [f"{word} {end:.15g}" for word, end in (low, high) if abs(end) < LARGEST_INTEGER]
        return f" of {' and '.join(ends)}" if ends else ""

    def _read(self, value: Any, key: str) -> Reading:
        number, reason = self._number(value, key)
        above = -math.inf if self.above is None else self.above
        below = math.inf if self.below is None else self.below
        if not (self.minimum <= number <= self.maximum and above < number < below):
            raise self._refused(number, key, "is out of range")
        return number, reason

    def _number(self, value: Any, key: str) -> Reading:
        number = as_number(value)
        if number is None:
            raise self._refused(value, key)
        return number, "a number written as text" if isinstance(value, str) else None


@attrs.frozen(kw_only=True)
class Real(Number):
    """A number that is always read as a ``float``."""

    def _read(self, value: Any, key: str) -> Reading:
        number, reason = Number._read(self, value, key)
        return float(number), reason


@attrs.frozen(kw_only=True)
class Integer(Number):
    """A whole number in a range."""

    minimum: int = 0
    maximum: int = LARGEST_INTEGER

    why: ClassVar[str] = "must be a whole number"
    noun: ClassVar[str] = "an integer"

    def _number(self, value: Any, key: str) -> Reading:
        number, reason = Number._number(self, value, key)
        if isinstance(number, float) and number.is_integer():
            why = "DeepSpeed wants a whole number here"
            # DeepSpeed reads 5e8 and "500000000", but not "5e8".
            rejected = isinstance(value, str) and "e" in value.lower()
            return int(number), Rejected(why) if rejected else why
        if not is_integer(number):
            raise self._refused(value, key)
        return number, reason


@attrs.frozen(kw_only=True)
class Numbers(Kind):
    """A fixed-length tuple of numbers."""

    each: Number
    length: int

    @property
    def words(self) -> str:
        """The allowed values in words."""
        return f"{self.length} numbers{self.each.bounds}"

    def _read(self, value: Any, key: str) -> Reading:
        right = not isinstance(value, str) and isinstance(value, Sequence)
        try:
            items = tuple(self.each.read(item, key)[0] for item in value) if right else ()
        except InvalidValueError:
            items = ()
        if len(items) != self.length:
            raise self._refused(value, key, f"must be {self.words}")
        return items, None


_TRUTHS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@attrs.frozen(kw_only=True)
class Boolean(Kind):
    """``true`` or ``false``."""

    auto: bool = True
    spellings: Mapping[str, bool] = _TRUTHS
    """Other spellings of booleans, and the value of each."""

    why: ClassVar[str] = "must be true or false"

    words = "true or false, without quotes"
    suggestions = (True, False)

    def _read(self, value: Any, key: str) -> Reading:
        if isinstance(value, bool):
            return value, None
        word = str(value).strip().lower() if isinstance(value, str) or value in (0, 1) else ""
        if word not in self.spellings:
            raise self._refused(value, key)
        return self.spellings[word], "a different spelling of true or false"


@attrs.frozen(kw_only=True)
class Choice(Kind):
    """One word from a fixed list."""

    choices: tuple[str, ...]
    synonyms: Mapping[str, str] = attrs.field(factory=dict)
    """Choice that each synonym stands for; synonyms are in lower case."""
    respelt: str = "a different spelling"
    """Reason to report if the value is not spelt like the choice."""
    unoffered: tuple[str, ...] = ()
    """Choices that are never suggested: they can be read, but are rejected later."""

    @property
    def words(self) -> str:
        """The choices, unless they are to be suggested never."""
        return f"one of {', '.join(repr(one) for one in self.choices if one not in self.unoffered)}"

    @property
    def suggestions(self) -> tuple[Any, ...]:
        """The choices, if they are few; only the user can choose among more."""
        offered = tuple(choice for choice in self.choices if choice not in self.unoffered)
        return offered if len(offered) <= _MOST_SUGGESTED else ()

    def _read(self, value: Any, key: str) -> Reading:
        if value is None and self.null is not None:
            return self.null, Rejected(f"null means {self.null!r} here; DeepSpeed rejects null")
        word = value.strip().lower() if isinstance(value, str) else value
        if isinstance(value, bool):  # YAML reads the word `no` as false
            word = "yes" if value else "no"
        word = self.synonyms.get(word, word) if isinstance(word, str) else word
        if not isinstance(word, str) or word not in self.choices:
            raise self._refused(word, key)
        return word, None if word == value else self.respelt


_MOST_SUGGESTED: Final = 4
"""Maximum number of choices that edits offer."""


@attrs.frozen(kw_only=True)
class Text(Kind):
    """A word or a name."""

    empty: bool = False

    why: ClassVar[str] = "must be text"

    def _read(self, value: Any, key: str) -> Reading:
        if not isinstance(value, str):
            raise self._refused(value, key, fix="write a string")
        if not self.empty and not value.strip():
            raise self._refused(value, key, "is empty", "write a name")
        check_letters(value, key)
        text = value.strip()
        return text, None if text == value else "surrounding blanks are removed"


@attrs.frozen(kw_only=True)
class Folder(Kind):
    """A path on this machine; ``"auto"`` leaves the choice to ``zerotune.offload``."""

    why: ClassVar[str] = "must be the path of a folder"

    words = "a path, or omit the key to let zerotune choose the folder"

    def _read(self, value: Any, key: str) -> Reading:
        if isinstance(value, os.PathLike):
            return str(os.fspath(value)), None
        if not isinstance(value, str):
            raise self._refused(value, key)
        if value.strip().lower() in {"", "none", "null"}:
            return None, "no folder given; zerotune will choose one"
        if _IN_A_PATH.search(value):
            raise self._refused(value, key, "is a template placeholder without a value")
        check_letters(value, key)
        return value, None


@attrs.frozen(kw_only=True)
class Free(Kind):
    """A JSON object whose keys zerotune does not check."""

    why: ClassVar[str] = "must be an object"

    words = '{"name": value, …}'

    def _read(self, value: Any, key: str) -> Reading:
        if not isinstance(value, Mapping):
            raise self._refused(value, key)
        check_json(value, key)
        return dict(value), None


@attrs.frozen
class Anything(Kind):
    """Any value, passed on unchanged."""

    def _read(self, value: Any, key: str) -> Reading:  # noqa: ARG002
        return value, None


def check_json(value: Any, key: str) -> None:
    """Raise ``InvalidValueError`` unless ``value`` survives a round trip through JSON."""
    left = [_MOST_VALUES]
    _check_json(value, key, (), left)


def _check_json(value: Any, key: str, path: tuple[str | int, ...], left: list[int]) -> None:
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        _check_scalar(value, _place_of(key, path))
        return
    if len(path) > _DEEPEST_NESTING:
        raise InvalidValueError(
            "is nested too deeply", f"use at most {_DEEPEST_NESTING} levels", _place_of(key, path)
        )
    left[0] -= len(value)
    if left[0] < 0:
        raise InvalidValueError(
            "contains too many values for a configuration", "shorten the configuration", key
        )
    mapping = isinstance(value, Mapping)
    for name, item in items:
        if mapping:
            if not isinstance(name, str):
                raise InvalidValueError(
                    "has a key that is not text", "put it in quotes", _place_of(key, path), name
                )
            if not name.isascii():
                check_letters(name, _place_of(key, path))
        if not _is_json_scalar(item):
            _check_json(item, key, (*path, name), left)


def _is_json_scalar(value: Any) -> bool:
    """Whether ``value`` is a scalar that JSON can represent; fast for long lists."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii())
    if kind is float:
        return math.isfinite(value)
    if kind is int:
        return bool(-LARGEST_INTEGER <= value <= LARGEST_INTEGER)
    return kind is bool or value is None


def copied(value: Any) -> Any:
    """Return a deep copy of a JSON value."""
    if type(value) is list:
        return [each if type(each) in _SCALARS else copied(each) for each in value]
    if isinstance(value, dict):
        return {
            name: each if type(each) in _SCALARS else copied(each) for name, each in value.items()
        }
    return value if type(value) in _SCALARS else copy.deepcopy(value)


def check_letters(text: str, key: str) -> None:
    """Raise ``InvalidValueError`` if ``text`` contains an unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValueError(
            "contains an unpaired surrogate (\\ud800-\\udfff), which is not valid Unicode",
            "write the character itself",
            key,
            text,
        ) from None


def _check_scalar(value: Any, key: str) -> None:
    if isinstance(value, str):
        check_letters(value, key)
    elif value is not None and not isinstance(value, bool) and not is_number(value):
        raise InvalidValueError(
            "cannot be written as JSON",
            "use only objects, lists, text, finite numbers, true, false and null",
            key,
            value,
        )


def _place_of(key: str, path: tuple[str | int, ...]) -> str:
    return key + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_MOST_VALUES: Final = 2**22
"""Values in 10 MB of JSON. Only nested YAML references expand to more."""
_DEEPEST_NESTING = 50


def as_tuple(values: Iterable[Any]) -> tuple[Any, ...]:
    """Convert the values of a field to a tuple."""
    return tuple(values)


_IN_A_PATH: Final = re.compile(r"\{\{|\$\{|\$[A-Za-z_]|%[A-Za-z_]\w*%|<[A-Za-z_][^<>/]*>")
"""No shell expands variables in a path: a folder with that literal name would be created."""
