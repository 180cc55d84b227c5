"""diffusers' learning-rate schedules as pure functions of the optimizer step.

The same curves as ``diffusers.optimization.get_scheduler`` (0.42.1), bit for bit: each is a factor
on the learning rate of the group. Unlike DeepSpeed's, update number 0 runs at ``step = 0``, so a
warm-up begins at 0 and reaches the full rate at update ``num_warmup_steps``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final


def _warmup(params: Any, step: int) -> float | None:
    """Factor during the warm-up; ``None`` after it."""
    warmup = params["num_warmup_steps"]
    return float(step) / float(max(1, warmup)) if step < warmup else None


def _progress(params: Any, step: int) -> float:
    warmup = params["num_warmup_steps"]
    return float(step - warmup) / float(max(1, params["num_training_steps"] - warmup))


def _constant(params: Any, step: int, base_lr: float) -> float:  # noqa: ARG001
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
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
}
"""Learning rate by name: of the arguments, the step and the group's own rate."""
