"""Pictures of a run. matplotlib is loaded only here, and only when a picture is made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

from zerotune._util.palette import (
    HEADER,
    LINE,
    PALE,
    PAPER,
    PHASES,
    STRONG,
    component_colours,
)
from zerotune.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    from zerotune.training.report import Report


_WINDOW: Final = 20
_NOTE: Final = 88
"""Letters of a note that fit its column."""
_PIXELS_PER_INCH: Final = 120


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


def plot_report(path: str | os.PathLike[str], report: Report) -> Path:
    """Write the memory table and the split of the step time as PNG.

    Args:
        path: The file; its folder is made.
        report: What ``Trainer.report`` gave.

    Returns:
        ``path``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    memory = [(*row[:3], shorten(row[3], _NOTE, placeholder=" …")) for row in report.memory_rows()]
    times = [(*row, _waits(row[0], report)) for row in report.time_rows()]
    heights = [len(memory) + 1, len(times) + 1]
    figure = _figure(width=10.0, height=0.32 * sum(heights) + 1.2)
    upper, lower = figure.subplots(2, 1, height_ratios=heights)
    _table(
        upper,
        title=f"Memory per rank ({report.processes})",
        header=("component", "where", "size", "what"),
        rows=memory,
        widths=(0.02, 0.17, 0.07, 0.12, 0.62),
        colours=component_colours(()),
    )
    _table(
        lower,
        title=f"Time per step ({report.steps} steps, {report.steps_per_second:.2f} it/s)",
        header=("phase", "mean", "share", "waits for"),
        rows=times,
        widths=(0.02, 0.17, 0.11, 0.08, 0.62),
        colours=PHASES,
    )
    return _write(figure, path)


def _waits(phase: str, report: Report) -> str:
    """What a phase waits for; forward and backward pass are judged together."""
    for bound in report.bounds:
        if phase == bound.phase or (phase in ("forward", "backward") and phase in bound.phase):
            return bound.words
    return ""


def _figure(*, width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"plots are drawn by matplotlib ({error})",
            key="matplotlib",
            fix="pip install 'zerotune[plot]'",
        ) from error
    # Not pyplot: that would choose a backend for the whole process and keep the figure.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _table(
    axes: Any,
    *,
    title: str,
    header: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    widths: tuple[float, ...],
    colours: Mapping[str, str],
) -> None:
    """Draw a table; the name in its first column has its colour before it."""
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    table = axes.table(
        cellText=[("", *row) for row in rows],
        cellColours=[[colours.get(row[0], PAPER), *[PAPER] * len(row)] for row in rows],
        colLabels=("", *header),
        colWidths=widths,
        cellLoc="left",
        colLoc="left",
        bbox=(0, 0, sum(widths), 1),
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for (row, _), cell in table.get_celld().items():
        cell.PAD = 0.02
        cell.set_edgecolor(LINE)
        if row == 0:
            cell.set_facecolor(HEADER)
            cell.set_text_props(fontweight="bold")


def _write(figure: Any, path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=_PIXELS_PER_INCH, format="png")
    return file
