"""The learning rate of every optimizer step: diffusers' and DeepSpeed's schedules as functions.

Nothing is trained for it, and ``schedule_curve`` gives the whole of it as data or as a picture.
"""

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
from zerotune.optimizers.choices import OptimizerChoice, SchedulerChoice

# -- diffusers' schedules as pure functions of the optimizer step.
#
# The same curves as ``diffusers.optimization.get_scheduler`` (0.42.1), bit for bit: each is a
# factor on the learning rate of the group. Unlike DeepSpeed's, update number 0 runs at
# ``step = 0``, so a warm-up begins at 0 and reaches the full rate at update ``num_warmup_steps``.


def _warmup(params: Any, step: int) -> float | None:
    """Factor during the warm-up; ``None`` after it."""
    warmup = params["num_warmup_steps"]
    return float(step) / float(max(1, warmup)) if step < warmup else None


def _progress(params: Any, step: int) -> float:
    warmup = params["num_warmup_steps"]
    return float(step - warmup) / float(max(1, params["num_training_steps"] - warmup))


def _constant_rate(params: Any, step: int, base_lr: float) -> float:  # noqa: ARG001
    return base_lr


def _constant_with_warmup(params: Any, step: int, base_lr: float) -> float:
    warmup = params["num_warmup_steps"]
    return base_lr * (float(step) / float(max(1.0, warmup)) if step < warmup else 1.0)


def _linear(params: Any, step: int, base_lr: float) -> float:
    factor = _warmup(params, step)
    if factor is None:
        total, warmup = params["num_training_steps"], params["num_warmup_steps"]
        factor = max(0.0, float(total - step) / float(max(1, total - warmup)))
    return base_lr * factor


def _cosine(params: Any, step: int, base_lr: float) -> float:
    factor = _warmup(params, step)
    if factor is None:
        angle = math.pi * float(params["num_cycles"]) * 2.0 * _progress(params, step)
        factor = max(0.0, 0.5 * (1.0 + math.cos(angle)))
    return base_lr * factor


def _cosine_with_restarts(params: Any, step: int, base_lr: float) -> float:
    factor = _warmup(params, step)
    if factor is None:
        progress = _progress(params, step)
        if progress >= 1.0:
            return 0.0
        cycle = (float(params["num_cycles"]) * progress) % 1.0
        factor = max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycle)))
    return base_lr * factor


def _polynomial(params: Any, step: int, base_lr: float) -> float:
    factor = _warmup(params, step)
    if factor is not None:
        return base_lr * factor
    end, total = params["lr_end"], params["num_training_steps"]
    if step > total:
        return float(base_lr * (end / base_lr))
    remaining = 1 - (step - params["num_warmup_steps"]) / (total - params["num_warmup_steps"])
    decayed = (base_lr - end) * remaining ** params["power"] + end
    return float(base_lr * (decayed / base_lr))


DIFFUSERS_CURVES: Final[Mapping[str, Callable[[Any, int, float], float]]] = {
    "constant": _constant_rate,
    "constant_with_warmup": _constant_with_warmup,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
}
"""Learning rate by name: of the arguments, the step and the group's own rate."""


# -- DeepSpeed's learning-rate schedules as pure functions of the optimizer step.
#
# Each curve repeats the arithmetic of ``deepspeed/runtime/lr_schedules.py`` (0.19.8) in the same
# order, so that values are equal bit for bit and not merely close. DeepSpeed's quirks are part of
# the truth and are kept:
#
# - A scheduler sets its first value when it is built, and steps *after* each optimizer step. The
#   update number ``step`` therefore runs with ``last_batch_iteration = step - 1``: the warm-up
#   schedules hold their minimum for the first *two* updates.
# - ``WarmupCosineLR`` runs its first update at 0, whatever ``warmup_min_ratio`` says.
# - ``warmup_num_steps`` below 2 counts as 2.
# - ``OneCycle`` starts with the *smallest* momentum, then jumps to the largest; while it cycles
#   momentum it also replaces the second beta by 0.99.
#
# DeepSpeed 0.18.9 differs in two places only: ``OneCycle`` ignores its stair
# counts, and ``WarmupCosineLR`` rises again after ``total_num_steps``.
#
# An update that fp16 overflow skips does not advance the schedule, so ``step`` counts applied
# updates only.


