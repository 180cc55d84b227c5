"""Text for people, parsed and formatted: names, lists, numbers, amounts of memory, times."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeGuard

from zerotune.errors import UNSET, InvalidValueError, shorten

# -- Names.


_LONGEST_COMPARED: Final = 100
"""No name is longer, and the time of a comparison grows faster than the square of the length."""
_SHORTEST_BEGUN: Final = 3


def squash(name: str) -> str:
    """Return letters and digits of ``name`` in lower case: ``"01adam"`` for ``"0/1-Adam"``."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def did_you_mean(
    word: str,
    candidates: Iterable[str],
    *,
    count: int = 3,
    cutoff: float = 0.6,
    by: Callable[[str], str] = squash,
) -> list[str]:
    """Return the candidates that begin with ``word`` or resemble it most, best first.

    Args:
        word: Word as written.
        candidates: Known words.
        count: Maximum number of results.
        cutoff: Minimum similarity of a candidate, from 0 to 1.
        by: Function that normalises a name for comparison; ``str.lower`` keeps ``_``.
    """
    if len(word) > _LONGEST_COMPARED:
        return []
    import difflib  # Late: most runs contain no misspelling.

    by_key = {by(candidate): candidate for candidate in candidates}
    begun = [key for key in by_key if len(word) >= _SHORTEST_BEGUN and key.startswith(by(word))]
    close = difflib.get_close_matches(by(word), list(by_key), n=count, cutoff=cutoff)
    return [by_key[key] for key in dict.fromkeys((*begun, *close))][:count]


def json_of(text: str | bytes, **options: Any) -> Any:
    """Parse JSON from an untrusted source.

    Args:
        text: JSON text.
        options: Options of ``json.loads``.
    """
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def listing(names: Collection[object], *, most: int = 3) -> str:
    """Return the first ``most`` names and the number of others: ``"a, b, c and 4 more"``."""
    shown = ", ".join([str(name) for name in names][:most]) or "nothing"
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


# -- Differences between values.


_MOST_DIFFERENCES: Final = 3


def differences(values: Mapping[int, Any]) -> str:
    """Describe where the ranks' values differ: the key or item, and each rank's value.

    Args:
        values: Values by rank; mappings and lists are compared item by item.
    """
    every = list(_differing(list(values.values())))
    more = len(every) - _MOST_DIFFERENCES
    sentences = []
    for path, each in every[:_MOST_DIFFERENCES]:
        ranks: dict[str, list[int]] = {}
        for rank, value in zip(values, each, strict=True):
            ranks.setdefault(shorten(value), []).append(rank)
        shown = ", ".join(
            f"rank{'s' if len(who) > 1 else ''} {listing(who, most=4)}: {value}"
            for value, who in list(ranks.items())[:_MOST_DIFFERENCES]
        )
        sentences.append(f"{path}: {shown}" if path else shown)
    return "; ".join([*sentences, f"and {more} more"] if more > 0 else sentences)


def _differing(values: Sequence[Any], path: str = "") -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the path of each difference, and each rank's value there."""
    if all(other == values[0] for other in values):
        return
    long = any(shorten(value) != repr(value) for value in values)
    mappings = all(isinstance(value, Mapping) for value in values)
    if mappings and (long or max(map(len, values)) > 1):
        for key in dict.fromkeys(key for value in values for key in value):
            inner = [value.get(key, UNSET) for value in values]
            yield from _differing(inner, f"{path}.{key}" if path else str(key))
        return
    lists = all(isinstance(value, (list, tuple)) for value in values)
    if lists and len({len(value) for value in values}) == 1 and long:
        for index, items in enumerate(zip(*values, strict=True)):
            yield from _differing(items, f"{path}[{index}]")
        return
    yield path, values


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, as in ``"1 key"`` or ``"2 keys"``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


# -- Numbers. A ``bool`` does not count as an ``int``, nor infinity and NaN as numbers.


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an ``int`` and not a ``bool``."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether ``value`` is a finite ``int`` or ``float`` and not a ``bool``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # A larger ``int`` does not fit in a ``float``.
    return abs(value) <= 10**308 if isinstance(value, int) else math.isfinite(value)


def as_number(value: Any) -> float | int | None:
    """Return ``value``, a number or its text, as a finite number; ``None`` if it is not one."""
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            value = kind(value.strip().replace("_", ""))
            break
    return value if is_number(value) else None


def whole(
    value: Any, *, key: str, least: int = 1, most: int | None = None, fix: str | None = None
) -> int:
    """Return ``value`` if it is a whole number from ``least`` to ``most``; else raise an error."""
    if is_integer(value) and least <= value and (most is None or value <= most):
        return value
    upper = " or more" if most is None else f" to {most}"
    fix = fix or f"write at least {least}"
    raise InvalidValueError(f"must be a whole number, {least}{upper}", fix, key, value)


def finite(value: Any, *, key: str, fix: str | None = None) -> float:
    """Return ``value`` as a ``float``; raise an error unless it is a finite number."""
    if is_number(value):
        return float(value)
    raise InvalidValueError("must be a finite number", fix, key, value)


def positive(value: Any, *, key: str, fix: str | None = None) -> float:
    """Return ``value`` as a ``float``; raise an error unless it is above 0."""
    if is_number(value) and value > 0:
        return float(value)
    raise InvalidValueError("must be a number above 0", fix, key, value)


