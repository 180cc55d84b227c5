"""Swap pools for NVMe offload, sized from what they have to hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from zerotune.errors import InvalidValueError
from zerotune.plan import sizing
from zerotune.plan.facts import ParameterFacts
from zerotune.plan.kinds import AUTO
from zerotune.plan.sections import AioSection, OffloadSection, ZeroSection

if TYPE_CHECKING:
    from zerotune.plan.filling import Filler

OPTIMIZER_BUFFERS = 4
"""Master weight, gradient and Adam's two moments are resident together."""
_AIO_BLOCK = 1_048_576


def swaps_parameters(zero: ZeroSection, filler: Filler, aio: AioSection | None) -> bool:
    """Whether any parameter really leaves host memory."""
    section = zero.offload_param
    if section is None or section.device != "nvme":
        return False
    stay = _number(section.max_in_cpu)
    swapping = _swapping(filler, aio)
    return stay == 0 if swapping is None else swapping.happens(stay)


def without_lossy_swapping(
    zero: ZeroSection, filler: Filler, aio: AioSection | None
) -> ZeroSection:
    """``zero`` with fp32 parameters kept off NVMe where DeepSpeed would round them to bf16.

    Read and measured in DeepSpeed 0.19.8: on an accelerator without fp16 ``zero.Init`` swaps
    through bf16 buffers whatever the model's type is (``_set_dtype`` lacks parentheses). The
    forward pass then fails, or, with ``max_in_cpu``, trains on rounded weights in silence.
    """
    section = zero.offload_param
    if section is None or section.device != "nvme":
        return zero
    swapping = _swapping(filler, aio)
    if filler.precision != "fp32" or filler.platform.fp16:
        return zero
    if swapping is not None and swapping.largest is None:
        return zero
    kept = filler.force(
        section,
        "zero_optimization.offload_param",
        "device",
        "cpu",
        "DeepSpeed 0.19.8 swaps fp32 parameters to NVMe as bf16 on an accelerator without fp16,"
        " which would lose precision; they wait in host memory instead",
        severity="warning",
    )
    return attrs.evolve(zero, offload_param=kept)


def without_prefetch(zero: ZeroSection, filler: Filler) -> ZeroSection:
    """``zero`` with nothing fetched ahead.

    Measured with DeepSpeed 0.19.8 (``__prefetch_nvme_param_partitions``): where the forward
    pass turns into the backward pass the last layer is queued twice, and the second step fails
    with "already assigned swap buffer", or the pool runs out ("Not enough buffers").
    """
    return filler.force(
        zero,
        "zero_optimization",
        "stage3_prefetch_bucket_size",
        0,
        "DeepSpeed 0.19.8 fails when it fetches parameters ahead from NVMe (a layer is queued"
        " twice at the turn to the backward pass)",
        severity="note" if zero.stage3_prefetch_bucket_size in (None, AUTO) else "warning",
    )


def fill_nvme_param(
    section: OffloadSection,
    path: str,
    filler: Filler,
    zero: ZeroSection,
    aio: AioSection | None,
) -> OffloadSection:
    """Every key of ``offload_param`` on NVMe.

    Raises:
        InvalidValueError: The written ``buffer_size`` cannot hold what DeepSpeed puts there.
    """
    swapping = _swapping(filler, aio)
    need, what = _buffer_need(swapping, zero)
    written = section.buffer_size
    if isinstance(written, int) and written < need:
        raise InvalidValueError(
            f"counts elements and must hold {what} = {need} elements",
            key=f"{path}.buffer_size",
            value=written,
            fix=f'write at least {need}, or "{AUTO}"',
        )
    size, why = (need, f"elements of {what}") if need else _default_size(swapping)
    section = filler.fill(section, path, "buffer_size", size, why)
    section = filler.fill(
        section,
        path,
        "buffer_count",
        swapping.buffers if swapping else sizing.PARAM_BUFFERS,
        "one for each parameter resident at once, and two to spare",
    )
    section = filler.fill(
        section,
        path,
        "max_in_cpu",
        0,
        "NVMe was asked for; with DeepSpeed's 1e9 a smaller model never leaves host memory",
    )
    return _without_auto_path(section, path, filler)


def fill_nvme_optimizer(
    section: OffloadSection,
    path: str,
    filler: Filler,
    _zero: ZeroSection,
    _aio: AioSection | None,
) -> OffloadSection:
    """Every key of ``offload_optimizer`` on NVMe."""
    for name in ("pipeline_read", "pipeline_write", "fast_init"):
        section = filler.fill(section, path, name, False)
    why = "weight, gradient and two moments of each sub-group that is resident at once"
    section = filler.fill(section, path, "buffer_count", optimizer_buffers(section), why)
    return _without_auto_path(section, path, filler)


def optimizer_buffers(section: OffloadSection) -> int:
    """Buffers an Adam optimizer needs with several sub-groups.

    Measured with DeepSpeed 0.19.8: 8 are enough for reading ahead, and fail with writing back
    as well, where 12 are enough.
    """
    overlapped = (section.pipeline_read is True) + (section.pipeline_write is True)
    return OPTIMIZER_BUFFERS * (1 + overlapped)


def _swapping(filler: Filler, aio: AioSection | None) -> sizing.Swapping | None:
    if filler.model is None:
        return None
    written = aio.block_size if aio else None
    return sizing.Swapping(
        model=filler.model,
        world_size=filler.world_size,
        element_bytes=filler.element_bytes,
        block_bytes=_number(written) or _AIO_BLOCK,
    )


def _buffer_need(swapping: sizing.Swapping | None, zero: ZeroSection) -> tuple[int, str]:
    """Elements one buffer must hold, and what that is; 0 when nothing is known to swap."""
    largest = swapping.largest if swapping else None
    if swapping is None or largest is None:
        return 0, ""
    part = sizing.partition(largest, swapping.world_size)
    what = f"the largest partition, {_describe(largest, swapping.world_size)}"
    optimizer = zero.offload_optimizer
    if optimizer is None or optimizer.device != "nvme" or optimizer.fast_init is not True:
        return part, what
    group = sizing.largest_sub_group(
        swapping.model, swapping.world_size, _number(zero.sub_group_size)
    )
    return max(part, group), (
        "the largest sub-group, because fast_init of offload_optimizer passes whole sub-groups"
        f" (sub_group_size {zero.sub_group_size}) through these buffers"
    )


def _default_size(swapping: sizing.Swapping | None) -> tuple[int, str]:
    if swapping is None:
        return sizing.PARAM_BUFFER, "elements; no model was given, so DeepSpeed's default"
    parts = (sizing.partition(p, swapping.world_size) for p in swapping.model.parameters)
    why = "elements; no parameter of this model is large enough to leave host memory"
    return max(1, *parts, 1), why


def _describe(parameter: ParameterFacts, world_size: int) -> str:
    shape = " x ".join(str(size) for size in parameter.shape) or "a scalar"
    shared = f" shared by {world_size} ranks" if world_size > 1 else ""
    return f"{parameter.name} ({shape}){shared}"


def _without_auto_path(section: OffloadSection, path: str, filler: Filler) -> OffloadSection:
    if section.nvme_path == AUTO:
        return filler.drop(section, path, "nvme_path", "a leased folder will be used")
    return section


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
