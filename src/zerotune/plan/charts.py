"""Memory estimates as pictures: a stacked bar for each place, each component named beside it.

matplotlib draws bars, scales and text; it does not know where labels of narrow segments go without
covering each other, so that ``arrange`` finds that out first. matplotlib is loaded only when a
picture is made.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.palette import (
    ALARM,
    FAINT,
    INK,
    LINE,
    PAPER,
    ROOM,
    component_colours,
    empty_figure,
    ink_on,
)
from zerotune.errors import InvalidValueError
from zerotune.plan.memory.model import MemoryEstimate
from zerotune.plan.text import (
    PLACE_NAMES,
    Fit,
    RankBudget,
    describe,
    estimate_unit,
    fits,
    merged,
    peak_words,
    subject,
)
from zerotune.plan.write import write_whole

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


# -- The picture.


_FORMATS: Final = ("png", "pdf", "svg")

# Inches.
_WIDTH: Final = 9.0
_MARGIN: Final = 0.35
_ACROSS: Final = _WIDTH - 2 * _MARGIN
_HEADING: Final = 0.75
_TITLE: Final = 0.3
_ROW: Final = 0.19
_BAR: Final = 0.46
_SCALE: Final = 0.42
_LINE: Final = 0.2

_PIXELS_PER_INCH: Final = 150
_FONT: Final = 9


def plot_memory(
    estimate: MemoryEstimate, path: str | os.PathLike[str], *, budget: RankBudget | None = None
) -> Path:
    """Write the peak of each place as a stacked bar, by component, as PNG, PDF or SVG.

    Each place has a scale of its own that starts at zero and holds its budget if there is one.

    Args:
        estimate: What is needed.
        path: The file, whose ending says the format (none: PNG); its folder is made, and a
            picture already there is replaced.
        budget: Bytes per rank there are at each place.

    Returns:
        ``path``.

    Raises:
        InvalidValueError: Another ending.
        MissingDependencyError: matplotlib is not installed.
        PlanFileError: The file cannot be written.
    """
    kind = picture_format(path)
    figure = memory_figure(estimate, budget=budget)
    picture = io.BytesIO()
    # Without the day, so that the same estimate gives the same file.
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    figure.savefig(picture, format=kind, dpi=_PIXELS_PER_INCH, metadata=undated)
    return write_whole(path, picture.getvalue())


def memory_figure(
    estimate: MemoryEstimate,
    *,
    budget: RankBudget | None = None,
    measured: RankBudget | None = None,
    below: float = 0.0,
) -> Any:
    """The picture as a matplotlib figure, to which more may be added.

    Args:
        estimate: What is needed.
        budget: Bytes per rank there are at each place.
        measured: Bytes per rank that were seen at each place, where no budget is shown.
        below: Inches to be left free at the bottom.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure, measure = _figure()
    unit = estimate_unit(estimate, budget)
    seen: RankBudget = measured or {}
    panels = [
        _panel(estimate, fit, unit, measure, seen=seen.get(fit.place))
        for fit in fits(estimate, budget)
    ]
    heading = textwrap.wrap(subject(estimate), 118)
    top = _HEADING + _LINE * len(heading)
    height = top + sum(panel.height for panel in panels) + below
    figure.set_size_inches(_WIDTH, height)
    _write_heading(figure, estimate, heading, height)
    for panel in panels:
        bar = top + _TITLE + panel.bar.rows * _ROW
        place = (_MARGIN / _WIDTH, 1 - (bar + _BAR) / height, _ACROSS / _WIDTH, _BAR / height)
        _draw(figure.add_axes(place), panel)
        top += panel.height
    return figure


def picture_format(path: str | os.PathLike[str]) -> str:
    """The format that a picture's name asks for.

    Raises:
        InvalidValueError: One that is not written.
    """
    ending = Path(path).suffix.lower().removeprefix(".") or _FORMATS[0]
    if ending not in _FORMATS:
        raise InvalidValueError(
            "is no format of pictures that is written",
            key="path",
            value=str(path),
            fix=f"end the name with one of {', '.join(f'.{one}' for one in _FORMATS)}",
        )
    return ending


@attrs.frozen(kw_only=True)
class _Panel:
    """One place, ready to be drawn."""

    fit: Fit
    title: str
    phase: str
    unit: tuple[str, int]
    full: float
    """Bytes across the panel."""
    bar: Bar
    colours: dict[str, str]
    seen: int | None
    """Bytes that were measured."""

    @property
    def height(self) -> float:
        return _TITLE + self.bar.rows * _ROW + _BAR + _SCALE

    def amount(self, inches: float) -> float:
        """What stands so far from the left, in the panel's unit."""
        return inches / _ACROSS * self.full / self.unit[1]


def _panel(
    estimate: MemoryEstimate, fit: Fit, unit: tuple[str, int], measure: Measure, *, seen: int | None
) -> _Panel:
    peak = estimate.peak(fit.place)
    full = max(fit.needed, fit.available or 0, seen or 0) * 1.02
    name = PLACE_NAMES[fit.place]
    return _Panel(
        fit=fit,
        title=f"{name[0].upper()}{name[1:]}   {fit.needed / unit[1]:.2f} {unit[0]}",
        phase=peak_words(estimate, fit.place) if fit.needed else "",
        unit=unit,
        full=full,
        bar=arrange(
            merged(peak.items),
            full=full,
            across=_ACROSS,
            amount=lambda nbytes: f"{nbytes / unit[1]:.2f}",
            measure=measure,
        ),
        colours=component_colours(item.component for item in estimate.items),
        seen=seen,
    )


