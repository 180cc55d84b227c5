"""Where the segments of a memory bar and their labels go; sizes in inches, from the bar's left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs

_GAP: Final = 0.1
_SLIVER: Final = 0.006
"""Share of a bar below which segments are not told apart."""

Measure = Callable[[str], float]
"""Width of a text, that of its widest line."""


@attrs.frozen(kw_only=True)
class Segment:
    """One component in a bar."""

    component: str
    nbytes: int
    left: float
    width: float
    label: str
    row: int | None = None
    """Row of the label above the bar, 0 the lowest; ``None``: the label is in the segment."""

    @property
    def middle(self) -> float:
        """Where the line to its label starts."""
        return self.left + self.width / 2


@attrs.frozen(kw_only=True)
class Bar:
    """The segments of one place, labelled."""

    segments: tuple[Segment, ...]
    leftwards: bool
    """Whether the labels above the bar end, instead of begin, at their lines."""

    @property
    def rows(self) -> int:
        """Rows of labels above the bar."""
        return 1 + max((one.row for one in self.segments if one.row is not None), default=-1)


def arrange(
    held: Sequence[tuple[str, int]],
    *,
    full: float,
    across: float,
    amount: Callable[[int], str],
    measure: Measure,
) -> Bar:
    """Lay out a bar: labels inside their segments where they fit, the others in rows above.

    Args:
        held: Components and their bytes, largest first.
        full: Bytes that a whole bar stands for.
        across: Inches of a whole bar.
        amount: Text for a number of bytes.
        measure: Width of a text in inches.
    """
    segments = []
    left = 0.0
    for component, nbytes in _without_slivers(held, full):
        width = nbytes / full * across
        flat, stacked = (f"{component}{blank}{amount(nbytes)}" for blank in " \n")
        inside = next((text for text in (flat, stacked) if measure(text) + _GAP <= width), None)
        segments.append(
            Segment(
                component=component,
                nbytes=nbytes,
                left=left,
                width=width,
                label=inside or flat,
                row=0 if inside is None else None,
            )
        )
        left += width
    return _in_rows(segments, across, measure)


def _without_slivers(held: Sequence[tuple[str, int]], full: float) -> list[tuple[str, int]]:
    shown = [(name, nbytes) for name, nbytes in held if nbytes > _SLIVER * full]
    slivers = [nbytes for _, nbytes in held if 0 < nbytes <= _SLIVER * full]
    if len(slivers) < 2:
        return [(name, nbytes) for name, nbytes in held if nbytes]
    return [*shown, (f"{len(slivers)} smaller ones", sum(slivers))]


def _in_rows(segments: Sequence[Segment], across: float, measure: Measure) -> Bar:
    above = [one for one in segments if one.row is not None]
    leftwards = any(one.middle + measure(one.label) > across for one in above)
    # Going from where the labels point to, each one goes above those it would cover, so that
    # no line to a label crosses another label.
    ordered = above if leftwards else above[::-1]
    rows: dict[str, int] = {}
    for position, one in enumerate(ordered):
        reach = measure(one.label) + _GAP
        covered = [
            rows[other.component]
            for other in ordered[:position]
            if abs(other.middle - one.middle) < reach
        ]
        rows[one.component] = max(covered, default=-1) + 1
    placed = (attrs.evolve(one, row=rows.get(one.component)) for one in segments)
    return Bar(segments=tuple(placed), leftwards=leftwards)
