"""Schedules as pure functions of the optimizer step, as data and as a chart."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.files import drafted, sync
from zerotune.errors import (
    InvalidValueError,
    MissingDependencyError,
    OptimizerError,
    UnresolvedPlanError,
)
from zerotune.plan.optimizer.choices import BY_RUN, OptimizerChoice, SchedulerChoice


def lr_at(choice: SchedulerChoice | None, step: int, base_lr: float) -> float:
    """Return the learning rate in ``param_groups`` during update ``step``.

    Args:
        choice: The schedule; ``None`` for a constant learning rate.
        step: 0-based optimizer step (applied updates, not micro batches).
        base_lr: Learning rate of the parameter group. ``WarmupCosineLR``, diffusers' schedules and
            warm-ups with ``warmup_max_lr=None`` scale this rate; all other schedules ignore it.

    Returns:
        The learning rate, bitwise equal to the value that DeepSpeed or diffusers computes.
    """
    if step < 0:
        raise InvalidValueError("optimizer steps are counted from 0", key="step", value=step)
    if choice is None:
        return base_lr
    try:
        curve = _CURVES[choice.name]
    except KeyError:
        raise OptimizerError(
            "there is no such schedule",
            f"use one of {', '.join(_CURVES)}",
            "scheduler.type",
            choice.name,
        ) from None
    return curve(_Update(choice.params, step, base_lr))


@attrs.frozen
class _Update:
    """One update under a schedule; a missing argument raises an error that names it."""

    params: Mapping[str, Any]
    step: int
    base_lr: float

    def __getitem__(self, key: str) -> Any:
        value = self.params.get(key, BY_RUN)
        if value == BY_RUN:
            raise UnresolvedPlanError(
                "the schedule cannot be evaluated without this argument",
                "write it, or pass run=RunFacts(…) to DeepSpeedPlan.resolve",
                f"scheduler.params.{key}",
            )
        return value

    def after_ramp(self, factor: Callable[[_Update], float]) -> float:
        """Return the rate of a schedule of diffusers: a linear warm-up, then ``factor``."""
        warmup = self["num_warmup_steps"]
        if self.step < warmup:
            return self.base_lr * (float(self.step) / float(max(1, warmup)))
        return float(self.base_lr * factor(self))

    def progress(self) -> float:
        warmup = self["num_warmup_steps"]
        return float(self.step - warmup) / float(max(1, self["num_training_steps"] - warmup))

    def linear(self) -> float:
        total, warmup = self["num_training_steps"], self["num_warmup_steps"]
        return max(0.0, float(total - self.step) / float(max(1, total - warmup)))

    def cosine(self) -> float:
        angle = math.pi * float(self["num_cycles"]) * 2.0 * self.progress()
        return max(0.0, 0.5 * (1.0 + math.cos(angle)))

    def cosine_with_restarts(self) -> float:
        progress = self.progress()
        cycle = (float(self["num_cycles"]) * progress) % 1.0
        return 0.0 if progress >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycle)))

    def polynomial(self) -> float:
        end, total = self["lr_end"], self["num_training_steps"]
        if self.step > total:
            return float(end / self.base_lr)
        remaining = 1 - (self.step - self["num_warmup_steps"]) / (total - self["num_warmup_steps"])
        decayed = (self.base_lr - end) * remaining ** self["power"] + end
        return float(decayed / self.base_lr)

    def warmup_gamma(self, iteration: int, steps: int) -> float:
        """Return the completed fraction of the warm-up at ``iteration < steps``."""
        if self["warmup_type"] == "linear":
            return iteration / steps
        return (1.0 / math.log(steps)) * math.log(iteration + 1)

    def warmup_steps(self) -> int:
        return max(2, int(self["warmup_num_steps"]))

    def after_warmup(self, after: Callable[[int], float]) -> float:
        """Return the rate of ``WarmupLR`` or ``WarmupDecayLR``, which differ only in ``after``."""
        low = float(self["warmup_min_lr"])
        peak = self["warmup_max_lr"]
        high = self.base_lr if peak is None else float(peak)
        iteration = self.step - 1
        if iteration < 0:
            return low
        steps = self.warmup_steps()
        gamma = self.warmup_gamma(iteration, steps) if iteration < steps else after(iteration)
        return low + (high - low) * gamma

    def warmup_lr(self) -> float:
        return self.after_warmup(lambda _: 1.0)

    def warmup_decay_lr(self) -> float:
        total = self["total_num_steps"]
        steps = self.warmup_steps()
        return self.after_warmup(
            lambda iteration: max(0.0, float(total - iteration) / float(max(1.0, total - steps)))
        )

    def warmup_cosine_lr(self) -> float:
        iteration = self.step - 1
        if iteration < 0:
            return 0.0
        steps = self.warmup_steps()
        if iteration < steps:
            low = self["warmup_min_ratio"]
            ratio = low + self.warmup_gamma(iteration, steps) * (1.0 - low)
        else:
            floor = self["cos_min_ratio"]
            total = max(1, self["total_num_steps"] - steps)
            progress = min(1.0, (iteration - steps + 1) / total)
            ratio = max(0.0, floor + (1.0 - floor) * ((1 + math.cos(math.pi * progress)) / 2))
        return float(self.base_lr * ratio)


_CURVES: Final[Mapping[str, Callable[[_Update], float]]] = {
    "WarmupLR": _Update.warmup_lr,
    "WarmupDecayLR": _Update.warmup_decay_lr,
    "WarmupCosineLR": _Update.warmup_cosine_lr,
    "constant": lambda update: update.base_lr,
    "constant_with_warmup": lambda update: update.after_ramp(lambda _: 1.0),
    "linear": lambda update: update.after_ramp(_Update.linear),
    "cosine": lambda update: update.after_ramp(_Update.cosine),
    "cosine_with_restarts": lambda update: update.after_ramp(_Update.cosine_with_restarts),
    "polynomial": lambda update: update.after_ramp(_Update.polynomial),
}


@attrs.frozen(kw_only=True)
class ScheduleCurve:
    """Learning rates by optimizer step, with one curve per parameter group."""

    name: str
    """Name of the schedule; ``"constant"`` if there is no schedule."""
    groups: tuple[str, ...]
    """Names of the groups; ``"all"`` if there is only one group."""
    rates: tuple[tuple[float, ...], ...]
    """Learning rates at optimizer steps 0, 1, 2 …, for each group."""

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.rates[0])

    def _figure(self) -> Any:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingDependencyError(
                f"matplotlib could not be imported ({error})",
                "run pip install 'zerotune[plot]'",
                "plot_schedule",
            ) from error
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        labels: dict[tuple[float, ...], list[str]] = {}
        for name, rates in zip(self.groups, self.rates, strict=True):
            labels.setdefault(rates, []).append(name)
        for rates, names in labels.items():
            axes.step(range(self.steps), rates, where="post", label=" and ".join(names))
        axes.set(xlabel="optimizer step", ylabel="learning rate", title=self.name)
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
        axes.grid(visible=True, alpha=0.3)
        if len(self.groups) > 1:
            axes.legend()
        return figure


def schedule_curve(
    optimizer: OptimizerChoice, scheduler: SchedulerChoice | None, steps: int
) -> ScheduleCurve:
    """Return the learning rates of the first ``steps`` optimizer steps.

    Raises:
        InvalidValueError: ``steps`` is not positive.
    """
    if steps < 1:
        raise InvalidValueError("a curve needs at least one step", key="steps", value=steps)
    base = [lr_at(scheduler, step, optimizer.lr) for step in range(steps)]
    groups = optimizer.groups
    factors = [float(group.params.get("lr", optimizer.lr)) / optimizer.lr for group in groups]
    return ScheduleCurve(
        name="constant" if scheduler is None else scheduler.name,
        groups=tuple(group.name for group in groups) or ("all",),
        rates=tuple(tuple([rate * factor for rate in base]) for factor in factors or [1.0]),
    )


def plot_curve(curve: ScheduleCurve, path: str | os.PathLike[str]) -> Path:
    """Save a plot of the curve as a PNG file, which is written atomically.

    Args:
        curve: Curve to plot.
        path: Path of the PNG file; its folder must exist.

    Returns:
        Path of the PNG file.
    """
    target = Path(path)
    figure = curve._figure()
    with drafted(target) as draft:
        figure.savefig(draft, format="png", dpi=150)
        sync(draft)
    return target
