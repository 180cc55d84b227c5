"""Types of settings: what a setting may hold, strictly for values and leniently for files.

Every modelled setting has a *kind*, and so has every argument of an optimizer or a schedule
(``zerotune.optim``). ``check`` is what an attrs validator runs: it accepts only the canonical form.
``read`` accepts what people write (``2e8`` for an integer, ``"CPU"`` for a device) and returns the
canonical form with the reason of the change.
"""

from __future__ import annotations

import copy
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from zerotune._util.text import as_number, is_integer, is_number
from zerotune.decisions import Log
from zerotune.errors import InvalidValueError, writes

Auto = Literal["auto"]
AUTO: Final[Auto] = "auto"
"""Placeholder for a value that ``resolve`` chooses."""

LARGEST_INTEGER = 2**63 - 1

Reading = tuple[Any, "str | None"]
"""The canonical value, and why it differs from the written value (``None`` if it does not)."""


class Kind(ABC):
    """Type of a setting: checks values, and converts written values to canonical form."""

    __slots__ = ()

    @property
    def suggestions(self) -> tuple[Any, ...]:
        """Values to offer instead of an invalid one."""
        return ()

    @abstractmethod
    def check(self, value: Any, key: str) -> None:
        """Raise ``InvalidValueError`` unless ``value`` is in canonical form.

        Args:
            value: Value of the setting.
            key: Path of the setting, for messages.
        """

    @abstractmethod
    def read(self, value: Any, key: str) -> Reading:
        """Convert a written value to canonical form.

        Args:
            value: Value as written in the configuration.
            key: Path of the setting, for messages.
        """

    def read_into(self, log: Log, value: Any, key: str) -> Any:
        """Convert ``value`` as ``read`` does, and log a decision if the result differs.

        Args:
            log: Log that receives decisions.
            value: Value as written in the configuration.
            key: Path of the setting.
        """
        refuse_template(self, value, key)
        if value is None and getattr(self, "null", None) is None:
            log.decide(key=key, before="null", after=None, reason="null is read as an unset key")
            return None
        result, reason = self.read(value, key)
        if reason is not None:
            log.decide(key=key, before=value, after=result, reason=reason)
        return result


def is_auto(value: object) -> bool:
    """Whether ``value`` requests an automatic choice."""
    return isinstance(value, str) and value.strip().lower() == AUTO


@attrs.frozen(kw_only=True)
class _OrAuto(Kind):
    """A kind that may accept ``"auto"``, which leaves the value to zerotune."""

    auto: bool = True
    """Whether ``"auto"`` is a value."""

    def _read_auto(self, value: Any) -> Reading | None:
        if not self.auto or not is_auto(value):
            return None
        return AUTO, None if value == AUTO else "written as DeepSpeed spells it"

    def _refused(self, why: str, key: str, value: Any, words: str) -> InvalidValueError:
        fix = f'write {words}, or "{AUTO}"' if self.auto else f"write {words}"
        edits = writes(*self.suggestions, *([AUTO] if self.auto else []))
        return InvalidValueError(why, key=key, value=value, fix=fix, edits=edits)


