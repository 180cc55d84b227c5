"""The optimizer, schedule and loss scale of a plan in host memory, as DeepSpeed builds them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from zerotune.backend.deepspeed.start import compiling
from zerotune.backend.master_weights import Named
from zerotune.backend.optimizers.classes import AdamWBF16States
from zerotune.backend.optimizers.client import (
    chosen_optimizer,
    optimizer_factory,
    own_scheduler,
    parameter_groups,
)
from zerotune.backend.step.adams import TORCH_VECTOR, VECTOR
from zerotune.plan.plan import ResolvedPlan

_OF_ADAM: Final = ("lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad")


def cpu_adam(plan: ResolvedPlan, groups: Sequence[Mapping[str, Any]]) -> Any:
    """Return DeepSpeedCPUAdam, which may be compiled first.

    Args:
        plan: The resolved plan.
        groups: The parameter groups.
    """
    choice = chosen_optimizer(plan)
    params = {name: choice.params[name] for name in _OF_ADAM if name in choice.params}
    kind: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    with compiling(plan):
        return kind(groups, **params, adamw_mode=choice.weight_decay_mode != "l2")


def other_optimizer(
    plan: ResolvedPlan, groups: Sequence[Mapping[str, Any]]
) -> torch.optim.Optimizer:
    """Return an optimizer that is not DeepSpeed's.

    Args:
        plan: The resolved plan.
        groups: The parameter groups, which are copied.
    """
    choice = chosen_optimizer(plan)
    optimizer: torch.optim.Optimizer = optimizer_factory(choice)(
        [dict(group) for group in groups], **choice.params
    )
    return optimizer


def schedule_of(plan: ResolvedPlan, optimizer: torch.optim.Optimizer) -> Any:
    """Return the plan's schedule of an optimizer; ``None`` if the plan has none."""
    if plan.scheduler is None:
        return None
    own = own_scheduler(plan)
    if own is not None:
        return own(optimizer)
    schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
    kind = getattr(schedules, plan.scheduler.name)
    return kind(optimizer, **plan.to_deepspeed()["scheduler"]["params"])


def loss_scaler(plan: ResolvedPlan) -> Any:
    """Return DeepSpeed's loss scaler for fp16; ``None`` in other precisions."""
    if plan.precision != "fp16":
        return None
    runtime: Any = importlib.import_module("deepspeed").runtime
    config = runtime.precision_config.get_float16_config(plan.to_deepspeed())
    return runtime.fp16.loss_scaler.CreateLossScaler(
        dtype=torch.float16,
        static_loss_scale=config.loss_scale,
        dynamic_scaling=config.loss_scale == 0,
        dynamic_loss_args=config.dynamic_loss_scale_args(),
    )


def members(plan: ResolvedPlan, named: Named) -> list[list[str]]:
    """Return the names of the trained parameters in each optimizer group, in the group's order.

    Args:
        plan: The resolved plan.
        named: Names and parameters of all trained parameters.
    """
    names = {id(parameter): name for name, parameter in named}
    groups = parameter_groups(chosen_optimizer(plan), named)
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


def vector_of(plan: ResolvedPlan) -> int:
    """Return how many elements the plan's optimizer updates with one vector under ZeRO-2."""
    is_torch = chosen_optimizer(plan).implementation == AdamWBF16States.__name__
    return TORCH_VECTOR if is_torch else VECTOR
