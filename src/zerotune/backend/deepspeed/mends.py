"""Methods of DeepSpeed that correct training needs to be mended, each with a hash of its source.

A later release may change such a method. If the source is not the one that was tested, DeepSpeed
keeps its method, and a decision says so.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final, cast

import torch
from torch.nn import functional

from zerotune.backend.master_weights import MasterLayout
from zerotune.decisions import Decision

_SWAPPER: Final = "deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper"
_STAGE_3: Final = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_OFFLOAD: Final = "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload"
SWAPPED: Final = (f"{_SWAPPER}._adjust_for_misaligned_lengths", f"{_STAGE_3}._get_norm_groups")
"""What reads gradients of stage 3 back from NVMe."""
HOOKS: Final = tuple(
    f"{_OFFLOAD}.{when}_sub_module_{which}_function"
    for which in ("forward", "backward")
    for when in ("pre", "post")
)
"""What gathers and releases the weights of stage 3."""
TESTED: Final[Mapping[str, str]] = {
    "deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper._adjust_for_misaligned_lengths":
        "318177af13958ba4f9e389fea3adb8ba7b07ee0c281e454a84ef10001a117752",
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_norm_groups":
        "9b43592e5cde2cf3bdaaaa2313d8b13600d06ad11f49f92e9685cb5e1781744f",
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.pre_sub_module_forward_function":
        "a7fd04e1ffce608639813af0af8647f5be3cee12ef447ddb5774e1c5c02a3108",
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.post_sub_module_forward_function":
        "f18be910ddaea46b13c5f1b5302b6f358aa925f1a6af9c510d3a8055c57f0618",
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.pre_sub_module_backward_function":
        "1dd6d7d7cc74f68da189273562bd8bf427cd0ce80b749297360edba57aebb131",
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.post_sub_module_backward_function":
        "43248fd7a267d3b976fff5ab4be8d521a4db90a886738b2007054831becf17af",
}  # fmt: skip
"""SHA-256 of each method's source without indentation, in DeepSpeed 0.19.8."""


def changed(methods: tuple[str, ...]) -> str | None:
    """Return why mending methods of DeepSpeed is untested; ``None`` if it is tested.

    Args:
        methods: Dotted names, from ``TESTED``.
    """
    for name in methods:
        digest, method = digest_of(name), name.rpartition(".")[2]
        if digest is None:
            return f"the source code of DeepSpeed's {method} cannot be read"
        if digest != TESTED[name]:
            return f"DeepSpeed's {method} differs from every tested release"
    return None


def digest_of(name: str) -> str | None:
    """Return the SHA-256 of a method's source; ``None`` if the source cannot be read.

    Args:
        name: Dotted name.
    """
    owner, _, method = name.rpartition(".")
    module, _, kind = owner.rpartition(".")
    function = getattr(getattr(importlib.import_module(module), kind, None), method, None)
    if "instrument_w_nvtx" in getattr(function, "__qualname__", ""):
        # DeepSpeed's profiling decorator has the same source around every method, so digest the
        # method inside it.
        function = inspect.getclosurevars(cast(Any, function)).nonlocals["func"]
    return None if function is None else _source_digest(function)


