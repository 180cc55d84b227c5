"""What people write and read: names, lists, amounts of memory, times."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from zerotune.errors import UNSET, InvalidValueError, shorten

# -- Names.


_LONGEST_NAME: Final = 100
_ADDRESS: Final = re.compile(r" at 0x[0-9A-Fa-f]+")
"""No name is longer, and comparing takes longer than by the square."""


def squash(name: str) -> str:
    """Letters and digits of ``name`` in lower case: ``"0/1-Adam"`` becomes ``"01adam"``."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def did_you_mean(
    word: str,
    candidates: Iterable[str],
    *,
    count: int = 3,
    cutoff: float = 0.6,
    by: Callable[[str], str] = squash,
) -> list[str]:
    """The candidates that look most like ``word``, best first.

    Args:
        word: What was written.
        candidates: What could have been meant.
        count: How many at the most.
        cutoff: Likeness from 0 to 1 that a candidate must have.
        by: What of a name is compared; ``str.lower`` where ``_`` parts words.
    """
    if len(word) > _LONGEST_NAME:
        return []
    import difflib  # Late: most runs never misspell anything.

    by_key = {by(candidate): candidate for candidate in candidates}
    close = difflib.get_close_matches(by(word), list(by_key), n=count, cutoff=cutoff)
    return [by_key[key] for key in close]


def json_of(text: str | bytes, **options: Any) -> Any:
    """What JSON holds that anybody may have written.

    Args:
        text: The JSON.
        options: As of ``json.loads``.
    """
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def is_reproducible(written: str) -> bool:
    """Whether a ``repr`` is the same in every process: it holds no memory address."""
    return _ADDRESS.search(written) is None


def listing(names: Collection[object], *, most: int = 3) -> str:
    """The first ``most`` names, sorted as given, and how many more: ``"a, b, c and 4 more"``."""
    shown = ", ".join([str(name) for name in names][:most]) or "nothing"
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


# -- In what values differ.


_MOST_DIFFERENCES: Final = 3


def differences(values: Mapping[int, Any]) -> str:
    """Where the ranks' values differ, down to the key or the item, and each one's value there.

    Args:
        values: By rank; mappings and lists are compared inside.
    """
    found = list(_differences(list(values.values())))
    ranks, more = list(values), len(found) - _MOST_DIFFERENCES
    shown = "; ".join(_each(path, each, ranks) for path, each in found[:_MOST_DIFFERENCES])
    return f"{shown}; and {more} more" if more > 0 else shown


def _differences(values: Sequence[Any], path: str = "") -> Iterator[tuple[str, Sequence[Any]]]:
    """Where values differ: the path inside them, and each one's value there."""
    first = values[0]
    if all(other == first for other in values):
        return
    if all(isinstance(value, Mapping) for value in values) and _wide(values):
        for key in dict.fromkeys(key for value in values for key in value):
            inner = [value.get(key, UNSET) for value in values]
            yield from _differences(inner, f"{path}.{key}" if path else str(key))
        return
    lists = all(isinstance(value, (list, tuple)) for value in values)
    if lists and len({len(value) for value in values}) == 1 and _long(values):
        for index, items in enumerate(zip(*values, strict=True)):
            yield from _differences(items, f"{path}[{index}]")
        return
    yield path, values


def _wide(values: Sequence[Any]) -> bool:
    return max(map(len, values)) > 1 or _long(values)


def _long(values: Sequence[Any]) -> bool:
    return any(shorten(value) != repr(value) for value in values)


def _each(path: str, values: Sequence[Any], ranks: Sequence[int]) -> str:
    """Every rank's value; ranks with the same one together."""
    same: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        same.setdefault(shorten(value), []).append(rank)
    shown = list(same.items())[:_MOST_DIFFERENCES]
    told = ", ".join(
        f"rank{'s' if len(who) > 1 else ''} {listing(who, most=4)}: {value}" for value, who in shown
    )
    return f"{path}: {told}" if path else told


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``"1 key"``, ``"2 keys"``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


# -- Amounts of memory.

