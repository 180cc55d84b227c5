"""Every class of faults in turns, with a seed and a budget.

Each class prints how many faults it injected, how many were survived (the right answer, or an error
of ours that names who is at fault), and how many lost or spoiled something, ended in an exception
that is not ours, named the wrong rank or none, or hung; and the longest any of them took.
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
    """The run was over before it came to where the fault was to be."""


class NotHere(Exception):
    """A class of faults cannot be injected on this machine."""


class Faults(Protocol):
    """One class of faults; what it starts may serve many injections."""

    def inject(self, work: Path, chance: random.Random) -> float | None:
        """Inject one fault.

        Args:
            work: An empty folder, removed afterwards.
            chance: Decides everything that is left to chance.

        Returns:
            Seconds until the fault was over; ``None``: as long as the call takes.

        Raises:
            Found: It was not survived.
            Missed: Nothing was injected this time.
            NotHere: It cannot be tried here.
        """
        ...

    def close(self) -> None:
        """End what was started."""
        ...


@attrs.define(kw_only=True)
class Row:
    """What became of one class of faults."""

    name: str
    tried: int = 0
    injected: int = 0
    counts: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(KINDS, 0))
    worst_s: float = 0.0
    used_s: float = 0.0
    why_not: str = ""
    """Why it was not tried, or not to the end."""

    @property
    def bad(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        cells = (self.injected, max(0, self.injected - self.bad), *self.counts.values())
        numbers = "".join(f"{cell:>9}" for cell in cells) + f"{self.worst_s:>9.1f}"
        told = self.why_not or ("" if self.injected else "the budget allowed none")
        return f"{self.name:<22}{numbers}{f'  {told}' if told else ''}"


def attack(name: str, faults: Faults, row: Row, seed: int, number: int) -> None:
    """Inject one fault, and count what became of it."""
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
    """Start what injects the faults of a class; whether that went well."""
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
    """Attack with each class in turns, whichever has had the least time, until time is over.

    Args:
        classes: What makes the faults of each class, by name.
        seed: Fixes every injection by its class and number.
        minutes: When to begin no further injection.
        first: Number of the first injection of each class.
        times: Injections of each class at most.
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
    """The rows under their headings."""
    head = f"{'':<22}" + "".join(f"{heading:>9}" for heading in HEADINGS)
    return "\n".join([head, *map(str, rows)])