def not_negative(value: Any, *, key: str, fix: str | None = None) -> float:
    """Return ``value`` as a ``float``; raise an error unless it is at least 0."""
    if is_number(value) and value >= 0:
        return float(value)
    raise InvalidValueError("must be a number of at least 0", fix, key, value)


def probability(value: Any, *, key: str, fix: str = "write a number in [0, 1]") -> float:
    """Return ``value`` as a ``float``; raise an error unless it is from 0 to 1."""
    if is_number(value) and 0 <= value <= 1:
        return float(value)
    raise InvalidValueError("must be a probability", fix, key, value)


def validated(check: Callable[..., object], **bounds: Any) -> Callable[[Any, Any, Any], None]:
    """Return an attrs validator that runs ``check(value, key="Class.field", **bounds)``."""

    def validate(instance: Any, attribute: Any, value: Any) -> None:
        check(value, key=f"{type(instance).__name__}.{attribute.name}", **bounds)

    return validate


def as_sentence(text: str) -> str:
    """Return ``text`` with an initial capital and final punctuation."""
    text = text.strip()
    text = f"{text[:1].upper()}{text[1:]}"
    return text if text.endswith((".", "?", "!")) or not text else f"{text}."


def as_texts(value: str | Iterable[str]) -> tuple[str, ...]:
    """Return one or several texts as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def release_of(version: str) -> tuple[int, ...]:
    """Return a version's numbers: ``(0, 19, 8)`` for ``"0.19.8+cpu"``; ``()`` if it is invalid."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release
    except InvalidVersion:
        return ()


# -- Amounts of memory.

_UNIT_PREFIXES: Final = "kmgtp"
_UNITS: Final[dict[str, int]] = {
    "b": 1,
    "byte": 1,
    "bytes": 1,
    **{f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate(_UNIT_PREFIXES)},
    **{f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate(_UNIT_PREFIXES)},
}
_SHOWN_UNITS: Final = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
_LARGEST_SIZE: Final = 2**63 - 1
_FORMS: Final = (
    'write a size such as "12GiB" (2^30 bytes per GiB) or "24 GB" (10^9 bytes per GB), or a '
    "whole number of bytes"
)
# No exponents: "1e999999999 GB" would take for ever to multiply out.
_WRITTEN_SIZE: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)", re.ASCII)


def parse_size(value: int | float | str, *, key: str) -> int:
    """Parse an amount of memory.

    Args:
        value: Whole number of bytes, or text with a number and a unit: ``B``, ``kB``, ``MB``,
            ``GB``, ``TB``, ``PB`` (powers of 1000) or ``KiB``, ``MiB``, ``GiB``, ``TiB``, ``PiB``
            (powers of 1024); case and blanks do not matter.
        key: Name of the setting, for the message.

    Returns:
        Bytes, rounded down. A bare ``"12"`` (which would be 12 bytes), ``"12G"`` (``GB`` or
        ``GiB``), and more than 2^63 - 1 bytes are errors.
    """
    reason, nbytes = _read_size(value)
    if reason is None and not 0 <= nbytes <= _LARGEST_SIZE:
        reason = "is not between 0 and 2^63 - 1 bytes"
    if reason is not None:
        raise InvalidValueError(reason, _FORMS, key, value)
    return nbytes


def _read_size(value: Any) -> tuple[str | None, int]:
    """Return what is wrong with an amount (``None`` if nothing is), and its bytes."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        whole_bytes = math.isfinite(value) and value == int(value)
        return (None, int(value)) if whole_bytes else ("is not a whole number of bytes", 0)
    match = _WRITTEN_SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None:
        return "is not a size", 0
    from fractions import Fraction

    number, unit = Fraction(match[1]), match[2]
    if unit in _UNITS or (number == 0 and not unit):
        return None, int(number * _UNITS.get(unit, 0))
    if not unit:
        return "has no unit", 0
    if unit in _UNIT_PREFIXES:
        return f"may mean {unit.upper()}B or {unit.upper()}iB", 0
    return "has an unknown unit", 0


def parse_memory(value: Any, *, key: str) -> int:
    """Parse a machine's memory like ``parse_size``, but read a number without a unit as GiB."""
    bare = value.strip() if isinstance(value, str) else value
    if isinstance(bare, int | float) and not isinstance(bare, bool):
        bare = f"{bare:f}" if isinstance(bare, float) else str(bare)
    if isinstance(bare, str) and bare.replace(".", "", 1).isdecimal():
        bare = f"{bare} GiB"
    return parse_size(bare, key=key)


def format_size(nbytes: float) -> str:
    """Format ``nbytes`` with two decimals in the largest unit up to GiB, or in bytes."""
    for unit, size in _SHOWN_UNITS:
        # Rounded first, so that it never reads "1024.00 MiB".
        if round(abs(nbytes) / size, 2) >= 1:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def common_unit(sizes: Iterable[int]) -> tuple[str, int]:
    """Return a unit for comparing ``sizes``: GiB, or a smaller one if all of them are small.

    Returns:
        Name of the unit, and its size in bytes.
    """
    largest = max(sizes, default=0)
    fitting = (unit for unit in _SHOWN_UNITS if round(largest / unit[1], 1) >= 0.1)
    return next(fitting, _SHOWN_UNITS[0] if largest == 0 else _SHOWN_UNITS[-1])


# -- Time.


def format_seconds(seconds: float) -> str:
    """Format seconds as ``"1:02:03"``, or as ``"2:03"`` below an hour."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