_PREFIXES: Final = "kmgtp"
_UNITS: Final[dict[str, int]] = {
    "b": 1,
    "byte": 1,
    "bytes": 1,
    **{f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate(_PREFIXES)},
    **{f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate(_PREFIXES)},
}
_SHOWN: Final = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
_LARGEST: Final = 2**63 - 1
_FORMS: Final = 'write a size such as "12GiB" (2^30 bytes each) or "24 GB" (10^9), or whole bytes'
# No exponents: "1e999999999 GB" would take for ever to multiply out.
_WRITTEN: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)", re.ASCII)


def parse_size(value: int | float | str, *, key: str) -> int:
    """Read an amount of memory.

    Args:
        value: Bytes as a whole number, or text: a number and one of ``B``, ``kB``, ``MB``,
            ``GB``, ``TB``, ``PB`` (powers of 1000), ``KiB``, ``MiB``, ``GiB``, ``TiB``, ``PiB``
            (powers of 1024); case and blanks do not matter.
        key: Name of the setting, for the message.

    Returns:
        Bytes; a fraction of a byte is dropped. Refused is a bare ``"12"`` (which would be 12
        bytes), ``"12G"`` (which may mean either), and more than 2^63 - 1 bytes.
    """
    nbytes = _from_text(value, key) if isinstance(value, str) else _from_number(value, key)
    if not 0 <= nbytes <= _LARGEST:
        raise InvalidValueError("is not an amount of memory", key=key, value=value, fix=_FORMS)
    return nbytes


def parse_memory(value: Any, *, key: str) -> int:
    """Read a machine's memory: as ``parse_size``, but a number alone is GiB, as cards are named."""
    bare = value.strip() if isinstance(value, str) else value
    if isinstance(bare, int | float) and not isinstance(bare, bool):
        bare = f"{bare:f}" if isinstance(bare, float) else str(bare)
    if isinstance(bare, str) and bare.replace(".", "", 1).isdecimal():
        bare = f"{bare} GiB"
    return parse_size(bare, key=key)


def format_size(nbytes: int) -> str:
    """``nbytes`` with two decimals in the largest of KiB, MiB and GiB it fills, else in bytes."""
    for unit, size in _SHOWN:
        # Rounded first, so that it never reads "1024.00 MiB".
        if round(abs(nbytes) / size, 2) >= 1:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def brief_size(nbytes: float) -> str:
    """``nbytes`` for a glance: one decimal in KiB and MiB, two in GiB."""
    for unit, size in _SHOWN:
        if abs(nbytes) >= size:
            return f"{nbytes / size:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{nbytes:.0f} B"


def disk_size(nbytes: int) -> str:
    """``nbytes`` in MiB with one decimal, from 1 GiB on in GiB with two, as files are compared."""
    if nbytes >= 1024**3:
        return f"{nbytes / 1024**3:,.2f} GiB"
    return f"{nbytes / 1024**2:.1f} MiB"


def common_unit(sizes: Iterable[int]) -> tuple[str, int]:
    """The unit in which all of ``sizes`` can be compared: GiB, unless all of them are small.

    Returns:
        Its name, and its size in bytes.
    """
    largest = max(sizes, default=0)
    fitting = (unit for unit in _SHOWN if round(largest / unit[1], 1) >= 0.1)
    return next(fitting, _SHOWN[0] if largest == 0 else _SHOWN[-1])


def _from_number(value: float, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValueError("is not a size", key=key, value=value, fix=_FORMS)
    if not math.isfinite(value) or value != int(value):
        raise InvalidValueError("is not a whole number of bytes", key=key, value=value, fix=_FORMS)
    return int(value)


def _from_text(text: str, key: str) -> int:
    match = _WRITTEN.fullmatch(text.strip().lower())
    if match is None:
        raise InvalidValueError("is not a size", key=key, value=text, fix=_FORMS)
    from fractions import Fraction

    number, unit = Fraction(match[1]), match[2]
    if unit in _UNITS:
        return int(number * _UNITS[unit])
    if not unit and number == 0:
        return 0
    if not unit:
        raise InvalidValueError("has no unit", key=key, value=text, fix=_FORMS)
    if unit in _PREFIXES:
        reason = f"may mean {unit.upper()}B or {unit.upper()}iB"
        raise InvalidValueError(reason, key=key, value=text, fix=_FORMS)
    raise InvalidValueError("has a unit nobody knows", key=key, value=text, fix=_FORMS)


# -- Time.


def format_seconds(seconds: float) -> str:
    """``"1:02:03"``, or ``"2:03"`` below an hour."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
