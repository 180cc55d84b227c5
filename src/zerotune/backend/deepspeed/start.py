"""The door to deepspeed and accelerate: import them, or say why that cannot be."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from types import ModuleType
from typing import Final

import torch
from packaging.version import Version

from zerotune._util.environment import environment
from zerotune.backend.deepspeed.layouts import full_shape
from zerotune.backend.distributed import ProcessGroup
from zerotune.errors import EngineError, MissingDependencyError, UnsupportedEngineError
from zerotune.plan.api import ResolvedPlan

OLDEST_DEEPSPEED: Final = "0.18.9"
"""Oldest release the test suite passes on."""

# Every attribute of DeepSpeed that zerotune relies on beyond its documented interface, named
# once. (module, class, attribute read in the class body or its methods)
RELIED_ON: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (
        "deepspeed.runtime.engine",
        "DeepSpeedEngine",
        (
            "gradient_accumulation_steps",
            "gradient_clipping",
            "zero_optimization_stage",
            "bfloat16_enabled",
            "fp16_enabled",
            "is_gradient_accumulation_boundary",
            "was_step_applied",
            "get_global_grad_norm",
            "train_micro_batch_size_per_gpu",
            "train_batch_size",
            "destroy",
        ),
    ),
    (
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer",
        ("update_lp_params", "_link_all_hp_params", "zero_grad", "reset_cpu_buffers"),
    ),
    (
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        (
            "_swappable_optimizer_subgroup",
            "_optimizer_states_and_gradient_swap_in",
            "_optimizer_states_and_gradient_swap_out",
            "_release_swap_buffers",
            "_reassign_or_swap_out_partitioned_parameters",
            "empty_partition_cache",
            "get_param_id",
            "set_grad_positions",
            "_pre_step",
            "_partition_all_parameters",
            "_overflow_clean_up",
        ),
    ),
    (
        "deepspeed.runtime.swap_tensor.optimizer_utils",
        "OptimizerSwapper",
        ("_adjust_for_misaligned_lengths", "is_swappable_tensor"),
    ),
    ("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer", ("step",)),
    ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer", ("step",)),
)


def require_deepspeed(*, accelerator: str) -> ModuleType:
    """Import DeepSpeed for an accelerator and check what zerotune relies on.

    Args:
        accelerator: DeepSpeed's name of it (``"cuda"``, ``"cpu"``, …).

    Raises:
        MissingDependencyError: DeepSpeed is not installed or does not import.
        UnsupportedEngineError: It is too old, or a new release moved something.
    """
    try:
        with environment(DS_ACCELERATOR=accelerator):
            deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise MissingDependencyError(
            f"DeepSpeed could not be imported ({error})",
            key="deepspeed",
            fix="pip install deepspeed, or ask for the plain engine with deepspeed=False",
        ) from error
    _check_accelerator(deepspeed, accelerator)
    _check_relied_on(deepspeed)
    return deepspeed


def require_accelerate() -> ModuleType:
    """Import accelerate.

    Raises:
        MissingDependencyError: It is not installed or does not import.
    """
    try:
        return importlib.import_module("accelerate")
    except ImportError as error:
        raise MissingDependencyError(
            f"accelerate could not be imported ({error})",
            key="accelerate",
            fix="pip install accelerate",
        ) from error


def quiet_deepspeed() -> None:
    """Keep DeepSpeed's own logger to warnings; zerotune reports what it decided itself."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def _check_accelerator(deepspeed: ModuleType, accelerator: str) -> None:
    running = deepspeed.accelerator.get_accelerator()._name
    if running != accelerator:
        raise UnsupportedEngineError(
            f"DeepSpeed was already imported in this process for {running!r}",
            key="DS_ACCELERATOR",
            value=accelerator,
            fix=f"set DS_ACCELERATOR={accelerator} before anything imports deepspeed",
        )


def _check_relied_on(deepspeed: ModuleType) -> None:
    version = deepspeed.__version__
    if Version(version).release < Version(OLDEST_DEEPSPEED).release:
        raise UnsupportedEngineError(
            f"zerotune needs DeepSpeed {OLDEST_DEEPSPEED} or newer",
            key="deepspeed",
            value=version,
            fix=f"pip install 'deepspeed>={OLDEST_DEEPSPEED}'",
        )
    moved = [
        f"{module}.{name}.{attribute}"
        for module, name, attributes in RELIED_ON
        for attribute in attributes
        if not hasattr(getattr(importlib.import_module(module), name, None), attribute)
    ]
    if moved:
        raise UnsupportedEngineError(
            f"DeepSpeed {version} no longer has {', '.join(moved)}",
            key="deepspeed",
            value=version,
            fix="install the newest DeepSpeed that zerotune's documentation lists as tested",
        )


# -- What must hold of plan and model before DeepSpeed is asked.


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