def _figure() -> tuple[Any, Measure]:
    figure = empty_figure(dpi=100, facecolor=PAPER)
    from matplotlib.font_manager import FontProperties

    renderer = figure.canvas.get_renderer()
    font = FontProperties(size=_FONT)

    def measure(text: str) -> float:
        widths = [
            renderer.get_text_width_height_descent(line, font, ismath=False)[0]
            for line in text.split("\n")
        ]
        return float(max(widths)) / 100

    return figure, measure


# Names may hold dollar signs, which would start a formula.
_TEXT: Final[dict[str, Any]] = {"fontsize": _FONT, "color": INK, "parse_math": False}


def _write_heading(figure: Any, estimate: MemoryEstimate, lines: list[str], height: float) -> None:
    left, right, top = _MARGIN / _WIDTH, 1 - _MARGIN / _WIDTH, 1 - 0.38 / height
    figure.text(left, top, "Memory per rank", **_TEXT | {"fontsize": 13}, fontweight="bold")
    figure.text(right, top, describe(estimate.resolved), ha="right", **_TEXT)
    for number, line in enumerate(lines):
        below = 1 - (0.66 + number * _LINE) / height
        figure.text(left, below, line, **_TEXT | {"color": FAINT})


def _draw(axes: Any, panel: _Panel) -> None:
    axes.set(xlim=(0, panel.amount(_ACROSS)), ylim=(0, 1), yticks=[])
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(axis="x", colors=FAINT, labelsize=8, length=3)
    axes.locator_params(axis="x", nbins=8, steps=[1, 2, 5, 10])
    axes.xaxis.set_major_formatter(lambda tick, _: f"{tick:g}" if tick else f"0 {panel.unit[0]}")
    _draw_titles(axes, panel)
    for segment in panel.bar.segments:
        _draw_segment(axes, panel, segment)


def _draw_segment(axes: Any, panel: _Panel, segment: Segment) -> None:
    colour = panel.colours.get(segment.component, LINE)
    middle, width = panel.amount(segment.middle), panel.amount(segment.width)
    axes.barh(
        0.5, width, 1, left=panel.amount(segment.left), color=colour, edgecolor=PAPER, linewidth=0.8
    )
    centred = {"va": "center", "linespacing": 1.1}
    if segment.row is None:
        ink = _TEXT | {"color": ink_on(colour)}
        axes.text(middle, 0.5, segment.label, ha="center", **ink | centred)
        return
    side, shift = ("right", -3) if panel.bar.leftwards else ("left", 3)
    # Points above the bar: 72 an inch.
    rise = 72 * (0.11 + segment.row * _ROW)
    axes.annotate(
        "",
        (middle, 0.87),
        (0, rise + 0.13 * _BAR * 72),
        textcoords="offset points",
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
    )
    axes.annotate(
        segment.label,
        (middle, 1),
        (shift, rise),
        textcoords="offset points",
        ha=side,
        **_TEXT | centred,
    )


def _draw_titles(axes: Any, panel: _Panel) -> None:
    name, size = panel.unit
    above = 72 * (panel.bar.rows * _ROW + 0.12)
    at = {"textcoords": "offset points", "va": "baseline", "annotation_clip": False}
    bold = _TEXT | {"fontweight": "bold"}
    axes.annotate(panel.title, (0, 1), (0, above), **at | bold | {"fontsize": 10.5})
    faint = _TEXT | {"color": FAINT}
    axes.annotate(panel.phase, (panel.amount(1.75), 1), (0, above), **at | faint)
    available = panel.fit.available
    if available is None:
        _draw_seen(axes, panel, above)
        return
    left = available - panel.fit.needed
    rest = f"{left / size:.2f} free" if left >= 0 else f"over by {-left / size:.2f}"
    colour = INK if left >= 0 else ALARM
    axes.barh(0.5, available / size, 1, color=ROOM, zorder=0)
    axes.plot([available / size] * 2, [-0.1, 1.1], color=colour, linewidth=2.2, clip_on=False)
    axes.annotate(
        f"budget {available / size:.2f} {name}, {rest}",
        (panel.amount(_ACROSS), 1),
        (0, above),
        ha="right",
        **at | bold | {"color": colour},
    )


def _draw_seen(axes: Any, panel: _Panel, above: float) -> None:
    if panel.seen is None:
        return
    name, size = panel.unit
    seen = panel.seen / size
    axes.plot([seen] * 2, [-0.1, 1.1], color=INK, linewidth=2.2, clip_on=False)
    axes.annotate(
        f"measured {seen:.2f} {name}",
        (panel.amount(_ACROSS), 1),
        (0, above),
        ha="right",
        textcoords="offset points",
        va="baseline",
        annotation_clip=False,
        **_TEXT | {"fontweight": "bold"},
    )
