"""Plain data on its way between the page and Python, without loss and without surprises."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from zerotune.errors import InvalidValueError

DEEPEST: Final = 24
"""Levels of nesting a page may send; a DeepSpeed configuration has about five."""
MOST_VALUES: Final = 20_000
"""Values it may send at once, aliases of a YAML file counted each time they are used."""
INTEGER: Final = "$int"
"""Key of an object that stands for an integer which JavaScript cannot hold."""

_SAFE: Final = 2**53 - 1


def parse(text: str) -> Any:
    """Read JSON that a page sent.

    Raises:
        InvalidValueError: Not JSON, too deep, too much, or with text that is not Unicode.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _refused(f"is not JSON ({error})") from None
    check(value)
    return from_wire(value)


def check(value: Any) -> None:
    """Refuse what is too deep or too much to be a configuration.

    Raises:
        InvalidValueError: It is, or it holds text that is not Unicode.
    """
    pending, seen = [(value, 0)], 0
    while pending:
        item, depth = pending.pop()
        seen += 1
        if depth > DEEPEST or seen > MOST_VALUES:
            raise _refused("is too large or too deeply nested to be a configuration")
        if isinstance(item, Mapping):
            pending.extend((part, depth + 1) for pair in item.items() for part in pair)
        elif isinstance(item, list | tuple):
            pending.extend((part, depth + 1) for part in item)
        elif isinstance(item, str) and not _is_unicode(item):
            raise _refused("holds text that is not Unicode")
        elif isinstance(item, float) and not math.isfinite(item):
            raise _refused("holds a number that is not finite")


def from_wire(value: Any) -> Any:
    """What the page sent, as Python holds it."""
    if isinstance(value, dict):
        if value.keys() == {INTEGER}:
            return _integer(value[INTEGER])
        return {key: from_wire(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_wire(item) for item in value]
    return value


def to_wire(value: Any) -> Any:
    """Any value as data that JSON and JavaScript can hold; what is no data becomes its text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _SAFE else {INTEGER: str(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): to_wire(item) for key, item in value.items()}
    return [to_wire(item) for item in value] if isinstance(value, list | tuple) else str(value)


def mapping(value: Any, key: str) -> dict[str, Any]:
    """``value`` if it is an object; ``None`` is an empty one.

    Raises:
        InvalidValueError: It is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidValueError("must be an object", key=key, value=value, fix="send an object")
    return value


def text(value: Any, key: str, *, longest: int = 4096) -> str:
    """``value`` if it is text of reasonable length.

    Raises:
        InvalidValueError: It is something else.
    """
    if not isinstance(value, str) or len(value) > longest or "\0" in value:
        raise InvalidValueError(
            "must be text", key=key, value=value, fix=f"send at most {longest} characters"
        )
    return value


def _integer(written: Any) -> Any:
    sign_less = written.removeprefix("-") if isinstance(written, str) else ""
    if not sign_less.isascii() or not sign_less.isdigit() or len(sign_less) > 40:
        raise _refused(f"holds {written!r} in place of an integer")
    return int(written)


def _is_unicode(written: str) -> bool:
    try:
        written.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number that JSON knows")


def _refused(reason: str) -> InvalidValueError:
    return InvalidValueError(reason, key="request", fix="send a configuration")
