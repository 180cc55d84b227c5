"""The learning rate of every step, as data and as a picture, before anything is trained."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from zerotune._util.files import drafted, sync
from zerotune.errors import InvalidValueError, MissingDependencyError
from zerotune.plan.model import OptimizerChoice, SchedulerChoice
from zerotune.plan.schedules import lr_at


def _rates(value: Sequence[float]) -> tuple[float, ...]:
    return tuple(value)


@attrs.frozen(kw_only=True)
class ScheduleCurve:
    """The learning rate while each optimizer step runs; one curve for each group."""

    name: str
    """The schedule's name; ``"constant"`` when there is none."""
    groups: tuple[str, ...]
    """Names of the groups; ``"all"`` when there is one."""
    rates: tuple[tuple[float, ...], ...]
    """For each group the rate of optimizer steps 0, 1, 2 …"""

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.rates[0])


def schedule_curve(
    optimizer: OptimizerChoice, scheduler: SchedulerChoice | None, steps: int
) -> ScheduleCurve:
    """The learning rates of the first ``steps`` optimizer steps.

    Raises:
        InvalidValueError: ``steps`` is not positive.
    """
    if steps < 1:
        raise InvalidValueError("a curve has at least one step", key="steps", value=steps)
    base = [lr_at(scheduler, step, optimizer.lr) for step in range(steps)]
    groups = optimizer.groups
    factors = [float(group.params.get("lr", optimizer.lr)) / optimizer.lr for group in groups]
    return ScheduleCurve(
        name="constant" if scheduler is None else scheduler.name,
        groups=tuple(group.name for group in groups) or ("all",),
        rates=tuple(_rates([rate * factor for rate in base]) for factor in factors or [1.0]),
    )


def plot_curve(curve: ScheduleCurve, path: str | os.PathLike[str]) -> Path:
    """Write the curve as PNG; the file appears whole or not at all.

    Args:
        curve: What to draw.
        path: The file; its folder must exist.

    Returns:
        The path.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    target = Path(path)
    figure = _draw(curve)
    with drafted(target) as draft:
        figure.savefig(draft, format="png", dpi=150)
        sync(draft)
    return target


def _draw(curve: ScheduleCurve) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"matplotlib could not be imported ({error})",
            key="plot_schedule",
            fix="pip install 'zerotune[plot]'",
        ) from error
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels: dict[tuple[float, ...], list[str]] = {}
    for name, rates in zip(curve.groups, curve.rates, strict=True):
        labels.setdefault(rates, []).append(name)
    for rates, names in labels.items():
        axes.step(range(curve.steps), rates, where="post", label=" and ".join(names))
    axes.set(xlabel="optimizer step", ylabel="learning rate", title=curve.name)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    axes.grid(visible=True, alpha=0.3)
    if len(curve.groups) > 1:
        axes.legend()
    return figure
