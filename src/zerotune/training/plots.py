"""Pictures of a run. matplotlib is loaded only here, and only when a picture is made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.files import system_errors
from zerotune._util.palette import HEADER, LINE, PALE, PAPER, STRONG, empty_figure
from zerotune.errors import DataError, TrainingError

_WINDOW: Final = 20
_PIXELS_PER_INCH: Final = 120
_WIDTH: Final = 10.0
"""Inches across tables."""


def plot_loss(
    path: str | os.PathLike[str], *, steps: Sequence[int], losses: Sequence[float]
) -> Path:
    """Write the loss curve, each step and a running mean, as PNG.

    Args:
        path: The file; its folder is made.
        steps: Step numbers, ascending.
        losses: As many losses.

    Returns:
        ``path``.

    Raises:
        DataError: Nothing to plot, or lengths differ.
        MissingDependencyError: matplotlib is not installed.
    """
    if not losses or len(losses) != len(steps):
        raise DataError(
            f"a curve needs as many losses as steps, at least one; {len(losses)} losses given",
            key="steps",
            value=len(steps),
        )
    figure = _figure(width=7.0, height=4.0)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color=PALE, linewidth=0.8, label="each step")
    means = [
        sum(losses[max(0, end - _WINDOW) : end]) / min(end, _WINDOW)
        for end in range(1, len(losses) + 1)
    ]
    axes.plot(steps, means, color=STRONG, linewidth=1.8, label=f"mean of {_WINDOW} steps")
    axes.set(xlabel="optimizer step", ylabel="loss", title="Training loss")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    return _write(figure, path)


@attrs.frozen(kw_only=True)
class TablePicture:
    """A table to be drawn; the name in its first column has its colour before it."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    widths: tuple[float, ...]
    """Shares of the picture: of the colours, then of each column."""
    colours: Mapping[str, str]


def plot_tables(path: str | os.PathLike[str], tables: Sequence[TablePicture]) -> Path:
    """Write tables below each other as PNG.

    Args:
        path: The file; its folder is made.
        tables: From top to bottom.

    Returns:
        ``path``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    heights = [len(table.rows) + 1 for table in tables]
    figure = _figure(width=_WIDTH, height=0.32 * sum(heights) + 0.6 * len(tables))
    places = figure.subplots(len(tables), 1, height_ratios=heights, squeeze=False)
    for axes, table in zip(places[:, 0], tables, strict=True):
        _draw(axes, table)
    return _write(figure, path)


def plot_below(path: str | os.PathLike[str], figure: Any, table: TablePicture) -> Path:
    """Write a figure that has left ``room_of(table)`` at its bottom, with the table there, as PNG.

    Args:
        path: The file; its folder is made.
        figure: Of matplotlib.
        table: What goes below.

    Returns:
        ``path``.
    """
    width, height = figure.get_size_inches()
    margin, title = 0.35, 0.35
    rows = room_of(table) - margin - title
    place = (margin / width, margin / height, 1 - 2 * margin / width, rows / height)
    _draw(figure.add_axes(place), table)
    # As wide as tables alone.
    return _write(figure, path, dpi=_PIXELS_PER_INCH * _WIDTH / width)


def room_of(table: TablePicture) -> float:
    """Inches that a table takes below a figure."""
    return 0.7 + 0.32 * (len(table.rows) + 1)


def _figure(*, width: float, height: float) -> Any:
    return empty_figure(figsize=(width, height), layout="constrained")


def _draw(axes: Any, wanted: TablePicture) -> None:
    axes.axis("off")
    axes.set_title(wanted.title, loc="left", fontsize=11, fontweight="bold")
    colours = [wanted.colours.get(row[0], PAPER) for row in wanted.rows]
    table = axes.table(
        cellText=[("", *row) for row in wanted.rows],
        cellColours=[
            [colour, *[PAPER] * len(row)] for colour, row in zip(colours, wanted.rows, strict=True)
        ],
        colLabels=("", *wanted.header),
        colWidths=wanted.widths,
        cellLoc="left",
        colLoc="left",
        bbox=(0, 0, sum(wanted.widths), 1),
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for (row, _), cell in table.get_celld().items():
        cell.PAD = 0.02
        cell.set_edgecolor(LINE)
        if row == 0:
            cell.set_facecolor(HEADER)
            cell.set_text_props(fontweight="bold")


def _write(figure: Any, path: str | os.PathLike[str], *, dpi: float = _PIXELS_PER_INCH) -> Path:
    file = Path(path)
    with system_errors(TrainingError, file, "the picture cannot be written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=dpi, format="png")
    return file
