"""The door to deepspeed and accelerate: import them, or say why that cannot be."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from types import ModuleType
from typing import Final

from packaging.version import Version

from zerotune._util.environment import environment
from zerotune.errors import MissingDependencyError, UnsupportedEngineError
from zerotune.platform.detect import OLDEST_DEEPSPEED

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
        "deepspeed.runtime.zero.partition_parameters",
        "Init",
        ("_convert_to_deepspeed_param", "_enable_mem_efficient_linear", "_zero_init_param"),
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
    with environment(DS_ACCELERATOR=accelerator):
        deepspeed = require(
            "deepspeed",
            name="DeepSpeed",
            fix="pip install deepspeed, or ask for the plain engine with deepspeed=False",
        )
    _check_accelerator(deepspeed, accelerator)
    _check_relied_on(deepspeed)
    return deepspeed


def require_accelerate() -> ModuleType:
    """Import accelerate.

    Raises:
        MissingDependencyError: It is not installed or does not import.
    """
    return require("accelerate", fix="pip install accelerate")


def require(
    module: str, *, fix: str, name: str | None = None, key: str | None = None
) -> ModuleType:
    """Import a package that somebody may not have.

    Args:
        module: What to import.
        fix: How to get it.
        name: What people call it; ``module`` when not given.
        key: The setting that asks for it; ``module`` when not given.

    Raises:
        MissingDependencyError: It is not installed or does not import.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{name or module} could not be imported ({error})", key=key or module, fix=fix
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
