"""torch optimizers and learning-rate curves, from the choices of a resolved plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zerotune.errors import OptimizerError
from zerotune.plan.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.schedules import betas_at, lr_at


def build_torch_optimizer(
    choice: OptimizerChoice, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """The ``torch.optim`` class a choice names, with its arguments.

    Raises:
        OptimizerError: torch has no such class, or refuses an argument.
    """
    optimizer_class = getattr(torch.optim, choice.implementation, None)
    if optimizer_class is None:
        raise OptimizerError(
            f"torch {torch.__version__} has no torch.optim.{choice.implementation}",
            key="optimizer.type",
            value=choice.name,
            fix="use AdamW, or a newer torch",
        )
    params = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in choice.params.items()
    }
    try:
        optimizer: torch.optim.Optimizer = optimizer_class(parameters, **params)
    except (TypeError, ValueError) as error:
        raise OptimizerError(
            f"torch.optim.{choice.implementation} refused its arguments ({error})",
            key="optimizer.params",
            value=dict(choice.params),
            fix="correct or remove the argument",
        ) from error
    return optimizer


class CurveScheduler:
    """Sets the learning rate of every group from ``plan.schedules.lr_at``.

    The same curves as DeepSpeed's schedulers, for engines without DeepSpeed. ``step`` is called
    after each applied optimizer step.
    """

    def __init__(self, *, optimizer: torch.optim.Optimizer, choice: SchedulerChoice) -> None:
        self._optimizer = optimizer
        self._choice = choice
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._base_betas = [group.get("betas") for group in optimizer.param_groups]
        self._steps = 0
        self._apply()

    def step(self) -> None:
        """Move on to the next optimizer step."""
        self._steps += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps taken, as DeepSpeed's schedulers store it."""
        return {"last_batch_iteration": self._steps - 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        self._steps = int(state["last_batch_iteration"]) + 1
        self._apply()

    def _apply(self) -> None:
        groups = zip(self._optimizer.param_groups, self._base_lrs, self._base_betas, strict=True)
        for group, base_lr, base_betas in groups:
            group["lr"] = lr_at(self._choice, self._steps, base_lr)
            if base_betas is not None:
                group["betas"] = betas_at(self._choice, self._steps, tuple(base_betas))
