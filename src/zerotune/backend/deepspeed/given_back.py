"""Weights of a module whose stage-3 engine has ended.

DeepSpeed's engine leaves the module with empty weights, and with hooks that use a destroyed process
group. A single rank has all weights and restores them without copies. Several ranks would have to
gather them, which is impossible if the engine closes because a rank has failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch

from zerotune._util.text import format_size
from zerotune.backend.engine import GONE, gone
from zerotune.platform import detect_platform

_OF_PARAMETERS: Final = frozenset(
    {
        "_z3_optimizer",
        "aligned_size",
        "all_gather",
        "all_gather_coalesced",
        "convert_to_zero_parameters",
        "is_external_param",
        "item",
        "nvme_swapper",
        "padding_size",
        "partition",
        "partition_gradients",
        "partition_numel",
        "reduce_gradients_at_owner",
    }
)
_OF_MODULES: Final = frozenset(
    {
        "_external_params",
        "_original_parameters",
        "_z3_leaf",
        "all_parameters",
        "applied_pre_backward_ref_cnt",
        "post_bwd_fn",
        "pre_bwd_fn",
    }
)
"""Attributes that stage 3 of DeepSpeed 0.19.8 adds, besides names that begin with ``ds_``."""
_SHARE: Final = 0.9
"""Largest fraction of free host memory for weights restored from NVMe."""


@contextmanager
def restored(module: torch.nn.Module, optimizer: Any, *, world_size: int) -> Iterator[None]:
    """When DeepSpeed's engine ends inside the block, restore the module's weights.

    If the weights cannot be restored, every use of the module raises an error with the reason.

    Args:
        module: The module that the engine trains.
        optimizer: DeepSpeed's stage-3 optimizer. It loses its gradients, since weights that are
            read from NVMe need their memory.
        world_size: Number of ranks.
    """
    _free_gradients(optimizer)
    reason: str | None = f"the model's weights were partitioned over {world_size} ranks"
    if world_size == 1:
        reason = _too_large(module)
    weights = {} if reason is not None else dict(_whole_weights(module))
    yield
    _forget(module)
    if reason is not None:

        def refuse(asked: torch.nn.Module, *_: Any) -> None:
            raise gone(asked, reason)

        vars(module)[GONE] = reason
        module.register_forward_pre_hook(refuse, prepend=True)
        module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
        return
    for each in module.modules():
        each._parameters = dict(each._parameters.items())
        _strip(each, _OF_MODULES)
    for parameter, whole in weights.items():
        _strip(parameter, _OF_PARAMETERS)
        parameter.data = whole
        parameter.grad = None


def _forget(module: torch.nn.Module) -> None:
    """Remove a model from the list that DeepSpeed keeps, and reads for the next engine's model."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    ended = set(module.modules())
    FWD_MODULE_STACK[:] = [each for each in FWD_MODULE_STACK if each not in ended]


def _free_gradients(optimizer: Any) -> None:
    from deepspeed.accelerator import get_accelerator

    buffer = optimizer.grad_partitions_flat_buffer
    if buffer is not None:
        # Frees only what DeepSpeed has page-locked itself.
        get_accelerator().unpin_memory(buffer)
        optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.clear()
        optimizer.grad_partitions_flat_buffer = None


def _too_large(module: torch.nn.Module) -> str | None:
    """Why weights on NVMe cannot be restored to host memory; ``None`` if they can."""
    swapped = sum(
        held.ds_numel * held.element_size()
        for held in cast("Iterator[Any]", module.parameters())
        if hasattr(held, "ds_tensor") and not _in_memory(held)
    )
    if swapped == 0 or swapped <= _SHARE * (free := detect_platform().host_memory.available):
        return None
    return (
        f"the model's weights on NVMe ({format_size(swapped)}) do not fit in host memory "
        f"({format_size(free)} free)"
    )


def _in_memory(held: Any) -> bool:
    return bool(held.ds_tensor.status.name == "AVAILABLE")


def _whole_weights(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    # Memory that DeepSpeed page-locks itself is freed with its engine.
    borrowed = os.environ.get("DS_PIN_MEMORY_BACKEND") == "native"
    for parameter in module.parameters():
        held: Any = parameter
        if not hasattr(held, "ds_tensor"):
            continue
        if _in_memory(held):
            flat = held.ds_tensor.data.narrow(0, 0, held.ds_numel)
            yield parameter, (flat.clone() if borrowed else flat).view(held.ds_shape)
            continue
        held.all_gather()  # The parameter is on NVMe.
        yield parameter, parameter.data.detach().to("cpu", copy=True)
        held.partition()


def _strip(owner: torch.nn.Module | torch.nn.Parameter, names: frozenset[str]) -> None:
    for name in [name for name in vars(owner) if name in names or name.startswith("ds_")]:
        del vars(owner)[name]
