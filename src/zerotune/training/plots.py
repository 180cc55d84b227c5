"""Charts of a run. matplotlib is loaded only to draw."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from zerotune._util.files import system_errors
from zerotune._util.palette import PALE, STRONG, empty_figure
from zerotune.errors import DataError, TrainingError

_WINDOW: Final = 20


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
    figure = empty_figure(figsize=(7.0, 4.0), layout="constrained")
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
    return write_png(path, figure, dpi=120)


def write_png(path: str | os.PathLike[str], figure: Any, *, dpi: float) -> Path:
    """Write a figure of matplotlib; its folder is made."""
    file = Path(path)
    with system_errors(TrainingError, file, "the picture cannot be written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=dpi, format="png")
    return file
