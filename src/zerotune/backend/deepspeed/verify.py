"""What a running ``deepspeed.DeepSpeedEngine`` does, compared with the plan it was built from.

Read from the engine, its optimizer and the model themselves, not from the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zerotune.backend.checks import Checks, RunningGroup
from zerotune.backend.deepspeed.layouts import inner_optimizer
from zerotune.backend.deepspeed.leaf_modules import leaf_modules, named_leaf_modules
from zerotune.backend.layouts import full_shape
from zerotune.backend.optimizers.client import scheduler_class
from zerotune.plan.model import ResolvedPlan


def compare(
    engine: Any,
    plan: ResolvedPlan,
    *,
    module: torch.nn.Module,
    groups: Sequence[RunningGroup],
) -> Checks:
    """Everything of a plan that an engine can be asked about.

    Args:
        engine: DeepSpeed's engine.
        plan: What it is meant to run.
        module: The model inside it.
        groups: What each parameter group should hold.
    """
    checks = Checks()
    checks.equal("zero_optimization.stage", plan.stage, engine.zero_optimization_stage())
    _compare_optimizer(checks, engine, plan, module=module, groups=groups)
    checks.equal("precision", plan.precision, _precision(engine))
    _compare_batch(checks, engine, plan)
    optimizer_device, parameter_device = _offload_devices(engine)
    checks.equal("offload_optimizer.device", plan.offload_optimizer, optimizer_device)
    checks.equal("offload_param.device", plan.offload_param, parameter_device)
    if plan.stage == 3:
        checks.equal("stage 3 partitions", True, _partitions(module))
        named = named_leaf_modules(plan, module)
        checks.equal("leaf modules", len(named), len(leaf_modules(module)))
    return checks


def _compare_optimizer(
    checks: Checks,
    engine: Any,
    plan: ResolvedPlan,
    *,
    module: torch.nn.Module,
    groups: Sequence[RunningGroup],
) -> None:
    inner = inner_optimizer(engine)
    if plan.optimizer is not None:
        checks.equal("optimizer.type", plan.optimizer.implementation, type(inner).__name__)
        checks.optimizer_arguments(
            plan.optimizer,
            inner,
            scheduler=plan.scheduler,
            steps_taken=engine.global_steps - engine.skipped_steps,
            groups=groups,
        )
        checks.group_members(groups, running_groups(engine, module))
    running = None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__
    checks.equal("scheduler.type", scheduler_class(plan), running)


def _compare_batch(checks: Checks, engine: Any, plan: ResolvedPlan) -> None:
    steps, limit = plan.gradient_accumulation_steps, float(plan.gradient_clipping)
    checks.equal("gradient_accumulation_steps", steps, engine.gradient_accumulation_steps())
    checks.equal("gradient_clipping", limit, float(engine.gradient_clipping()))
    micro = engine.train_micro_batch_size_per_gpu()
    checks.equal("train_micro_batch_size_per_gpu", plan.micro_batch_size, micro)
    checks.equal("train_batch_size", plan.train_batch_size, engine.train_batch_size())


def running_groups(engine: Any, module: torch.nn.Module) -> tuple[RunningGroup, ...]:
    """The parameter groups inside DeepSpeed's engine, whatever its stage made of them."""
    wrapper, inner = engine.optimizer, inner_optimizer(engine)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    members: list[list[torch.Tensor]] = [[] for _ in inner.param_groups]
    if hasattr(wrapper, "sub_group_to_group_id"):
        for sub_group, parameters in enumerate(wrapper.fp16_groups):
            members[wrapper.sub_group_to_group_id[sub_group]].extend(parameters)
    else:
        held = getattr(wrapper, "bit16_groups", None) or getattr(wrapper, "fp16_groups", None)
        members = held or [group["params"] for group in inner.param_groups]
    return tuple(
        RunningGroup.read(group, parameters, names)
        for group, parameters in zip(inner.param_groups, members, strict=True)
    )


def _precision(engine: Any) -> str:
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"


def _offload_devices(engine: Any) -> tuple[str, str]:
    wrapper = engine.optimizer
    optimizer = parameter = "none"
    if getattr(wrapper, "swap_optimizer", False):
        optimizer = "nvme"
    elif getattr(wrapper, "offload_optimizer", False) or getattr(wrapper, "cpu_offload", False):
        optimizer = "cpu"
    if getattr(wrapper, "params_in_nvme_and_cpu", False):
        parameter = "nvme"
    elif getattr(wrapper, "offload_param", False):
        parameter = "cpu"
    return optimizer, parameter


def _partitions(module: torch.nn.Module) -> bool:
    """Whether stage 3 really partitions: a high persistence threshold keeps all whole.

    Frozen parameters count too: beside a large frozen base all adapters are small enough to stay.
    """
    parameters = list(module.parameters())
    whole = sum(p.numel() for p in parameters)
    return whole < sum(torch.Size(full_shape(p)).numel() for p in parameters)
