"""Where the segments of a memory bar and their labels go; sizes in inches, from the bar's left."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune.errors import MissingDependencyError
from zerotune.plan.memory.model import EstimateValue
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


# -- Memory estimates as pictures. matplotlib is loaded only when a picture is made.


# Paul Tol's "muted" scheme: colour-blind readers tell it apart, and print keeps its lightness.
_COLOURS: Final = {
    "optimizer states": "#332288",
    "weights": "#117733",
    "master weights": "#88CCEE",
    "gradients": "#DDCC77",
    "activations": "#CC6677",
    "EMA": "#44AA99",
    "buckets": "#999933",
    "temporaries": "#882255",
    "staging": "#AA4499",
    "context": "#BBBBBB",
    "runtime": "#777777",
}
_SPARE_COLOURS: Final = ("#C9A0DC", "#555555", "#EE9A6A", "#A3A3A3")
_INK: Final = "#222222"
_FAINT: Final = "#767676"
_ALARM: Final = "#b2182b"
_ROOM: Final = "#f0f0f0"

# Inches.
_WIDTH: Final = 9.0
_MARGIN: Final = 0.35
_ACROSS: Final = _WIDTH - 2 * _MARGIN
_TITLE: Final = 0.34
_ROW: Final = 0.19
_BAR: Final = 0.46
_SCALE: Final = 0.48
_LINE: Final = 0.2

_PIXELS_PER_INCH: Final = 150
_FONT: Final = 9


def plot_memory(
    estimate: EstimateValue, path: str | os.PathLike[str], *, budget: RankBudget | None = None
) -> Path:
    """Write the peak of each place as a stacked bar, by component, as PNG.

    Each place has a scale of its own that starts at zero and holds its budget if there is one.

    Args:
        estimate: What is needed.
        path: The file; its folder is made, and a picture already there is replaced.
        budget: Bytes per rank there are at each place.

    Returns:
        ``path``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        PlanFileError: The file cannot be written.
    """
    figure, measure = _figure()
    unit = estimate_unit(estimate, budget)
    panels = [_panel(estimate, fit, unit, measure) for fit in fits(estimate, budget)]
    heading = textwrap.wrap(subject(estimate), 118)
    top = 0.75 + _LINE * len(heading)
    height = top + sum(panel.height for panel in panels)
    figure.set_size_inches(_WIDTH, height)
    # One sheet measured in inches, so that labels can be placed before anything is drawn.
    sheet = figure.add_axes((0, 0, 1, 1))
    sheet.set(xlim=(0, _WIDTH), ylim=(height, 0))
    sheet.axis("off")
    _draw_heading(sheet, estimate, heading)
    for panel in panels:
        _draw_panel(sheet, panel, top)
        top += panel.height
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=_PIXELS_PER_INCH)
    return write_whole(path, picture.getvalue())


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

    @property
    def height(self) -> float:
        return _TITLE + self.bar.rows * _ROW + _BAR + _SCALE

    def inches(self, nbytes: float) -> float:
        """Where an amount ends, from the left edge of the sheet."""
        return _MARGIN + nbytes / self.full * _ACROSS


def _panel(estimate: EstimateValue, fit: Fit, unit: tuple[str, int], measure: Measure) -> _Panel:
    peak = estimate.peak(fit.place)
    full = max(fit.needed, fit.available or 0) * 1.02
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
        colours=_colours(estimate),
    )


def _colours(estimate: EstimateValue) -> dict[str, str]:
    """One colour for each component; those of zerotune's own model always have the same."""
    unknown = [name for name, _ in merged(estimate.items) if name not in _COLOURS]
    spare = {name: _SPARE_COLOURS[i % len(_SPARE_COLOURS)] for i, name in enumerate(unknown)}
    return {**_COLOURS, **spare}


def _figure() -> tuple[Any, Measure]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.font_manager import FontProperties
    except ImportError as error:
        raise MissingDependencyError(
            f"plots are drawn by matplotlib ({error})",
            key="matplotlib",
            fix="pip install 'zerotune[plot]'",
        ) from error
    # Not pyplot: that would choose a backend for the whole process and keep the figure.
    figure = Figure(dpi=100)
    renderer = FigureCanvasAgg(figure).get_renderer()
    font = FontProperties(size=_FONT)

    def measure(text: str) -> float:
        widths = [
            renderer.get_text_width_height_descent(line, font, ismath=False)[0]
            for line in text.split("\n")
        ]
        return float(max(widths)) / 100

    return figure, measure


