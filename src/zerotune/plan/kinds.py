"""What a setting may hold: strict checks for values, lenient reading for files.

Every modelled setting has a *kind*. ``check`` is what an attrs validator runs: it accepts only
the canonical form. ``read`` accepts what people write (``2e8`` for an integer, ``"CPU"`` for a
device) and returns the canonical form with the reason of the change.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol

import attrs

from zerotune.errors import InvalidValueError

Auto = Literal["auto"]
AUTO: Final[Auto] = "auto"

_LARGEST_INTEGER = 2**63 - 1
_LARGEST_NUMBER = 10**308
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})

Reading = tuple[Any, "str | None"]
"""The canonical value, and why it differs from what was written (``None``: it does not)."""


class Kind(Protocol):
    """What a setting may hold."""

    def check(self, value: Any, key: str) -> None:
        """Raise ``InvalidValueError`` unless ``value`` is in canonical form."""

    def read(self, value: Any, key: str) -> Reading:
        """Bring what was written into canonical form."""


def is_integer(value: object) -> bool:
    """Whether ``value`` is an ``int`` and not a ``bool``."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite ``int`` or ``float`` and not a ``bool``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _LARGEST_NUMBER if isinstance(value, int) else math.isfinite(value)


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() == AUTO


def _number_from_text(text: str) -> float | int | None:
    stripped = text.strip().replace("_", "")
    try:
        return int(stripped)
    except ValueError:
        pass
    try:
        number = float(stripped)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@attrs.frozen(kw_only=True)
class Integer:
    """A whole number, or ``"auto"``."""

    minimum: int = 0
    maximum: int = _LARGEST_INTEGER
    auto: bool = True

    def check(self, value: Any, key: str) -> None:
        """Accept an ``int`` in range, or ``"auto"`` where allowed."""
        if self.auto and value == AUTO:
            return
        if not is_integer(value):
            raise InvalidValueError("must be a whole number", key=key, value=value, fix=self._fix())
        if not self.minimum <= value <= self.maximum:
            raise InvalidValueError("is out of range", key=key, value=value, fix=self._fix())

    def read(self, value: Any, key: str) -> Reading:
        """Accept integral floats and numbers in strings; refuse fractions."""
        if self.auto and _is_auto(value):
            return AUTO, None if value == AUTO else "written as DeepSpeed spells it"
        number = _number_from_text(value) if isinstance(value, str) else value
        if is_integer(number):
            reason = None if is_integer(value) else "a number written as text"
        elif isinstance(number, float) and number.is_integer():
            number = int(number)
            reason = "DeepSpeed wants a whole number here"
        else:
            raise InvalidValueError("must be a whole number", key=key, value=value, fix=self._fix())
        self.check(number, key)
        return number, reason

    def _fix(self) -> str:
        upper = "" if self.maximum == _LARGEST_INTEGER else f" and at most {self.maximum}"
        return f"write an integer of at least {self.minimum}{upper}" + _or_auto(self.auto)


@attrs.frozen(kw_only=True)
class Number:
    """A finite real number, or ``"auto"``."""

    minimum: float = 0.0
    maximum: float = math.inf
    auto: bool = True

    def check(self, value: Any, key: str) -> None:
        """Accept a finite number in range, or ``"auto"`` where allowed."""
        if self.auto and value == AUTO:
            return
        if not is_number(value):
            raise InvalidValueError(
                "must be a finite number", key=key, value=value, fix=self._fix()
            )
        if not self.minimum <= value <= self.maximum:
            raise InvalidValueError("is out of range", key=key, value=value, fix=self._fix())

    def read(self, value: Any, key: str) -> Reading:
        """Accept numbers in strings."""
        if self.auto and _is_auto(value):
            return AUTO, None if value == AUTO else "written as DeepSpeed spells it"
        number = _number_from_text(value) if isinstance(value, str) else value
        self.check(value if number is None else number, key)
        return number, "a number written as text" if isinstance(value, str) else None

    def _fix(self) -> str:
        upper = "" if self.maximum == math.inf else f" and at most {self.maximum:g}"
        return f"write a number of at least {self.minimum:g}{upper}" + _or_auto(self.auto)


