"""Draw memory estimates as stacked bars. matplotlib is imported only when drawing."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.palette import ALARM, FAINT, INK, PAPER, ROOM, component_colours, empty_figure
from zerotune.errors import InvalidValueError
from zerotune.plan.memory.items import Estimate
from zerotune.plan.text.memory import (
    PLACE_NAMES,
    RankBudget,
    estimate_data,
    left_words,
    peak_words,
    unit_of,
)
from zerotune.plan.text.plan import Data
from zerotune.plan.write import write_whole

_FORMATS: Final = ("png", "pdf", "svg")
PIXELS_PER_INCH: Final = 150
_KEYS: Final = 4
"""Columns of a legend."""

# Inches.
_WIDTH: Final = 9.0
_BAR: Final = 1.05
"""Height of a bar with its title and its scale."""
_LINE: Final = 0.2


@attrs.frozen(kw_only=True)
class Panel:
    """A stacked bar with a title and a legend."""

    title: str
    parts: Sequence[tuple[str, float, str]]
    """Name, size and colour of each segment, from left to right."""
    unit: str
    note: str = ""
    """Text to the right of the title."""
    limit: float | None = None
    """Position of a vertical line across the bar, in ``unit``, up to which the ground is shaded."""
    colour: str = INK
    """Colour of ``note`` and of the line at ``limit``."""

    def _draw(self, axes: Any) -> None:
        end = 0.0
        for name, value, colour in self.parts:
            label = f"{name} {value:.2f}"
            axes.barh(
                0, value, 1, left=end, color=colour, edgecolor=PAPER, linewidth=0.8, label=label
            )
            end += value
        if self.limit is not None:
            axes.axvline(self.limit, color=self.colour, linewidth=2.2)
            axes.barh(0, self.limit, 1, color=ROOM, zorder=0)
        axes.set(xlim=(0, max(end, self.limit or 0) * 1.02 or 1), ylim=(-0.5, 0.5), yticks=[])
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.tick_params(axis="x", colors=FAINT, labelsize=8, length=3)
        axes.xaxis.set_major_formatter(lambda tick, _: f"{tick:g}" if tick else f"0 {self.unit}")
        words = {"fontsize": 9, "fontweight": "bold", "parse_math": False}
        axes.set_title(self.title, loc="left", color=INK, **words)
        axes.set_title(self.note, loc="right", color=self.colour, **words)
        if self.parts:
            legend = axes.legend(
                loc="upper left",
                bbox_to_anchor=(0, 0),
                # In units of the font size: leaves room for the scale of the bar.
                borderaxespad=2.3,
                ncols=_KEYS,
                frameon=False,
                fontsize=8.5,
                handlelength=1,
                handleheight=1,
                borderpad=0,
            )
            for text in legend.get_texts():
                text.set_parse_math(False)


def plot_memory(
    estimate: Estimate, path: str | os.PathLike[str], *, budget: RankBudget | None = None
) -> Path:
    """Draw peak device, host and NVMe memory as stacked bars in a PNG, PDF or SVG file.

    Each bar has its own scale, which starts at zero and includes the budget, if there is one.

    Args:
        estimate: The memory estimate.
        path: The file to write; its suffix determines the format (PNG if it has none). Its folder
            is created if it is missing, and an existing file is replaced.
        budget: Bytes available to each rank, as a mapping with the keys ``"device"``, ``"host"``
            and ``"nvme"``.

    Returns:
        ``path``.
    """
    kind = Path(path).suffix.lower().removeprefix(".") or _FORMATS[0]
    if kind not in _FORMATS:
        raise InvalidValueError(
            "is not a supported image format",
            f"end the name with one of {', '.join(f'.{one}' for one in _FORMATS)}",
            "path",
            str(path),
        )
    data = estimate_data(estimate, budget)
    heading = f"Memory per rank: {data['plan']['title']}\n{data['subject']}"
    figure = draw_panels(heading, memory_panels(data))
    content = io.BytesIO()
    # Without a date, so that equal estimates give equal files.
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    figure.savefig(content, format=kind, dpi=PIXELS_PER_INCH, metadata=undated)
    return write_whole(path, content.getvalue())


def memory_panels(data: Data) -> list[Panel]:
    """Return a panel for each kind of memory in ``estimate_data`` that is used or has a budget."""
    unit, size = unit_of(data)
    colours = component_colours(
        one["component"] for held in data["places"].values() for one in held["components"]
    )
    panels = []
    for fit in data["fits"]:
        held = data["places"][fit["place"]]
        when = f" {peak_words(held)}" if fit["needed"] else ""
        merged: dict[str, int] = {}
        for one in held["components"]:
            if one["at_peak"] and one["nbytes"]:
                merged[one["component"]] = merged.get(one["component"], 0) + one["nbytes"]
        panel = Panel(
            title=f"{PLACE_NAMES[fit['place']]}: {fit['needed'] / size:.2f} {unit}{when}",
            parts=[
                (name, nbytes / size, colours[name])
                for name, nbytes in sorted(merged.items(), key=lambda pair: -pair[1])
            ],
            unit=unit,
        )
        if fit["available"] is not None:
            left = (fit["available"] - fit["needed"]) / size
            panel = attrs.evolve(
                panel,
                note=f"budget {fit['available'] / size:.2f} {unit}, {left_words(left)}",
                limit=fit["available"] / size,
                colour=INK if left >= 0 else ALARM,
            )
        panels.append(panel)
    return panels


def draw_panels(heading: str, panels: Sequence[Panel]) -> Any:
    """Stack panels vertically in a matplotlib figure."""
    lines = [line for each in heading.split("\n") for line in textwrap.wrap(each, 120)]
    keys = sum(-(-len(panel.parts) // _KEYS) for panel in panels)
    height = _LINE * (len(lines) + 1 + keys) + _BAR * len(panels)
    figure = empty_figure(figsize=(_WIDTH, height), facecolor=PAPER, layout="constrained")
    # Names may hold dollar signs, which would start a formula.
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10, color=INK, parse_math=False)
    figure.get_layout_engine().set(h_pad=0.07, w_pad=0.1)
    if panels:
        places = figure.subplots(len(panels), 1, squeeze=False)
        for axes, panel in zip(places[:, 0], panels, strict=True):
            panel._draw(axes)
    return figure