def _write(sheet: Any, x: float, y: float, text: str, **style: Any) -> None:
    defaults = {"fontsize": _FONT, "color": _INK, "va": "center", "ha": "left"}
    # Names may hold dollar signs, which would start a formula.
    sheet.text(x, y, text, parse_math=False, **{**defaults, **style})


def _draw_heading(sheet: Any, estimate: EstimateValue, lines: list[str]) -> None:
    _write(sheet, _MARGIN, 0.32, "Memory per rank", fontsize=13, fontweight="bold")
    _write(sheet, _WIDTH - _MARGIN, 0.33, describe(estimate.resolved), ha="right")
    for number, line in enumerate(lines):
        _write(sheet, _MARGIN, 0.62 + number * _LINE, line, color=_FAINT)


def _draw_panel(sheet: Any, panel: _Panel, top: float) -> None:
    _write(sheet, _MARGIN, top, panel.title, fontsize=10.5, fontweight="bold")
    bar_top = top + _TITLE - 0.12 + panel.bar.rows * _ROW
    _draw_budget(sheet, panel, top, bar_top)
    for segment in panel.bar.segments:
        _draw_segment(sheet, panel, segment, bar_top)
    _draw_scale(sheet, panel, bar_top + _BAR)


def _draw_segment(sheet: Any, panel: _Panel, segment: Segment, bar_top: float) -> None:
    colour = panel.colours.get(segment.component, _SPARE_COLOURS[-1])
    left, middle = _MARGIN + segment.left, _MARGIN + segment.middle
    _box(sheet, left, bar_top, segment.width, color=colour, edgecolor="white")
    if segment.row is None:
        ink = "white" if _is_dark(colour) else _INK
        _write(
            sheet,
            middle,
            bar_top + _BAR / 2,
            segment.label,
            ha="center",
            color=ink,
            linespacing=1.1,
        )
        return
    height = bar_top - 0.11 - segment.row * _ROW
    sheet.plot([middle, middle], [bar_top + 0.06, height], color=_INK, linewidth=0.6)
    side, shift = ("right", -0.04) if panel.bar.leftwards else ("left", 0.04)
    _write(sheet, middle + shift, height, segment.label, ha=side)


def _draw_budget(sheet: Any, panel: _Panel, top: float, bar_top: float) -> None:
    name, size = panel.unit
    available = panel.fit.available
    _write(sheet, _MARGIN + 1.75, top, panel.phase, color=_FAINT)
    if available is not None:
        left = available - panel.fit.needed
        rest = f"{left / size:.2f} free" if left >= 0 else f"over by {-left / size:.2f}"
        colour = _INK if left >= 0 else _ALARM
        aside = f"budget {available / size:.2f} {name}, {rest}"
        _box(sheet, _MARGIN, bar_top, available / panel.full * _ACROSS, color=_ROOM)
        place = panel.inches(available)
        ends = [bar_top - 0.05, bar_top + _BAR + 0.05]
        sheet.plot([place, place], ends, color=colour, linewidth=2.2, zorder=4)
        _write(sheet, _WIDTH - _MARGIN, top, aside, ha="right", color=colour, fontweight="bold")


def _draw_scale(sheet: Any, panel: _Panel, bottom: float) -> None:
    from matplotlib.ticker import MaxNLocator

    name, size = panel.unit
    sheet.plot([_MARGIN, _WIDTH - _MARGIN], [bottom, bottom], color=_FAINT, linewidth=0.8)
    for tick in MaxNLocator(nbins=8, steps=[1, 2, 5, 10]).tick_values(0, panel.full / size):
        if tick * size > panel.full:
            break
        place = panel.inches(tick * size)
        sheet.plot([place, place], [bottom, bottom + 0.05], color=_FAINT, linewidth=0.8)
        number = f"{tick:g}" if tick else f"0 {name}"
        side = "center" if tick else "left"
        _write(sheet, place, bottom + 0.14, number, color=_FAINT, ha=side, fontsize=8)


def _box(sheet: Any, left: float, top: float, width: float, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    fill = style.pop("color")
    sheet.add_patch(
        Rectangle((left, top), width, _BAR, facecolor=fill, linewidth=0.8, zorder=2, **style)
    )


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 130
