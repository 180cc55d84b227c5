"""Build torch optimizers and learning-rate schedules from a resolved plan."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import torch

from zerotune.backend import low_bit as _registered  # noqa: F401
from zerotune.backend.optimizers.classes import AdamW8BitStates, AdamWBF16States, Lamb, Lion, Muon
from zerotune.errors import EngineError, MissingDependencyError, OptimizerError
from zerotune.plan.optimizer.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.optimizer.curves import lr_at
from zerotune.plan.plan import ResolvedPlan

CLASSES: Final[Mapping[str, type[torch.optim.Optimizer]]] = {
    kind.__name__: kind for kind in (AdamWBF16States, AdamW8BitStates, Lion, Lamb, Muon)
}
"""Optimizer classes of zerotune, by ``OptimizerChoice.implementation``."""
Named = Sequence[tuple[str, torch.nn.Parameter]]


def chosen_optimizer(plan: ResolvedPlan) -> OptimizerChoice:
    """Return the plan's optimizer; raise an error if it has not been resolved completely."""
    if plan.optimizer.name == "Muon" and not plan.optimizer.groups:
        raise EngineError(
            "the parameters that Muon updates have not been chosen",
            "resolve the plan with ModelFacts.from_module(model) for the model to train",
            "optimizer.groups",
        )
    return plan.optimizer


def parameter_groups(choice: OptimizerChoice, named: Named) -> list[Any]:
    """Return the ``params`` argument for an optimizer: parameters, or one dict per group.

    Args:
        choice: The optimizer with its groups.
        named: Names and parameters of all trained parameters.
    """
    if not choice.groups:
        return [parameter for _, parameter in named]
    left = dict(named)
    groups: list[Any] = []
    for group in choice.groups:
        missing = [name for name in group.parameters if name not in left]
        if missing:
            raise EngineError(
                "this group of the plan contains a parameter that the model does not train",
                "resolve the plan with ModelFacts.from_module(model) for the model to train",
                f"optimizer.groups.{group.name}",
                missing[0],
            )
        members = [left.pop(name) for name in group.parameters]
        groups.append({"params": members, "name": group.name, **_with_tuples(group.params)})
    if left:
        raise EngineError(
            "this parameter is in no group: it was not trainable when the plan was resolved",
            "freeze and unfreeze parameters before calling ModelFacts.from_module",
            "optimizer.groups",
            next(iter(left)),
        )
    return groups


def build_client_optimizer(choice: OptimizerChoice, named: Named) -> torch.optim.Optimizer:
    """Build the plan's optimizer, which DeepSpeed does not build itself.

    Args:
        choice: The optimizer with its arguments and groups.
        named: Names and parameters of all trained parameters.
    """
    factory = optimizer_factory(choice)
    groups = parameter_groups(choice, named)
    try:
        optimizer: torch.optim.Optimizer = factory(groups, **_with_tuples(choice.params))
    except (TypeError, ValueError, AssertionError) as error:
        raise OptimizerError(
            f"{choice.implementation} refused its arguments ({error})",
            "correct or remove the argument",
            "optimizer.params",
            dict(choice.params),
        ) from error
    if hasattr(optimizer, "train"):
        # Schedule-free optimizers switch the weights between training values and their average.
        optimizer.train()
    return optimizer


def _with_tuples(params: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in params.items()
    }


def optimizer_factory(choice: OptimizerChoice) -> Callable[..., Any]:
    """Return the class or function that creates an optimizer outside DeepSpeed.

    Args:
        choice: The optimizer.
    """
    if choice.source == "zerotune":
        return CLASSES[choice.implementation]
    if choice.source == "package" and choice.package is not None:
        top = choice.package.partition(".")[0]
        try:
            module = importlib.import_module(choice.package)
        except ImportError as error:
            raise MissingDependencyError(
                f"{choice.name} is in the package {top}, which could not be imported ({error})",
                "pip install 'zerotune[optimizers]'",
                "optimizer.type",
                choice.name,
            ) from error
        return cast(Callable[..., Any], getattr(module, choice.implementation))
    optimizer_class = getattr(torch.optim, choice.implementation, None)
    if optimizer_class is None:
        raise OptimizerError(
            f"torch {torch.__version__} has no torch.optim.{choice.implementation}",
            "use AdamW, or install a newer torch",
            "optimizer.type",
            choice.name,
        )
    return cast(Callable[..., Any], optimizer_class)


