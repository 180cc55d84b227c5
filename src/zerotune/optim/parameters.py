"""One argument of an optimizer or a schedule: its type, range, default, and the check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import attrs

from zerotune.errors import UNSET, InvalidValueError

ParameterType = Literal["float", "int", "bool", "floats", "str", "any"]

AUTO: Final = "auto"


def is_auto(value: Any) -> bool:
    """Whether ``value`` asks for an automatic choice."""
    return isinstance(value, str) and value.strip().lower() == AUTO


@attrs.frozen(kw_only=True)
class Parameter:
    """One argument, described by data so that a page or a table can be made of it."""

    name: str
    """Key under ``params``, as DeepSpeed or torch spells it."""
    type: ParameterType = "float"
    """``"floats"`` is a fixed number of floats (``betas``); ``"any"`` is passed on unchecked."""
    default: Any = UNSET
    """Value for ``"auto"``; ``UNSET`` when there is none and it must be given."""
    native: Any = UNSET
    """What DeepSpeed's class uses when the key is not written, where that is not ``default``."""
    low: float | None = None
    """Smallest value allowed (of each element)."""
    high: float | None = None
    """Largest value allowed (of each element)."""
    low_open: bool = False
    """Whether ``low`` itself is refused."""
    high_open: bool = False
    """Whether ``high`` itself is refused."""
    length: int | None = None
    """Number of elements of ``"floats"``."""
    choices: tuple[str, ...] = ()
    """Allowed words of a ``"str"``."""
    nullable: bool = False
    """Whether ``None`` is a value."""
    optional: bool = False
    """Whether it is left out unless somebody writes it (a switch without effect on results)."""
    only: frozenset[str] = frozenset()
    """Classes whose constructor takes it; empty means all of them."""

    @property
    def unwritten(self) -> Any:
        """The value it has when nobody writes the key."""
        return self.default if self.native is UNSET else self.native

    @property
    def range(self) -> str:
        """The allowed values in words."""
        if self.type == "bool":
            return "true or false"
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        noun = {"int": "a whole number", "floats": f"{self.length} numbers"}.get(
            self.type, "a number"
        )
        bounds = [
            f"{'>' if self.low_open else '>='} {self.low:g}" if self.low is not None else "",
            f"{'<' if self.high_open else '<='} {self.high:g}" if self.high is not None else "",
        ]
        return " ".join([noun, " and ".join(bound for bound in bounds if bound)]).strip()

    def accepts(self, implementation: str) -> bool:
        """Whether the class called ``implementation`` takes this argument."""
        return not self.only or implementation in self.only

    def check(self, value: Any, *, section: str) -> Any:
        """Return ``value`` in its proper type.

        Args:
            value: As written; numbers may be text (YAML reads ``1e-4`` as text).
            section: ``"optimizer.params"`` or ``"scheduler.params"``, for the message.

        Returns:
            A float, int, bool, str, or a tuple of floats.

        Raises:
            InvalidValueError: Wrong type, outside the range, or not finite.
        """
        if self.type == "any" or (value is None and self.nullable):
            return value
        key = f"{section}.{self.name}"
        if self.type == "bool":
            return self._flag(value, key)
        if self.type == "str":
            return self._word(value, key)
        if self.type == "floats":
            return self._numbers(value, key)
        return self._number(value, key, value)

    def _refuse(self, key: str, value: Any) -> InvalidValueError:
        return InvalidValueError(f"must be {self.range}", key=key, value=value, fix=self._hint())

    def _hint(self) -> str | None:
        example = self.default if self.default is not UNSET else self.native
        if example is UNSET or example is None:
            return None
        return f"write for example {_json(example)}"

    def _flag(self, value: Any, key: str) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip().lower() in {"true", "false"}:
            return value.strip().lower() == "true"
        raise self._refuse(key, value)

    def _word(self, value: Any, key: str) -> str:
        word = value.strip() if isinstance(value, str) else value
        if isinstance(word, str) and (not self.choices or word.lower() in self.choices):
            return word.lower() if self.choices else word
        raise self._refuse(key, value)

    def _numbers(self, value: Any, key: str) -> tuple[float, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != self.length:
            raise self._refuse(key, value)
        return tuple(float(self._number(item, key, value)) for item in value)

    def _number(self, item: Any, key: str, whole: Any) -> float | int:
        number = to_number(item)
        if number is None or not math.isfinite(number):
            raise self._refuse(key, whole)
        if self.type == "int":
            if number != int(number):
                raise self._refuse(key, whole)
            number = int(number)
        else:
            number = float(number)
        if self._outside(number):
            raise self._refuse(key, whole)
        return number

    def _outside(self, number: float) -> bool:
        below = self.low is not None and (
            number <= self.low if self.low_open else number < self.low
        )
        above = self.high is not None and (
            number >= self.high if self.high_open else number > self.high
        )
        return below or above


def to_number(value: Any) -> float | int | None:
    """``value`` as a number, or ``None`` when it is none (``True`` is none either)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None


def _json(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_json(item) for item in value) + "]"
    return str(value).lower() if isinstance(value, bool) else f"{value}"
