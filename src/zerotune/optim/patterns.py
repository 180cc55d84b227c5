"""Patterns that pick parameters by their dotted names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from typing import Any, Final

from zerotune.errors import InvalidValueError
from zerotune.optim.naming import did_you_mean

REGEX: Final = "re:"
"""What a regular expression begins with; every other pattern is a glob or a subtree."""

_GLOB: Final = frozenset("*?[")


def check_pattern(pattern: Any, *, key: str) -> str:
    """Return ``pattern`` when it can be used.

    Raises:
        InvalidValueError: It is no text, empty, or no regular expression.
    """
    if not isinstance(pattern, str) or not pattern.strip():
        raise InvalidValueError(
            "a pattern is text", key=key, value=pattern, fix='write for example "unet.*.bias"'
        )
    if pattern.startswith(REGEX):
        try:
            re.compile(pattern.removeprefix(REGEX))
        except re.error as error:
            raise InvalidValueError(
                f"not a regular expression ({error})",
                key=key,
                value=pattern,
                fix="correct it, or write a glob without re: in front",
            ) from error
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` picks the parameter called ``name``.

    Args:
        pattern: ``"re:…"`` searches a regular expression; with ``*``, ``?`` or ``[`` it is a glob
            over the whole name (``*`` also crosses dots); anything else is a name, or the
            module that holds it (``"unet.conv_in"``).
        name: Dotted name as ``named_parameters()`` gives it.
    """
    if pattern.startswith(REGEX):
        return re.search(pattern.removeprefix(REGEX), name) is not None
    if _GLOB & set(pattern):
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.startswith(f"{pattern}.")


def closest_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Modules and parameters that look like what ``pattern`` may have meant, best first."""
    candidates: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        candidates |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    plain = pattern.removeprefix(REGEX).strip("*.^$").replace("\\.", ".")
    return did_you_mean(plain, candidates)
