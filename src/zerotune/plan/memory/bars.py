"""Memory as bars of letters, for terminals and logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from zerotune.plan.memory.sizes import common_unit
from zerotune.plan.memory.values import PLACES, MemoryEstimate, MemoryItem, Place

_FREE: Final = "."
_LIMIT: Final = "|"
_NARROWEST: Final = 10
_SPARE_LETTERS: Final = "0123456789"

Budget = Mapping[Place, int]
"""Bytes there are at each place, per rank; a missing place is not limited."""


@attrs.frozen(kw_only=True)
class Fit:
    """What one place needs at its peak, against what there is."""

    place: Place
    needed: int
    """Bytes per rank."""
    available: int | None
    """Bytes per rank; ``None``: not limited."""

    @property
    def fits(self) -> bool:
        """Whether there is enough."""
        return self.available is None or self.needed <= self.available

    def words(self, unit: tuple[str, int]) -> str:
        """Need, budget and what is left or missing, in ``unit``."""
        name, size = unit
        if self.available is None:
            return f"{self.needed / size:.2f} {name}"
        left = self.available - self.needed
        rest = f"{left / size:.2f} free" if left >= 0 else f"over by {-left / size:.2f}"
        return f"{self.needed / size:.2f} of {self.available / size:.2f} {name}, {rest}"


def fits(estimate: MemoryEstimate, budget: Budget | None = None) -> tuple[Fit, ...]:
    """Every place that is used or limited, with its peak and its budget."""
    limits: Budget = budget or {}
    every = (
        Fit(place=place, needed=estimate.peak(place).nbytes, available=limits.get(place))
        for place in PLACES
    )
    return tuple(fit for fit in every if fit.needed or fit.available)


def estimate_unit(estimate: MemoryEstimate, budget: Budget | None = None) -> tuple[str, int]:
    """The unit in which every number of an estimate is shown: its name and its bytes."""
    return common_unit(fit.needed for fit in fits(estimate, budget))


def memory_bars(estimate: MemoryEstimate, *, budget: Budget | None = None, width: int = 100) -> str:
    """One bar of letters per place, at its peak.

    A full bar is the budget of the place, or, where there is none, the largest need of those
    places; a bar that is over its budget shows where the budget ends (``|``). The letters are
    those of ``component_letters``.

    Args:
        estimate: What is needed.
        budget: Bytes per rank there are at each place.
        width: Columns of a line.
    """
    every = fits(estimate, budget)
    unit = estimate_unit(estimate, budget)
    letters = component_letters(estimate)
    words = [fit.words(unit) for fit in every]
    columns = max(width - max(map(len, words), default=0) - len("device  []  "), _NARROWEST)
    unlimited = max((fit.needed for fit in every if fit.available is None), default=0)
    lines = []
    for fit, text in zip(every, words, strict=True):
        held = [(letters[name], size) for name, size in merged(estimate.peak(fit.place).items)]
        full = max(fit.needed, unlimited if fit.available is None else fit.available)
        lines.append(f"{fit.place:<8}[{_bar(held, fit, full, columns)}]  {text}")
    return "\n".join(lines)


def component_letters(estimate: MemoryEstimate) -> dict[str, str]:
    """One letter for each component, an initial where possible, largest component first."""
    letters: dict[str, str] = {}
    for component, _ in merged(estimate.items):
        letters[component] = _letter(component, set(letters.values()))
    return letters


def merged(items: Sequence[MemoryItem]) -> list[tuple[str, int]]:
    """Components and their bytes, those of the same name added up, largest first."""
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.component] = sizes.get(item.component, 0) + item.nbytes
    return sorted(sizes.items(), key=lambda pair: -pair[1])


def _letter(component: str, taken: set[str]) -> str:
    upper = component.upper()
    initials = [word[0] for word in upper.split()]
    candidates = [*initials, *upper, *_SPARE_LETTERS]
    usable = (one for one in candidates if one.isascii() and one.isalnum() and one not in taken)
    return next(usable, "?")


def _bar(held: Sequence[tuple[str, int]], fit: Fit, full: int, columns: int) -> str:
    bar = ""
    total = 0
    for letter, nbytes in held:
        total += nbytes
        # From the sum, so that rounding cannot add up along the bar.
        bar = bar.ljust(round(total / full * columns), letter)
    bar = bar.ljust(columns, _FREE)
    if fit.fits or fit.available is None:
        return bar
    limit = min(int(fit.available / full * columns), columns - 1)
    return f"{bar[:limit]}{_LIMIT}{bar[limit + 1 :]}"
