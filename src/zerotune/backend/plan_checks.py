"""What must hold of plan and model before DeepSpeed is asked."""

from __future__ import annotations

import torch

from zerotune.backend.distributed import ProcessGroup
from zerotune.backend.layouts import full_shape
from zerotune.errors import EngineError
from zerotune.plan.resolved import ResolvedPlan


def check_plan(plan: ResolvedPlan) -> None:
    """Whether the plan is one for DeepSpeed, and complete.

    Raises:
        EngineError: It is not, or its master weights are not fp32.
    """
    if not plan.uses_deepspeed:
        raise EngineError(
            "this plan was resolved without DeepSpeed",
            key="plan",
            value=plan.platform.deepspeed.reason,
            fix="use PlainEngine, or build_engine, which picks the right one",
        )
    if plan.optimizer is None:
        raise EngineError(
            "the plan has no optimizer choice",
            key="plan.optimizer",
            fix="plan = OptimizerResolver().apply(plan)",
        )
    for precision, section in (("bf16", plan.plan.bf16), ("fp16", plan.plan.fp16)):
        key = f"{precision}_master_weights_and_grads"
        if section is not None and section.enabled is True and getattr(section, key) is True:
            # DeepSpeed runs it; but every update below a weight's last bit is lost, without
            # stochastic rounding, and in an EMA and a resumed run as well.
            raise EngineError(
                "EMA, checkpoints and exports are made of fp32 master weights",
                key=f"{precision}.{key}",
                value=True,
                fix="remove it, and bf16_optimizer_states with it; where host memory is short, "
                "use the optimizer AdamWBF16States, whose moments alone are bf16, or put the "
                'optimizer on NVMe (offload="nvme")',
            )


def check_shapes(model: torch.nn.Module) -> None:
    """Whether DeepSpeed can hold every parameter.

    Raises:
        EngineError: One has no dimensions.
    """
    for name, parameter in model.named_parameters():
        if not full_shape(parameter):
            # DeepSpeed broadcasts parameters as bytes, and torch cannot view 0-d tensors so.
            raise EngineError(
                "DeepSpeed cannot broadcast a parameter without dimensions",
                key=f"model.{name}",
                value=full_shape(parameter),
                fix="give it one element, torch.nn.Parameter(torch.tensor([x])), or train with "
                "the plain engine",
            )


def check_world(plan: ResolvedPlan, group: ProcessGroup) -> None:
    """Whether as many processes run as the plan was resolved for, all with the same plan.

    Raises:
        EngineError: They do not.
    """
    if plan.world_size != group.world_size:
        raise EngineError(
            f"the plan was resolved for {plan.world_size} process(es), {group.world_size} run",
            key="world_size",
            value=plan.world_size,
            fix=f"plan.resolve(world_size={group.world_size})",
        )
    group.agree(plan.digest(), "resolved plan")
