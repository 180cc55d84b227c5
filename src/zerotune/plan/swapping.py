"""Swap pools for NVMe offload, sized from the largest partition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotune.errors import InvalidValueError
from zerotune.plan import sizing
from zerotune.plan.facts import ModelFacts, ParameterFacts
from zerotune.plan.kinds import AUTO
from zerotune.plan.sections import AioSection, OffloadSection, ZeroSection

if TYPE_CHECKING:
    from zerotune.plan.filling import Filler

_OPTIMIZER_BUFFERS = 4
"""Master weight, gradient and Adam's two moments are resident together."""
_PIPELINED_BUFFERS = 12
"""Measured with DeepSpeed 0.19.8: pipelined swapping with small sub-groups runs out below."""
_AIO_BLOCK = 1_048_576


def fill_nvme_param(
    section: OffloadSection,
    path: str,
    filler: Filler,
    zero: ZeroSection,
    aio: AioSection | None,
) -> OffloadSection:
    """Every key of ``offload_param`` on NVMe.

    Raises:
        InvalidValueError: The written ``buffer_size`` is smaller than the largest partition.
    """
    block = _block_size(aio)
    _check_buffer(section, path, filler, block)
    size, reason = _buffer_size(filler.model, filler.world_size)
    section = filler.fill(section, path, "buffer_size", size, reason)
    count = sizing.param_buffer_count(
        filler.model,
        filler.world_size,
        ahead=_number(zero.stage3_prefetch_bucket_size),
        element_bytes=filler.element_bytes,
        block_bytes=block,
    )
    section = filler.fill(
        section, path, "buffer_count", count, "one for each parameter fetched ahead or in use"
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
    pipelined = section.pipeline_read is True or section.pipeline_write is True
    count = _PIPELINED_BUFFERS if pipelined else _OPTIMIZER_BUFFERS
    section = filler.fill(
        section,
        path,
        "buffer_count",
        count,
        "weight, gradient and two moments of a sub-group"
        + (", for the groups before and after it too" if pipelined else ""),
    )
    return _without_auto_path(section, path, filler)


def _buffer_size(model: ModelFacts | None, world_size: int) -> tuple[int, str]:
    largest = sizing.largest_partition(model, world_size) if model else None
    if largest is None:
        return sizing.PARAM_BUFFER, "elements; no model was given, so DeepSpeed's default"
    part = max(1, sizing.partition(largest, world_size))
    return part, f"elements of the largest partition, {_describe(largest, world_size)}"


def _check_buffer(section: OffloadSection, path: str, filler: Filler, block: int) -> None:
    written = section.buffer_size
    if filler.model is None or written is None or isinstance(written, str):
        return
    swapped = [
        parameter
        for parameter in filler.model.parameters
        if sizing.swappable(
            parameter, filler.world_size, element_bytes=filler.element_bytes, block_bytes=block
        )
    ]
    largest = max(swapped, key=lambda p: p.numel, default=None)
    if largest is None or sizing.partition(largest, filler.world_size) <= written:
        return
    need = sizing.partition(largest, filler.world_size)
    raise InvalidValueError(
        f"counts elements and must hold the largest partition,"
        f" {_describe(largest, filler.world_size)} = {need} elements",
        key=f"{path}.buffer_size",
        value=written,
        fix=f'write at least {need}, or "{AUTO}"',
    )


def _describe(parameter: ParameterFacts, world_size: int) -> str:
    shape = " x ".join(str(size) for size in parameter.shape) or "a scalar"
    shared = f" shared by {world_size} ranks" if world_size > 1 else ""
    return f"{parameter.name} ({shape}){shared}"


def _without_auto_path(section: OffloadSection, path: str, filler: Filler) -> OffloadSection:
    if section.nvme_path == AUTO:
        return filler.drop(section, path, "nvme_path", "a leased folder will be used")
    return section


def _block_size(aio: AioSection | None) -> int:
    written = aio.block_size if aio else None
    return _AIO_BLOCK if written is None else _number(written)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