STOPPED: Final = "stopped"
"""Key that marks a parameter group as having taken its last step; the group is then skipped."""


class CurveScheduler:
    """Set the learning rate of every group from ``zerotune.plan.optimizer.curves.lr_at``.

    The plain engine always uses this class. The DeepSpeed engine uses it for schedules that
    DeepSpeed lacks, and for groups with different learning rates. The engine calls ``step`` after
    each applied optimizer step.

    Args:
        optimizer: The optimizer; each group's ``lr`` keeps its ratio to ``base_lr``.
        choice: The schedule.
        base_lr: Learning rate of the optimizer.
        until: For each group, the number of steps after which the rate is 0; ``None`` if the rate
            never becomes 0.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        choice: SchedulerChoice,
        base_lr: float,
        until: Sequence[int | None] = (),
    ) -> None:
        self._optimizer = optimizer
        self._choice = choice
        self._base_lr = base_lr
        # Missing groups are reported by the engine's checks.
        self._until = [*until, *[None] * len(optimizer.param_groups)]
        self._factors = [float(group["lr"]) / base_lr for group in optimizer.param_groups]
        self._steps = 0
        self._apply()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next optimizer step.

        Args:
            last_batch_iteration: Index of the last finished step; default: the previous index plus
                1.
        """
        self._steps = self._steps + 1 if last_batch_iteration is None else last_batch_iteration + 1
        self._apply()

    def get_lr(self) -> list[float]:
        """Return each group's learning rate for the next optimizer step."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        """Return the index of the last step, in the format of DeepSpeed's schedulers."""
        return {"last_batch_iteration": self._steps - 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved step.

        Args:
            state: Result of ``state_dict``.
        """
        self.step(int(state["last_batch_iteration"]))

    def _apply(self) -> None:
        rate = lr_at(self._choice, self._steps, self._base_lr)
        groups = zip(self._optimizer.param_groups, self._factors, strict=True)
        for (group, usual), until in zip(groups, self._until, strict=False):
            stopped = until is not None and self._steps >= until
            factor = 0.0 if stopped else usual
            if until is not None:
                group[STOPPED] = stopped
            if isinstance(group["lr"], torch.Tensor):
                # torchao compiles its update with the rate as a tensor and rejects a plain number.
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor


def curve(plan: ResolvedPlan) -> Callable[[torch.optim.Optimizer], CurveScheduler] | None:
    """Return a factory for an optimizer's schedule; ``None`` if the plan has no schedule."""
    if plan.scheduler is None:
        return None
    until = [group.until for group in plan.optimizer.groups]
    return partial(CurveScheduler, choice=plan.scheduler, base_lr=plan.optimizer.lr, until=until)


def own_scheduler(plan: ResolvedPlan) -> Callable[[torch.optim.Optimizer], CurveScheduler] | None:
    """Return the scheduler factory for DeepSpeed; ``None`` if DeepSpeed's own class is used."""
    return None if _is_deepspeeds(plan) else curve(plan)


def continue_schedule(schedule: Any, saved: Mapping[str, Any]) -> None:
    """Set DeepSpeed's schedule and the learning rates to a saved step.

    Args:
        schedule: The running schedule, or ``None``.
        saved: ``state_dict`` of the saved schedule.
    """
    if schedule is None:
        return
    # Index of the last optimizer step that each schedule has followed; -1 before the first step.
    position, running = (
        int(each.get("last_batch_iteration", -1)) for each in (saved, schedule.state_dict())
    )
    # If neither schedule has taken a step, there is nothing to set.
    if max(position, running) >= 0:
        # Loading only the position would leave the learning rate unchanged.
        schedule.step(position)


def scheduler_class(plan: ResolvedPlan) -> str | None:
    """Return the name of the schedule's class under DeepSpeed; ``None`` without a schedule."""
    if plan.scheduler is None:
        return None
    return plan.scheduler.name if _is_deepspeeds(plan) else CurveScheduler.__name__


def _is_deepspeeds(plan: ResolvedPlan) -> bool:
    """Whether DeepSpeed's own class runs the plan's schedule."""
    return (
        plan.uses_deepspeed and plan.scheduler is not None and plan.scheduler.source == "deepspeed"
    )