ONE_CYCLE_BETA2: Final = 0.99
"""Second beta that ``OneCycle`` forces on the optimizer while it cycles momentum."""


def lr_at(choice: SchedulerChoice | None, step: int, base_lr: float) -> float:
    """Learning rate in ``param_groups`` while update number ``step`` runs.

    Args:
        choice: The schedule; ``None`` is a constant learning rate.
        step: 0-based number of the optimizer step (applied updates, not micro-batches).
        base_lr: The parameter group's own ``lr``, used where the schedule scales it
            (``WarmupCosineLR``, and the warm-ups when ``warmup_max_lr`` is ``None``).

    Returns:
        The learning rate, equal to DeepSpeed's to the last bit.

    Raises:
        InvalidValueError: ``step`` is negative.
        OptimizerError: The schedule is none of DeepSpeed's five and none of diffusers'.
        UnresolvedPlanError: ``choice.params`` lacks an argument.
    """
    _check_step(step)
    if choice is None:
        return base_lr
    try:
        curve = _CURVES[choice.name]
    except KeyError:
        raise OptimizerError(
            "there is no such schedule",
            key="scheduler.type",
            value=choice.name,
            fix=f"use one of {', '.join(_CURVES)}",
        ) from None
    return curve(_Params(choice.params), step, base_lr)


