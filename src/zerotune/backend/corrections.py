"""Where DeepSpeed starts from something else than was asked, and how that is put right."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from zerotune.decisions import Decision

_GROUP_CACHES: Final = (
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "mesh_device",
)


def forget_process_groups() -> None:
    """Make DeepSpeed forget the groups of a default process group that was just destroyed.

    It keeps them in module globals (0.18.9 for ever, 0.19.8 until they are destroyed through its
    own function), and the next engine of the process fails with "Group … is not registered".
    """
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is None:
        return
    for name in _GROUP_CACHES:
        if hasattr(groups, name):
            setattr(groups, name, None)


def undo_dummy_step(engine: Any) -> tuple[Decision, ...]:
    """Take back the step that DeepSpeed's stage-0 half-precision wrappers begin with.

    To allocate its states, ``FP16_Optimizer`` runs one optimizer step on zero gradients. That
    applies weight decay once and leaves Adam's counter at 1, so the first real step is corrected
    for bias as if it were the second (a loss difference of up to 5e-2 against stages 1-3).
    """
    wrapper = engine.optimizer
    if type(wrapper).__name__ not in ("FP16_Optimizer", "FP16_UnfusedOptimizer"):
        return ()
    wrapper.refresh_fp32_params()
    if hasattr(wrapper, "fp32_groups_flat"):
        for flat, parameters in zip(wrapper.fp32_groups_flat, wrapper.fp16_groups, strict=True):
            _copy_into(flat, parameters)
    wrapper.optimizer.state.clear()
    return (
        Decision(
            key="optimizer.step",
            before=1,
            after=0,
            reason="DeepSpeed takes one step on zero gradients to allocate its states at stage 0 "
            "in half precision; it was undone, so that training starts at step 0",
        ),
    )


def _copy_into(flat: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    offset = 0
    for parameter in parameters:
        target = flat.detach().narrow(0, offset, parameter.numel())
        target.copy_(parameter.detach().view(-1))
        offset += parameter.numel()
