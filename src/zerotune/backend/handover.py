"""A resolved plan in the words of the trainers that may initialize DeepSpeed with it."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from zerotune.backend.layouts import trainable_parameters
from zerotune.backend.optimizers import (
    build_client_optimizer,
    own_scheduler,
    parameter_groups,
)
from zerotune.backend.require import require_accelerate
from zerotune.errors import EngineError
from zerotune.plan.choices import OptimizerChoice
from zerotune.plan.resolved import ResolvedPlan

_PRECISIONS: Final = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def initialize_arguments(plan: ResolvedPlan, model: torch.nn.Module) -> dict[str, Any]:
    """Keyword arguments of ``deepspeed.initialize``.

    Args:
        plan: A resolved plan with its optimizer chosen.
        model: What is trained.

    Raises:
        EngineError: The plan has no optimizer choice.
        UnresolvedPlanError: Something in the plan is not settled.
    """
    choice, named = _choice(plan), trainable_parameters(model)
    client = None if choice.source == "deepspeed" else build_client_optimizer(choice, named)
    return {
        "model": model,
        "model_parameters": parameter_groups(choice, named),
        "optimizer": client,
        "lr_scheduler": own_scheduler(plan),
        "config": plan.to_deepspeed(),
        "dist_init_required": False,
    }


def accelerator_arguments(plan: ResolvedPlan) -> dict[str, Any]:
    """Keyword arguments of ``accelerate.Accelerator``.

    Nothing in the plugin's configuration is ``"auto"``, so accelerate fills and replaces nothing.
    On a machine without an accelerator they name gloo too: accelerate takes none by itself then,
    and each of several processes believes that it is alone.

    Args:
        plan: A resolved plan with its optimizer chosen.

    Raises:
        MissingDependencyError: accelerate is not installed.
        UnresolvedPlanError: Something in the plan is not settled.
    """
    accelerate = require_accelerate()
    arguments = {
        "deepspeed_plugin": accelerate.DeepSpeedPlugin(hf_ds_config=plan.to_deepspeed()),
        "mixed_precision": _PRECISIONS[plan.precision],
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
    }
    if plan.platform.accelerator == "cpu":
        gloo = accelerate.utils.InitProcessGroupKwargs(backend="gloo")
        arguments["kwargs_handlers"] = [gloo]
    return arguments


def accelerate_optimizer(plan: ResolvedPlan, model: torch.nn.Module) -> Any:
    """The optimizer to hand to ``accelerator.prepare``.

    Args:
        plan: A resolved plan with its optimizer chosen.
        model: What is trained.

    Returns:
        ``accelerate.utils.DummyOptim`` with the plan's parameter groups where DeepSpeed builds
        the optimizer; else the optimizer, which accelerate then leaves as it is.

    Raises:
        EngineError: The plan has no optimizer choice.
    """
    choice, named = _choice(plan), trainable_parameters(model)
    if choice.source != "deepspeed":
        return build_client_optimizer(choice, named)
    accelerate = require_accelerate()
    return accelerate.utils.DummyOptim(parameter_groups(choice, named), lr=choice.lr)


def check_accelerate(world_size: int) -> None:
    """Check that accelerate, where it drives DeepSpeed, shares the data over all processes.

    Args:
        world_size: Number of processes that train together.

    Raises:
        EngineError: It counts others; every process would train on the same batches.
    """
    accelerate = sys.modules.get("accelerate")
    shared = {} if accelerate is None else accelerate.PartialState._shared_state
    counted = shared.get("num_processes", world_size)
    if str(shared.get("distributed_type")).endswith("DEEPSPEED") and counted != world_size:
        raise EngineError(
            f"accelerate counts {counted} of {world_size} processes and gives each the same data",
            key="Accelerator.num_processes",
            value=counted,
            fix="without a GPU: Accelerator(kwargs_handlers=[InitProcessGroupKwargs("
            'backend="gloo")]), or Accelerator(**run.accelerator_arguments())',
        )


def _choice(plan: ResolvedPlan) -> OptimizerChoice:
    if plan.optimizer is None:
        raise EngineError(
            "the plan has no optimizer choice",
            key="plan.optimizer",
            fix="plan = OptimizerResolver().apply(plan)",
        )
    return plan.optimizer