@attrs.frozen(kw_only=True)
class Boolean:
    """``true`` or ``false``, or ``"auto"``."""

    auto: bool = True

    def check(self, value: Any, key: str) -> None:
        """Accept a ``bool``, or ``"auto"`` where allowed."""
        if isinstance(value, bool) or (self.auto and value == AUTO):
            return
        raise InvalidValueError(
            "must be true or false",
            key=key,
            value=value,
            fix="write true or false without quotes" + _or_auto(self.auto),
        )

    def read(self, value: Any, key: str) -> Reading:
        """Accept ``0``, ``1`` and the usual words."""
        if isinstance(value, bool):
            return value, None
        if self.auto and _is_auto(value):
            return AUTO, None if value == AUTO else "written as DeepSpeed spells it"
        word = str(value).strip().lower() if isinstance(value, int | str) else ""
        if word in _TRUE | _FALSE:
            return word in _TRUE, "true or false written in another way"
        self.check(value, key)
        return value, None


@attrs.frozen(kw_only=True)
class Choice:
    """One of a few words."""

    choices: tuple[str, ...]
    synonyms: Mapping[str, str] = attrs.field(factory=dict)
    """Lower-case word to the choice it means."""
    null: str | None = None
    """What a written ``null`` means; ``None``: not written."""

    def check(self, value: Any, key: str) -> None:
        """Accept exactly one of the choices."""
        if not isinstance(value, str) or value not in self.choices:
            raise InvalidValueError(
                "is not one of the possible values", key=key, value=value, fix=self._fix()
            )

    def read(self, value: Any, key: str) -> Reading:
        """Accept any case and the synonyms."""
        if value is None and self.null is not None:
            return self.null, f"null means {self.null!r} here"
        word = value.strip().lower() if isinstance(value, str) else value
        if isinstance(value, bool):  # YAML reads the word `no` as false
            word = "yes" if value else "no"
        if isinstance(word, str):
            word = self.synonyms.get(word, word)
        self.check(word, key)
        return word, None if word == value else "written as DeepSpeed spells it"

    def _fix(self) -> str:
        return "write one of " + ", ".join(repr(choice) for choice in self.choices)


@attrs.frozen(kw_only=True)
class Text:
    """A word or a name."""

    empty: bool = False

    def check(self, value: Any, key: str) -> None:
        """Accept a string; an empty one only where allowed."""
        if not isinstance(value, str):
            raise InvalidValueError("must be text", key=key, value=value, fix="write a string")
        if not self.empty and not value.strip():
            raise InvalidValueError("is empty", key=key, value=value, fix="write a name")

    def read(self, value: Any, key: str) -> Reading:
        """Strip surrounding blanks."""
        self.check(value, key)
        text = value.strip()
        return text, None if text == value else "surrounding blanks removed"


@attrs.frozen(kw_only=True)
class Folder:
    """A path on this machine; ``"auto"`` leaves it to ``zerotune.offload``."""

    def check(self, value: Any, key: str) -> None:
        """Accept a non-empty string."""
        if not isinstance(value, str) or not value.strip():
            raise InvalidValueError(
                "must be the path of a folder",
                key=key,
                value=value,
                fix="write a path, or leave the key out to let zerotune choose the folder",
            )

    def read(self, value: Any, key: str) -> Reading:
        """Accept path objects; an empty path or ``"none"`` means not given."""
        if isinstance(value, os.PathLike):
            return str(os.fspath(value)), None
        if isinstance(value, str) and value.strip().lower() in {"", "none", "null"}:
            return None, "no folder given; zerotune will choose one"
        self.check(value, key)
        return value, None


@attrs.frozen(kw_only=True)
class Free:
    """A JSON object that zerotune does not look into."""

    def check(self, value: Any, key: str) -> None:
        """Accept a mapping that JSON can hold."""
        if not isinstance(value, Mapping):
            raise InvalidValueError(
                "must be an object", key=key, value=value, fix='write {"name": value, …}'
            )
        check_json(value, key)

    def read(self, value: Any, key: str) -> Reading:
        """Same as ``check``."""
        self.check(value, key)
        return dict(value), None


def check_json(value: Any, key: str, *, depth: int = 0) -> None:
    """Raise ``InvalidValueError`` unless JSON can hold ``value`` and give it back."""
    if depth > _DEEPEST:
        raise InvalidValueError(
            "is nested too deeply", key=key, fix=f"nest at most {_DEEPEST} levels"
        )
    if value is None or isinstance(value, str | bool | int) or is_number(value):
        return
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise InvalidValueError(
                    "has a key that is not text", key=key, value=name, fix="write it in quotes"
                )
            check_json(item, f"{key}.{name}", depth=depth + 1)
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{key}[{index}]", depth=depth + 1)
        return
    raise InvalidValueError(
        "cannot be written as JSON",
        key=key,
        value=value,
        fix="use only objects, lists, text, finite numbers, true, false and null",
    )


_DEEPEST = 50


def _or_auto(allowed: bool) -> str:
    return f', or "{AUTO}"' if allowed else ""
