"""What is known of the installed DeepSpeed: its classes, and whether they are as they were."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch

from zerotune.backend.deepspeed.partitioned import PartitionedWrapper
from zerotune.backend.deepspeed.replicated import Fp32Wrapper, HalfWrapper
from zerotune.backend.deepspeed.sharded import ShardedWrapper
from zerotune.backend.deepspeed.wrapper import OptimizerWrapper, Upstream
from zerotune.errors import UnsupportedEngineError

_WRAPPERS: Final[dict[str, type[OptimizerWrapper]]] = {
    "DeepSpeedZeroOptimizer": PartitionedWrapper,
    "DeepSpeedZeroOptimizer_Stage3": ShardedWrapper,
    "FP16_Optimizer": HalfWrapper,
    "FP16_UnfusedOptimizer": HalfWrapper,
}
"""By the name of DeepSpeed's class: a subclass may keep its weights elsewhere."""
UPSTREAM: Final = (
    Upstream(
        owner="deepspeed.runtime.engine.DeepSpeedEngine",
        relied_on=(
            "bfloat16_enabled",
            "destroy",
            "fp16_enabled",
            "get_global_grad_norm",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "is_gradient_accumulation_boundary",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "was_step_applied",
            "zero_optimization_stage",
        ),
    ),
    *(each for kind in (PartitionedWrapper, ShardedWrapper, HalfWrapper) for each in kind.upstream),
)


def wrapper_of(engine: Any) -> OptimizerWrapper:
    """What is known of the optimizer of a ``deepspeed.DeepSpeedEngine``."""
    name = type(engine.optimizer).__name__
    if name in _WRAPPERS:
        return _WRAPPERS[name](engine)
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return Fp32Wrapper(engine)
    raise UnsupportedEngineError(
        f"master weights inside DeepSpeed's {name} cannot be reached",
        key="engine.optimizer",
        value=name,
        fix="with bf16 at stage 1, leave data_types.grad_accum_dtype unset",
    )


def check_upstream(deepspeed: ModuleType) -> None:
    """Refuse a DeepSpeed that lacks something that zerotune relies on."""
    missing = [name for upstream in UPSTREAM for name in upstream.missing]
    if missing:
        raise UnsupportedEngineError(
            f"DeepSpeed {deepspeed.__version__} no longer has {', '.join(missing)}",
            key="deepspeed",
            value=deepspeed.__version__,
            fix="install the newest DeepSpeed that zerotune's documentation lists as tested",
        )


def digests() -> dict[str, str | None]:
    """Of the replaced methods of the installed DeepSpeed, by dotted name."""
    return {name: each for upstream in UPSTREAM for name, each in upstream.digests.items()}
