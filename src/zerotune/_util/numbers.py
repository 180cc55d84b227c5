"""Whether a value is the number that was asked for, and the error when it is not.

``bool`` is an ``int`` to Python, never to us; infinities and NaN are no numbers either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeGuard

from zerotune.errors import InvalidValueError

_LARGEST = 10**308
"""Beyond it an ``int`` has no ``float``."""


def is_integer(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an ``int`` and not a ``bool``."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite ``int`` or ``float`` and not a ``bool``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _LARGEST if isinstance(value, int) else math.isfinite(value)


def as_number(value: Any) -> float | int | None:
    """``value``, a number or the text of one, as a finite number; ``None`` when it is none."""
    number = _spelled(value) if isinstance(value, str) else value
    return number if is_number(number) else None


def _spelled(text: str) -> float | int | None:
    stripped = text.strip().replace("_", "")
    for kind in (int, float):
        try:
            return kind(stripped)
        except ValueError:
            continue
    return None


def whole(
    value: Any, *, key: str, least: int = 1, most: int | None = None, fix: str | None = None
) -> int:
    """``value`` as it is, a whole number from ``least`` to ``most``."""
    if is_integer(value) and least <= value and (most is None or value <= most):
        return value
    upper = " or more" if most is None else f" to {most}"
    raise InvalidValueError(
        f"must be a whole number, {least}{upper}", key=key, value=value, fix=fix
    )


def finite(value: Any, *, key: str, fix: str | None = None) -> float:
    """``value`` as a ``float``."""
    if is_number(value):
        return float(value)
    raise InvalidValueError("must be a finite number", key=key, value=value, fix=fix)


def positive(value: Any, *, key: str, fix: str | None = None) -> float:
    """``value`` as a ``float`` above 0."""
    if is_number(value) and value > 0:
        return float(value)
    raise InvalidValueError("must be a number above 0", key=key, value=value, fix=fix)


def probability(value: Any, *, key: str, fix: str = "write a number in [0, 1]") -> float:
    """``value`` as a ``float`` from 0 to 1."""
    if is_number(value) and 0 <= value <= 1:
        return float(value)
    raise InvalidValueError("is a probability", key=key, value=value, fix=fix)


def validated(check: Callable[..., object], **bounds: Any) -> Callable[[Any, Any, Any], None]:
    """An attrs validator that runs ``check(value, key="Class.field", **bounds)``."""

    def validate(instance: Any, attribute: Any, value: Any) -> None:
        check(value, key=f"{type(instance).__name__}.{attribute.name}", **bounds)

    return validate