@cache
def _source_digest(function: Any) -> str | None:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    lines = (line.strip() for line in source.splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()


# -- Gradients that stage 3 swaps to NVMe.


def align_swapped_gradients(engine: Any) -> tuple[Decision, ...]:
    """Make steps read the right gradients from NVMe.

    DeepSpeed 0.19.8 uses direct I/O to read a swapped gradient into the sub-group's buffer, at the
    gradient's offset. If the offset is not a multiple of the sector size, the read fails, and
    DeepSpeed ignores the error. The optimizer then silently uses stale data for every unaligned
    gradient of at least 1 MiB. Likewise for a weight that got no gradient: DeepSpeed reads nothing
    or the gradient of an earlier step, and the buffer may contain another weight's gradient.

    Args:
        engine: DeepSpeed's engine.
    """
    raw = engine.optimizer
    swapper = getattr(raw, "optimizer_swapper", None)
    if swapper is None:
        return ()
    reason = (
        "only aligned parts of gradients are swapped, and the few remaining elements stay in host "
        "memory, because DeepSpeed reads unaligned gradients back incorrectly; zeros are swapped "
        "for weights without a gradient, which DeepSpeed would update with other gradients"
    )
    if (untested := changed(SWAPPED)) is None:
        swapper._adjust_for_misaligned_lengths = partial(split_aligned, swapper)
        raw._get_norm_groups = partial(_after_swapping_zeros, raw, raw._get_norm_groups)
    else:
        reason = f"{untested}, so zerotune leaves gradient swapping to DeepSpeed, which may read "
        reason += "unaligned and missing gradients back incorrectly, as release 0.19.8 does"
    return (
        Decision(
            "zero_optimization.offload_optimizer.device",
            "nvme",
            "nvme",
            reason,
            "note" if untested is None else "warning",
        ),
    )


def _after_swapping_zeros(raw: Any, get_norm_groups: Callable[[], Any]) -> Any:
    """Swap out zeros for weights that got no gradient before the step swaps gradients in."""
    for index, parameters in enumerate(raw.fp16_groups):
        for parameter in parameters if raw._swappable_optimizer_subgroup(index) else ():
            key = raw.get_param_id(parameter)
            if key not in raw.norm_for_param_grads:
                _, offset, numel = raw.grad_position[key]
                raw.optimizer_swapper.swap_out_gradients(
                    parameter=raw.fp32_partitioned_groups_flat[index],
                    gradient_offsets=[offset],
                    gradient_tensors=[torch.zeros(numel, dtype=raw.optimizer_swapper.dtype)],
                )
    return get_norm_groups()


def split_aligned(
    swapper: Any, tensors: list[torch.Tensor], offsets: list[int]
) -> tuple[list[torch.Tensor], list[int]]:
    """Divide gradients into parts that are swapped and parts that stay in memory.

    The function replaces ``OptimizerSwapper._adjust_for_misaligned_lengths``, which aligns only the
    end of a gradient.

    Args:
        swapper: DeepSpeed's swapper, which defines the alignment and the smallest size of a swapped
            gradient.
        tensors: Gradients, 1-D.
        offsets: Offset of each gradient in the sub-group.

    Returns:
        All parts, and their offsets in the sub-group.
    """
    unit = swapper.numel_alignment
    parts: list[torch.Tensor] = []
    places: list[int] = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        length = tensor.numel()
        head = min(-offset % unit, length) if swapper.is_swappable_tensor(tensor=tensor) else length
        body = (length - head) // unit * unit
        cuts = ((0, head), (head, body), (head + body, length - head - body))
        for start, size in cuts:
            if size:
                parts.append(tensor.narrow(0, start, size))
                places.append(offset + start)
    return parts, places


# -- Gradients in host memory.


def zero_unused(raw: Any, layout: MasterLayout, module: torch.nn.Module) -> Decision:
    """Before each step, zero the gradients of weights that got none since the last step.

    DeepSpeed 0.19.8 would step such a weight with a gradient of an earlier step, which is still in
    host memory.

    Args:
        raw: DeepSpeed's optimizer, with the inner optimizer in host memory.
        layout: Layout of the inner optimizer's flat tensors.
        module: The model.
    """
    weights, slabs = dict(module.named_parameters()), layout.tensors
    places: dict[int, list[tuple[int, slice]]] = {}
    for address in layout.addresses:
        key = raw.get_param_id(weights[address.name])
        part = slice(address.offset, address.offset + address.numel)
        places.setdefault(id(slabs[address.slab]), []).append((key, part))

    def forget(adam: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for slab in [each for group in adam.param_groups for each in group["params"]]:
            for key, part in places.get(id(slab), ()) if slab.grad is not None else ():
                if key not in raw.norm_for_param_grads:
                    slab.grad.view(-1)[part].zero_()

    raw.optimizer.register_step_pre_hook(forget)
    return Decision(
        "zero_optimization.offload_optimizer.gradients",
        "of an earlier step for a weight that got none",
        "zeros for a weight that got none",
        "DeepSpeed leaves gradients in host memory after a step",
    )


# -- ``torch.nn.functional.linear``, which stage 3 replaces.


_linear: Final[list[Any]] = []
"""``torch.nn.functional.linear`` from before stage 3, once per open engine."""


@contextmanager
def lending_linear() -> Iterator[None]:
    """After the last engine ends, restore torch's ``linear`` function, which DeepSpeed replaces."""
    _linear.append(_linear[0] if _linear else functional.linear)
    try:
        yield
    finally:
        before = _linear.pop()
        # Keep a later replacement by other code.
        if not _linear and functional.linear.__module__.startswith("deepspeed."):
            functional.linear = before