@attrs.frozen(kw_only=True)
class Number(_OrAuto):
    """A finite real number, or ``"auto"``."""

    minimum: float = 0.0
    maximum: float = math.inf
    above: float | None = None
    """Exclusive lower bound."""
    below: float | None = None
    """Exclusive upper bound."""
    remark: str = ""
    """Explanation of a value with a special meaning."""

    def check(self, value: Any, key: str) -> None:
        """Accept a finite number in range, or ``"auto"`` if the setting allows it."""
        if self.auto and value == AUTO:
            return
        if not is_number(value):
            raise self._refused("must be a finite number", key, value, self.words)
        self._check_range(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Accept numbers in strings."""
        automatic = self._read_auto(value)
        if automatic is not None:
            return automatic
        number = as_number(value)
        self.check(value if number is None else number, key)
        return number, "a number written as text" if isinstance(value, str) else None

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
        return f"a number{self._bounds()}{remark}"

    def _check_range(self, value: float, key: str) -> None:
        if (
            not self.minimum <= value <= self.maximum
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        ):
            raise self._refused("is out of range", key, value, self.words)

    def _bounds(self) -> str:
        low = _bound("more than", self.above) or _bound("at least", self.minimum)
        high = _bound("less than", self.below) or _bound("at most", self.maximum)
        text = " and ".join(bound for bound in (low, high) if bound)
        return f" of {text}" if text else ""


def _bound(words: str, bound: float | None) -> str:
    if bound is None or abs(bound) >= LARGEST_INTEGER:
        return ""
    return f"{words} {bound:.15g}"


@attrs.frozen(kw_only=True)
class Real(Number):
    """A number that is always read as a ``float``."""

    def read(self, value: Any, key: str) -> Reading:
        """Accept whole numbers and numbers in strings."""
        number, reason = Number.read(self, value, key)
        return number if number == AUTO else float(number), reason


@attrs.frozen(kw_only=True)
class Integer(Number):
    """A whole number in a range, or ``"auto"``."""

    minimum: int = 0
    maximum: int = LARGEST_INTEGER

    def check(self, value: Any, key: str) -> None:
        """Accept an ``int`` in range, or ``"auto"`` if the setting allows it."""
        if self.auto and value == AUTO:
            return
        if not is_integer(value):
            raise self._refused("must be a whole number", key, value, self.words)
        self._check_range(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Accept integral floats and numbers in strings; refuse fractions."""
        automatic = self._read_auto(value)
        if automatic is not None:
            return automatic
        number = as_number(value)
        reason = "a number written as text" if isinstance(value, str) else None
        if isinstance(number, float) and number.is_integer():
            number, reason = int(number), "DeepSpeed wants a whole number here"
        self.check(number if is_integer(number) else value, key)
        return number, reason

    @property
    def words(self) -> str:
        """The allowed values in words, as in "an integer of at least 1"."""
        return f"an integer{self._bounds()}"


@attrs.frozen(kw_only=True)
class Numbers(Kind):
    """A fixed-length tuple of numbers."""

    each: Number
    length: int

    def check(self, value: Any, key: str) -> None:
        """Accept a tuple of valid numbers if its length is right."""
        if not isinstance(value, tuple) or self._elements(value, key) != value:
            raise self._refused(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Accept any sequence of readable numbers if its length is right."""
        return self._elements(value, key), None

    def _elements(self, value: Any, key: str) -> tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != self.length:
            raise self._refused(value, key)
        try:
            return tuple(self.each.read(item, key)[0] for item in value)
        except InvalidValueError as error:
            raise self._refused(value, key) from error

    def _refused(self, value: Any, key: str) -> InvalidValueError:
        words = f"{self.length} numbers{self.each._bounds()}"
        return InvalidValueError(f"must be {words}", key=key, value=value, fix=f"write {words}")


_WORDS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@attrs.frozen(kw_only=True)
class Boolean(_OrAuto):
    """``true``, ``false`` or ``"auto"``."""

    words: Mapping[str, bool] = _WORDS
    """Other spellings of booleans, and the value of each."""

    @property
    def suggestions(self) -> tuple[Any, ...]:
        """Both values."""
        return True, False

    def check(self, value: Any, key: str) -> None:
        """Accept a ``bool``, or ``"auto"`` if the setting allows it."""
        if isinstance(value, bool) or (self.auto and value == AUTO):
            return
        raise self._refused(
            "must be true or false",
            key,
            value,
            "true or false, without quotes",
        )

    def read(self, value: Any, key: str) -> Reading:
        """Accept other spellings, such as ``"yes"``, ``"off"`` or ``1``."""
        if isinstance(value, bool):
            return value, None
        automatic = self._read_auto(value)
        if automatic is not None:
            return automatic
        word = str(value).strip().lower() if isinstance(value, str) or value in (0, 1) else ""
        if word in self.words:
            return self.words[word], "a different spelling of true or false"
        raise self._refused(
            "must be true or false",
            key,
            value,
            "true or false, without quotes",
        )


@attrs.frozen(kw_only=True)
class Choice(Kind):
    """One word from a fixed list."""

    choices: tuple[str, ...]
    synonyms: Mapping[str, str] = attrs.field(factory=dict)
    """Choice that each synonym stands for; synonyms are in lower case."""
    respelt: str = "a different spelling"
    """Reason to report if the value is not spelt like the choice."""
    null: str | None = None
    """Choice that ``null`` stands for; if ``None``, ``null`` leaves the key unset."""
    unoffered: tuple[str, ...] = ()
    """Choices that are never suggested: they can be read, but are rejected later."""

    @property
    def suggestions(self) -> tuple[Any, ...]:
        """The choices, unless they are to be suggested never."""
        return tuple(choice for choice in self.choices if choice not in self.unoffered)

    def check(self, value: Any, key: str) -> None:
        """Accept a choice in its exact spelling."""
        if not isinstance(value, str) or value not in self.choices:
            offered = self.suggestions
            fix = f"write one of {', '.join(map(repr, offered))}"
            edits = writes(*offered) if len(offered) <= _MOST_SUGGESTED else ()
            raise InvalidValueError(
                "is not an allowed value", key=key, value=value, fix=fix, edits=edits
            )

    def read(self, value: Any, key: str) -> Reading:
        """Accept upper and lower case, and synonyms."""
        if value is None and self.null is not None:
            return self.null, f"null means {self.null!r} here"
        word = value.strip().lower() if isinstance(value, str) else value
        if isinstance(value, bool):  # YAML reads the word `no` as false
            word = "yes" if value else "no"
        if isinstance(word, str):
            word = self.synonyms.get(word, word)
        self.check(word, key)
        return word, None if word == value else self.respelt


_MOST_SUGGESTED: Final = 4
"""Maximum number of choices that edits offer; only the user can choose among more."""


@attrs.frozen(kw_only=True)
class Text(Kind):
    """A word or a name."""

    empty: bool = False

    def check(self, value: Any, key: str) -> None:
        """Accept a string; accept an empty string only if ``empty`` is set."""
        if not isinstance(value, str):
            raise InvalidValueError("must be text", key=key, value=value, fix="write a string")
        if not self.empty and not value.strip():
            raise InvalidValueError("is empty", key=key, value=value, fix="write a name")
        check_letters(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Strip surrounding blanks."""
        self.check(value, key)
        text = value.strip()
        return text, None if text == value else "surrounding blanks are removed"


@attrs.frozen(kw_only=True)
class Folder(Kind):
    """A path on this machine; ``"auto"`` leaves the choice to ``zerotune.offload``."""

    def check(self, value: Any, key: str) -> None:
        """Accept a non-empty string."""
        if not isinstance(value, str) or not value.strip():
            raise InvalidValueError(
                "must be the path of a folder",
                key=key,
                value=value,
                fix="write a path, or omit the key to let zerotune choose the folder",
            )
        check_letters(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Accept path objects; read an empty path or ``"none"`` as an unset key."""
        if isinstance(value, os.PathLike):
            return str(os.fspath(value)), None
        if isinstance(value, str) and value.strip().lower() in {"", "none", "null"}:
            return None, "no folder given; zerotune will choose one"
        self.check(value, key)
        return value, None


@attrs.frozen(kw_only=True)
class Free(Kind):
    """A JSON object whose keys zerotune does not check."""

    def check(self, value: Any, key: str) -> None:
        """Accept a mapping that JSON can represent."""
        if not isinstance(value, Mapping):
            raise InvalidValueError(
                "must be an object", key=key, value=value, fix='write {"name": value, …}'
            )
        check_json(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Same as ``check``."""
        self.check(value, key)
        return dict(value), None


@attrs.frozen
class Anything(Kind):
    """Any value, passed on unchanged."""

    def check(self, value: Any, key: str) -> None:
        """Accept everything."""

    def read(self, value: Any, key: str) -> Reading:  # noqa: ARG002
        """Change nothing."""
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
            "is nested too deeply",
            key=_place_of(key, path),
            fix=f"use at most {_DEEPEST_NESTING} levels",
        )
    left[0] -= len(value)
    if left[0] < 0:
        raise InvalidValueError(
            "contains too many values for a configuration", key=key, fix="shorten the configuration"
        )
    mapping = isinstance(value, Mapping)
    for name, item in items:
        if mapping:
            if not isinstance(name, str):
                raise InvalidValueError(
                    "has a key that is not text",
                    key=_place_of(key, path),
                    value=name,
                    fix="put it in quotes",
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
            key=key,
            value=text,
            fix="write the character itself",
        ) from None


def _check_scalar(value: Any, key: str) -> None:
    if isinstance(value, str):
        check_letters(value, key)
    elif value is not None and not isinstance(value, bool) and not is_number(value):
        raise InvalidValueError(
            "cannot be written as JSON",
            key=key,
            value=value,
            fix="use only objects, lists, text, finite numbers, true, false and null",
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


def refuse_template(kind: Kind, value: Any, key: str) -> None:
    """Raise ``InvalidValueError`` if ``value`` is an unfilled template placeholder."""
    if not isinstance(value, str) or len(value) > _LONGEST_TEMPLATE:
        return
    inside = _IN_A_PATH.search(value) if isinstance(kind, Folder) else None
    if inside or _TEMPLATE.fullmatch(value.strip()):
        words = getattr(kind, "words", "")
        meant = words if isinstance(words, str) and words else "the value itself"
        raise InvalidValueError(
            "is a template placeholder without a value",
            key=key,
            value=value,
            fix=f"write {meant}",
            edits=writes(*kind.suggestions),
        )


_LONGEST_TEMPLATE: Final = 4096
_TEMPLATE: Final = re.compile(
    r"\{\{.*\}\}|\{%.*%\}|\$\{.*\}|\$\(.*\)|\$[A-Za-z_]\w*|\{[A-Za-z_]\w*\}|<[A-Za-z_][^<>]*>"
    r"|%[A-Za-z_]\w*%|%\(\w+\)[sdf]|@[A-Za-z_]\w*@|YOUR_\w+|TODO|FIXME|\.\.\.|\u2026",
    re.DOTALL,
)
_IN_A_PATH: Final = re.compile(r"\{\{|\$\{|\$[A-Za-z_]|%[A-Za-z_]\w*%|<[A-Za-z_][^<>/]*>")
"""No shell expands variables in a path: a folder with that literal name would be created."""
