"""The user's module after DeepSpeed's engine has ended: whole again, or saying why it is not.

Stage 3 leaves a module behind whose weights are empty, and whose hooks ask for a process group that
has ended. One rank alone holds all weights, so it can put them back without copying any. Several
ranks would have to gather them, which nobody may ask of a rank that closes because it failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.nn import functional

from zerotune._util.text import format_size
from zerotune.backend.running import GONE, gone
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
"""What stage 3 of DeepSpeed 0.19.8 adds, beside names that begin with ``ds_``."""
_SHARE: Final = 0.9
"""Of the free host memory, what weights from NVMe may take."""


class ReplacedLinear:
    """``torch.nn.functional.linear``, which stage 3 replaces for the whole process."""

    def __init__(self) -> None:
        self._users = 0
        self._before: Any = None

    def lend(self) -> None:
        """DeepSpeed may replace it, until ``put_back`` was called as often."""
        if self._users == 0:
            self._before = functional.linear
        self._users += 1

    def put_back(self) -> None:
        """Nobody needs DeepSpeed's any more, when the last calls it."""
        self._users -= 1
        # What somebody else has put there since is not DeepSpeed's.
        if self._users == 0 and functional.linear.__module__.startswith("deepspeed."):
            functional.linear = self._before


linear: Final = ReplacedLinear()


class GivenBack:
    """Puts a module's weights back in two steps, around the end of DeepSpeed's engine.

    Args:
        module: The user's module, which an engine of stage 3 has partitioned.
        world_size: Number of processes it is partitioned over.
    """

    def __init__(self, *, module: torch.nn.Module, world_size: int) -> None:
        self._module = module
        self._weights: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._reason: str | None = None
        if world_size > 1:
            self._reason = f"its weights were partitioned over {world_size} ranks"
            return
        self._reason = _too_large(module)
        if self._reason is None:
            self._weights = dict(_whole(module))

    def finish(self) -> None:
        """Put the weights back and remove what is left of stage 3; or let each use say why not."""
        if self._reason is not None:
            _refuse(self._module, self._reason)
            return
        for module in self._module.modules():
            module._parameters = dict(module._parameters.items())
            _strip(module, _OF_MODULES)
        for parameter, whole in self._weights.items():
            _strip(parameter, _OF_PARAMETERS)
            parameter.data = whole
            parameter.grad = None


def remove_hooks(module: torch.nn.Module) -> None:
    """Remove the hooks that DeepSpeed's engine leaves on a module; they hold all of the engine."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if (getattr(hook, "__module__", None) or "").startswith("deepspeed."):
                del hooks[key]


def end_threads(engine: Any) -> None:
    """Have a DeepSpeed engine that has ended hold no process groups and no files' queues.

    Their threads and descriptors last as long as somebody holds them, which the engine's module
    does too.
    """
    wrapper, parameters = engine.optimizer, list(engine.module.parameters())
    for holder in (engine, wrapper, getattr(wrapper, "parameter_offload", None), *parameters):
        attributes = getattr(holder, "__dict__", {})
        for name, value in attributes.items():
            if isinstance(value, dist.ProcessGroup):
                attributes[name] = None
            elif isinstance(value, list) and any(isinstance(e, dist.ProcessGroup) for e in value):
                attributes[name] = [None] * len(value)
    if getattr(wrapper, "optimizer_swapper", None) is not None:
        wrapper.optimizer_swapper = None
    for each in parameters:
        if (swapper := getattr(each, "nvme_swapper", None)) is not None:
            swapper.aio_read_handle = swapper.aio_write_handle = None


def _too_large(module: torch.nn.Module) -> str | None:
    """Why weights that lie on NVMe cannot be brought into host memory; ``None``: they can."""
    swapped = sum(
        held.ds_numel * held.element_size()
        for held in cast("Iterator[Any]", module.parameters())
        if hasattr(held, "ds_tensor") and not _in_memory(held)
    )
    if swapped == 0:
        return None
    free = detect_platform().host_memory.available
    if swapped <= _SHARE * free:
        return None
    return (
        f"its weights on NVMe ({format_size(swapped)}) do not fit into host memory "
        f"({format_size(free)} free)"
    )


def _in_memory(held: Any) -> bool:
    return bool(held.ds_tensor.status.name == "AVAILABLE")


def _whole(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    # Page-locked memory of DeepSpeed's own ends with its engine.
    borrowed = os.environ.get("DS_PIN_MEMORY_BACKEND") == "native"
    for parameter in module.parameters():
        held: Any = parameter
        if not hasattr(held, "ds_tensor"):
            continue
        if _in_memory(held):
            flat = held.ds_tensor.data.narrow(0, 0, held.ds_numel)
            yield parameter, (flat.clone() if borrowed else flat).view(held.ds_shape)
            continue
        held.all_gather()  # It lies on NVMe.
        yield parameter, parameter.data.detach().to("cpu", copy=True)
        held.partition()


def _strip(owner: torch.nn.Module | torch.nn.Parameter, names: frozenset[str]) -> None:
    for name in [name for name in vars(owner) if name in names or name.startswith("ds_")]:
        del vars(owner)[name]


def _refuse(module: torch.nn.Module, reason: str) -> None:
    def refuse(asked: torch.nn.Module, *_: Any) -> None:
        raise gone(asked, reason)

    vars(module)[GONE] = reason
    module.register_forward_pre_hook(refuse, prepend=True)
    module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