def betas_at(
    choice: SchedulerChoice | None, step: int, betas: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Adam's betas while update number ``step`` runs; only ``OneCycle`` changes them.

    Args:
        choice: The schedule; ``None`` is a constant learning rate.
        step: 0-based number of the optimizer step.
        betas: The optimizer's own betas, ``None`` for an optimizer without betas.

    Returns:
        The betas in ``param_groups``; ``None`` when ``betas`` is ``None``.

    Raises:
        InvalidValueError: ``step`` is negative.
        UnresolvedPlanError: ``choice.params`` lacks an argument.
    """
    _check_step(step)
    if choice is None or choice.name != "OneCycle" or betas is None:
        return betas
    params = _Params(choice.params)
    if not params["cycle_momentum"]:
        return betas
    return _one_cycle_momentum(params, step), ONE_CYCLE_BETA2


class _Params:
    """Arguments of a schedule; a missing one is named instead of a bare ``KeyError``."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params

    def __getitem__(self, key: str) -> Any:
        try:
            return self._params[key]
        except KeyError:
            raise UnresolvedPlanError(
                "the schedule cannot be evaluated without this argument",
                key=f"scheduler.params.{key}",
                fix="let OptimizerResolver fill the scheduler's arguments",
            ) from None


def _check_step(step: int) -> None:
    if step < 0:
        raise InvalidValueError("optimizer steps are counted from 0", key="step", value=step)


def _warmup_gamma(params: _Params, iteration: int, steps: int) -> float:
    """Fraction of the warm-up done at ``iteration < steps``."""
    if params["warmup_type"] == "linear":
        return iteration / steps
    return (1.0 / math.log(steps)) * math.log(iteration + 1)


def _warmup_steps(params: _Params) -> int:
    return max(2, int(params["warmup_num_steps"]))


def _after_warmup(
    params: _Params, step: int, base_lr: float, after: Callable[[int], float]
) -> float:
    """``WarmupLR`` and ``WarmupDecayLR``, which differ in the fraction ``after`` the warm-up."""
    low = float(params["warmup_min_lr"])
    peak = params["warmup_max_lr"]
    high = base_lr if peak is None else float(peak)
    iteration = step - 1
    if iteration < 0:
        return low
    steps = _warmup_steps(params)
    gamma = _warmup_gamma(params, iteration, steps) if iteration < steps else after(iteration)
    return low + (high - low) * gamma


def _warmup_lr(params: _Params, step: int, base_lr: float) -> float:
    return _after_warmup(params, step, base_lr, lambda _: 1.0)


def _warmup_decay_lr(params: _Params, step: int, base_lr: float) -> float:
    total = params["total_num_steps"]
    steps = _warmup_steps(params)
    return _after_warmup(
        params,
        step,
        base_lr,
        lambda iteration: max(0.0, float(total - iteration) / float(max(1.0, total - steps))),
    )


def _warmup_cosine_lr(params: _Params, step: int, base_lr: float) -> float:
    iteration = step - 1
    if iteration < 0:
        return 0.0
    steps = _warmup_steps(params)
    if iteration < steps:
        low = params["warmup_min_ratio"]
        ratio = low + _warmup_gamma(params, iteration, steps) * (1.0 - low)
    else:
        floor = params["cos_min_ratio"]
        total = max(1, params["total_num_steps"] - steps)
        progress = min(1.0, (iteration - steps + 1) / total)
        ratio = max(0.0, floor + (1.0 - floor) * ((1 + math.cos(math.pi * progress)) / 2))
    return float(base_lr * ratio)


def _lr_range_test(params: _Params, step: int, base_lr: float) -> float:  # noqa: ARG001
    low = float(params["lr_range_test_min_lr"])
    if step == 0:
        return low
    interval = float(step) / params["lr_range_test_step_size"]
    if params["lr_range_test_staircase"]:
        interval = math.floor(interval)
    return float(low * (1 + params["lr_range_test_step_rate"] * interval))


def _cycle_halves(params: _Params) -> tuple[float, float]:
    first = float(params["cycle_first_step_size"])
    second = params["cycle_second_step_size"]
    return first, first if second is None else float(second)


def _cycle_scale(params: _Params, step: int) -> float:
    """Height within the cycle, 0 at its ends and 1 at its peak."""
    first, second = _cycle_halves(params)
    total = first + second
    x = 1.0 + step / total - math.floor(1 + step / total)
    first_stairs, second_stairs = _cycle_stairs(params)
    rising = x <= first / total
    stairs = first_stairs if rising else second_stairs
    if stairs <= 0:
        return x / (first / total) if rising else (x - 1) / (first / total - 1)
    position = step % total
    stair = position * stairs / first if position <= first else (total - position) * stairs / second
    return math.floor(stair) / stairs


def _cycle_stairs(params: _Params) -> tuple[int, int]:
    first = params["cycle_first_stair_count"]
    second = params["cycle_second_stair_count"]
    return first, first if second is None else second


def _one_cycle(params: _Params, step: int, base_lr: float) -> float:  # noqa: ARG001
    low = float(params["cycle_min_lr"])
    high = float(params["cycle_max_lr"])
    if step == 0:
        return low
    total = sum(_cycle_halves(params))
    if step - 1 < total:
        return low + (high - low) * _cycle_scale(params, step)
    if params["decay_step_size"] == 0 or params["decay_lr_rate"] == 0:
        return low
    return float(low / (1 + params["decay_lr_rate"] * _decay_interval(params, step, total)))


def _decay_interval(params: _Params, step: int, total: float) -> float:
    # The order of DeepSpeed's own subtraction: a fractional cycle length rounds differently.
    return float((step - 1 - total + 1) / params["decay_step_size"])


def _one_cycle_momentum(params: _Params, step: int) -> float:
    low = float(params["cycle_min_mom"])
    high = float(params["cycle_max_mom"])
    if step == 0:
        return low
    total = sum(_cycle_halves(params))
    if step - 1 < total:
        return high - (high - low) * _cycle_scale(params, step)
    if params["decay_step_size"] == 0 or params["decay_mom_rate"] == 0:
        return high
    return float(high * (1 + params["decay_mom_rate"] * _decay_interval(params, step, total)))


_CURVES: Final[Mapping[str, Callable[[Any, int, float], float]]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": _one_cycle,
    "LRRangeTest": _lr_range_test,
    **DIFFUSERS_CURVES,
}


# -- A whole curve, as data and as a picture.


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
        rates=tuple(tuple([rate * factor for rate in base]) for factor in factors or [1.0]),
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
    figure = _draw_curve(curve)
    with drafted(target) as draft:
        figure.savefig(draft, format="png", dpi=150)
        sync(draft)
    return target


def _draw_curve(curve: ScheduleCurve) -> Any:
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
