"""Memory of ZeRO stage 3, where parameters are partitioned too.

Read in DeepSpeed 0.19.8 (``runtime/zero/stage3.py``, ``partition_parameters.py``,
``parameter_offload.py``, ``runtime/swap_tensor``) and measured on the CPU accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotune.plan import sizing
from zerotune.plan.memory.costing import BACKWARD, INITIALIZATION, STEP, TRAINING, Costing
from zerotune.plan.memory.values import MemoryItem
from zerotune.plan.sections import AioSection, OffloadSection, ZeroSection

_AIO_BLOCK = 1024**2


def stage_3(case: Costing, zero: ZeroSection, aio: AioSection | None) -> Iterator[MemoryItem]:
    """Everything is partitioned; parameters and optimizer may lie in host memory or in files."""
    yield from _weights(case, zero, aio)
    yield from _gathered(case, zero)
    yield from _reduction(case, zero)
    section = zero.offload_optimizer
    device = (section.device if section else None) or "none"
    pin = section is not None and section.pin_memory is True
    gradients = case.element * _part(case)
    note = f"{case.resolved.precision}, the partition's"
    if device == "none":
        yield case.item("gradients", case.device, gradients, note=note)
        yield from _optimizer_on_device(case)
    else:
        yield case.host("gradients", [gradients], pin, note=note)
        if device == "cpu":
            yield from _optimizer_on_host(case, pin)
        else:
            yield from _optimizer_in_files(case, section)
    # A zero gradient of the largest sub-group, freed before the partition's gradients are made.
    freed = case.master_bytes * _largest_group(case) - gradients
    place = case.device if device == "none" else "host"
    yield case.item("temporaries", place, max(0.0, freed), INITIALIZATION, "zero gradients")


def _part(case: Costing) -> int:
    return sum(sizing.partition(parameter, case.ranks) for parameter in case.model.trainable)


def _largest_group(case: Costing) -> int:
    return max(case.sub_groups, default=0)


def _weights(case: Costing, zero: ZeroSection, aio: AioSection | None) -> Iterator[MemoryItem]:
    section = zero.offload_param
    device = (section.device if section else None) or "none"
    note = case.resolved.precision + (f", 1/{case.ranks} of it" if case.ranks > 1 else "")
    parts = [sizing.partition(parameter, case.ranks) for parameter in case.model.parameters]
    total = case.element * sum(parts)
    if device == "none" or section is None:
        yield case.item("weights", case.device, total, note=note)
        # Partitions are made one by one and then moved into one flat buffer.
        yield case.item(
            "temporaries", case.device, total, INITIALIZATION, "partitions before they are joined"
        )
        return
    pin = section.pin_memory is True
    if device == "cpu":
        trained = case.element * _part(case)
        yield case.pinned("weights", [trained], note=note)
        yield case.item("weights", "host", total - trained, note="frozen")
        if pin and not case.on_cpu:
            yield case.pinned(
                "pinned cache",
                [case.element * part for part in parts],
                note="first copies of the partitions, which torch's allocator keeps",
            )
        return
    yield from _weights_in_files(case, section, aio)


def _weights_in_files(
    case: Costing, section: OffloadSection, aio: AioSection | None
) -> Iterator[MemoryItem]:
    block = aio.block_size if aio is not None and isinstance(aio.block_size, int) else _AIO_BLOCK
    swapping = sizing.Swapping(
        model=case.model, world_size=case.ranks, element_bytes=case.element, block_bytes=block
    )
    swapped = stays = 0
    for parameter in case.model.parameters:
        part = sizing.partition(parameter, case.ranks)
        if swapping.swappable(parameter):
            swapped += part
        else:
            stays += part
    yield case.item("weights", "nvme", case.element * swapped, note=case.resolved.precision)
    yield case.item("weights", "host", case.element * stays, note="too small to swap")
    size, count = int(section.buffer_size or 0), int(section.buffer_count or 0)
    yield case.locked("swap buffers", case.element * size * count, f"{count} of {size:,} elements")
    yield case.locked(
        "swap buffers", case.element * _largest_group(case), "the largest sub-group's weights"
    )


def _gathered(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    threshold = int(zero.stage3_param_persistence_threshold or 0)
    sizes = [parameter.numel for parameter in case.model.parameters]
    whole = sum(size for size in sizes if size <= threshold)
    device = (zero.offload_param.device if zero.offload_param is not None else None) or "none"
    if case.ranks == 1 and (device == "none" or (device == "cpu" and case.on_cpu)):
        return  # what is gathered is the partition itself
    yield case.item(
        "gathered weights", case.device, case.element * whole, note="small ones, never partitioned"
    )
    live = int(zero.stage3_max_live_parameters or 0) + int(zero.stage3_prefetch_bucket_size or 0)
    yield case.item(
        "gathered weights",
        case.device,
        case.element * min(max(live, max(sizes, default=0)), sum(sizes) - whole),
        BACKWARD,
        "stage3_max_live_parameters and what is fetched ahead",
    )


def _reduction(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    bucket = case.element * int(zero.reduce_bucket_size or 0)
    yield case.item("buckets", case.device, bucket, note="allocated once")
    yield case.item(
        "buckets",
        case.device,
        bucket * (1 + 1 / case.ranks),
        BACKWARD,
        "a bucket flattened, and this rank's part of the sum",
    )
    yield case.item(
        "temporaries", case.device, case.element * case.largest, BACKWARD, "the largest gradient"
    )


def _optimizer_on_device(case: Costing) -> Iterator[MemoryItem]:
    part = _part(case)
    yield case.item("master weights", case.device, 4 * part, note="fp32")
    yield case.item("optimizer states", case.device, 4 * case.states * part, TRAINING, "fp32")
    group = _largest_group(case)
    cast = 0 if case.element == 4 else 4 * group
    yield case.item(
        "temporaries",
        case.device,
        case.element * group + cast,
        STEP,
        "gradients of the largest sub-group, in fp32",
    )


def _optimizer_on_host(case: Costing, pin: bool) -> Iterator[MemoryItem]:
    part, master = _part(case), case.master_bytes
    note = "fp32" if master == 4 else "bf16"
    yield case.item("master weights", "host", master * part, note=note)
    yield case.host(
        "gradients", [master * group for group in case.sub_groups], pin, note=f"{note}, master's"
    )
    yield case.item(
        "optimizer states",
        "host",
        case.state_bytes * case.states * part,
        TRAINING,
        "fp32" if case.state_bytes == 4 else "bf16",
    )


def _optimizer_in_files(case: Costing, section: OffloadSection | None) -> Iterator[MemoryItem]:
    part = _part(case)
    yield case.item("master weights", "nvme", 4 * part, note="fp32")
    yield case.item("optimizer states", "nvme", 4 * case.states * part, note="fp32")
    yield case.item("gradients", "nvme", 4 * part, note="fp32")
    count = int(section.buffer_count or 0) if section is not None else 0
    group = _largest_group(case)
    yield case.locked(
        "swap buffers",
        4 * group * count,
        f"{count} of {group:,} elements, the largest sub-group",
    )
