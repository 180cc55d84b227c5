"""Inject faults of every class in turns, with a seed and a time budget.

Each class prints how many faults it injected and how many were survived (correct result, or a
zerotune error that names the culprit). It also prints how many lost or corrupted data, ended in a
foreign exception, named the wrong rank or none, or hung; and the longest time of any fault.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import attrs

KINDS = ("lost", "foreign", "misnamed", "hung")
HEADINGS = ("injected", "survived", *KINDS, "worst s")


class Found(Exception):
    """A fault was not survived."""

    def __init__(self, kind: str, what: str) -> None:
        assert kind in KINDS
        super().__init__(what)
        self.kind = kind


class Missed(Exception):
    """The run ended before it reached the point of the fault."""


class NotHere(Exception):
    """A class of faults cannot be injected on this machine."""


class Faults(Protocol):
    """A class of faults; a process that it starts may serve many injections."""

    def inject(self, work: Path, chance: random.Random) -> float | None:
        """Inject one fault.

        Args:
            work: An empty folder, removed afterwards.
            chance: Source of all randomness.

        Returns:
            Seconds until the fault was handled; ``None``: the duration of the call.

        Raises:
            Found: The fault was not survived.
            Missed: Nothing was injected this time.
            NotHere: The fault cannot be injected on this machine.
        """
        ...

    def close(self) -> None:
        """End all started processes."""
        ...


@attrs.define(kw_only=True)
class Row:
    """Results of a class of faults."""

    name: str
    tried: int = 0
    injected: int = 0
    counts: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(KINDS, 0))
    worst_s: float = 0.0
    used_s: float = 0.0
    why_not: str = ""
    """Reason why the class was not tried, or was stopped early."""

    @property
    def bad(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        cells = (self.injected, max(0, self.injected - self.bad), *self.counts.values())
        numbers = "".join(f"{cell:>9}" for cell in cells) + f"{self.worst_s:>9.1f}"
        told = self.why_not or ("" if self.injected else "the budget allowed none")
        return f"{self.name:<22}{numbers}{f'  {told}' if told else ''}"


def attack(name: str, faults: Faults, row: Row, seed: int, number: int) -> None:
    """Inject one fault, and count its outcome."""
    began = time.monotonic()
    seconds: float | None = None
    row.tried += 1
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        try:
            seconds = faults.inject(Path(folder), random.Random(f"{seed}/{name}/{number}"))
            row.injected += 1
        except Missed:
            seconds = 0.0
        except NotHere as reason:
            row.why_not = f"not here: {reason}"
        except Exception as error:  # noqa: BLE001 - what is counted.
            row.injected += 1
            kind = error.kind if isinstance(error, Found) else "foreign"
            row.counts[kind] += 1
            what = str(error) if isinstance(error, Found) else f"{type(error).__name__}: {error}"
            line = f"{name} #{number}: {kind}: {what[:1500]}"
            print(line.encode(errors="backslashreplace").decode(), flush=True)
    passed = time.monotonic() - began
    row.used_s += passed
    row.worst_s = max(row.worst_s, passed if seconds is None else seconds)


def start(make: Callable[[], Faults], row: Row, started: dict[str, Faults]) -> bool:
    """Start a class of faults; return whether that succeeded."""
    began = time.monotonic()
    try:
        started[row.name] = make()
    except Exception as error:  # noqa: BLE001 - the other classes go on.
        row.why_not = f"did not start: {type(error).__name__}: {error}"
        row.counts["foreign"] += 1
    row.used_s += time.monotonic() - began
    return row.name in started


def campaign(
    classes: dict[str, Callable[[], Faults]],
    *,
    seed: int,
    minutes: float,
    first: int = 0,
    times: int | None = None,
) -> list[Row]:
    """Inject faults until the time is up, always of the class that has had the least time.

    Args:
        classes: Factories of the classes, by name.
        seed: Determines every injection, together with its class and number.
        minutes: Time after which no injection begins.
        first: Number of the first injection of each class.
        times: Maximum number of injections of each class.
    """
    rows = {name: Row(name=name) for name in classes}
    started: dict[str, Faults] = {}
    end = time.monotonic() + 60 * minutes
    try:
        while time.monotonic() < end:
            left = [
                row
                for row in rows.values()
                if not row.why_not and (times is None or row.tried < times)
            ]
            if not left:
                break
            row = min(left, key=lambda row: row.used_s)
            if row.name not in started and not start(classes[row.name], row, started):
                continue
            attack(row.name, started[row.name], row, seed, first + row.tried)
    finally:
        for faults in started.values():
            faults.close()
    return list(rows.values())


def table(rows: Iterable[Row]) -> str:
    """Return the rows with headings."""
    head = f"{'':<22}" + "".join(f"{heading:>9}" for heading in HEADINGS)
    return "\n".join([head, *map(str, rows)])
