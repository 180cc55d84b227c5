"""Memory of ZeRO stage 3, where parameters are partitioned too."""

from __future__ import annotations

from collections.abc import Iterator

from zerotune.plan.memory.costing import BACKWARD, INITIALIZATION, STEP, TRAINING, Costing
from zerotune.plan.memory.items import MemoryItem
from zerotune.plan.memory.swap_files import swap_files
from zerotune.plan.memory.whole import kept_in, share_of
from zerotune.plan.resolve.sizes import gathered_together
from zerotune.plan.sections import OffloadSection, ZeroSection, pins

# From the code of DeepSpeed 0.19.8 (``runtime/zero/stage3.py``, ``partition_parameters.py``,
# ``parameter_offload.py``, ``runtime/swap_tensor``), and measured on the CPU accelerator.


def stage_3(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    """Yield the memory used at stage 3; parameters and optimizer may be in host memory or files."""
    yield from _weights(case, zero)
    yield from _gathered(case, zero)
    yield from _reduction(case, zero)
    section = zero.offload_optimizer
    device = (section.device if section else None) or "none"
    pin = pins(section)
    gradients = case.element * case.owned
    note = f"{case.resolved.precision}, the partition's"
    if device == "none":
        yield case.item("gradients", case.device, gradients, note=note)
        yield from _optimizer_on_device(case)
    else:
        yield case.host("gradients", [gradients], pin, note=note)
        if device == "cpu":
            yield from _optimizer_on_host(case, pin)
        else:
            yield from _optimizer_in_files(case, zero, section)
    # Zero gradients of the largest sub-group, freed before the partition's gradients are created.
    freed = 4 * _largest_group(case) - gradients
    place = case.device if device == "none" else "host"
    yield case.item("temporaries", place, max(0.0, freed), INITIALIZATION, "zero gradients")


def _largest_group(case: Costing) -> int:
    return max(case.sub_groups, default=0)


def _weights(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    section = zero.offload_param
    device = (section.device if section else None) or "none"
    note = share_of(case, kept_in(case, case.resolved.precision))
    parts = case.model.parts(case.ranks)
    total = case.model.weight_bytes(case.element, ranks=case.ranks)
    if device == "none" or section is None:
        yield case.item("weights", case.device, total, note=note)
        # Freed before master weights are created.
        on_host = case.on_cpu or case.resolved.offload_optimizer == "cpu"
        passing = total - on_host * 4 * case.owned
        note = "partitions on their way to one buffer"
        yield case.item("temporaries", "host", max(0.0, passing), INITIALIZATION, note)
        return
    pin = section.pin_memory is True
    if device == "cpu":
        trained = case.element * case.owned
        yield case.pinned("weights", [trained], note=note)
        yield case.item("weights", "host", total - trained, note="frozen")
        if pin and not case.on_cpu:
            element = case.element
            yield case.pinned(
                "pinned cache",
                [element * part for part in parts],
                note="initial pinned copies of the partitions, cached by torch's host allocator",
            )
        return
    yield from _weights_in_files(case, section)


def _weights_in_files(case: Costing, section: OffloadSection) -> Iterator[MemoryItem]:
    files = swap_files(case.resolved, case.model)["weights"]
    yield case.item("weights", "nvme", files.nbytes, note=case.resolved.precision)
    yield case.item("weights", "host", files.stays, note="too small to swap")
    size, count = int(section.buffer_size or 0), int(section.buffer_count or 0)
    note = f"{count} buffers of {size:,} elements"
    yield case.locked("swap buffers", case.element * size * count, note)
    yield case.locked(
        "swap buffers", case.element * _largest_group(case), "the largest sub-group's weights"
    )


def _gathered(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    device = (zero.offload_param.device if zero.offload_param is not None else None) or "none"
    if case.ranks == 1 and (device == "none" or case.on_cpu):
        return  # the partition is the whole weight, and not copied
    threshold = int(zero.stage3_param_persistence_threshold or 0)
    released = [each for each in case.model.parameters if each.numel > threshold]
    whole = case.model.numel - sum([each.numel for each in released])
    yield case.item(
        "gathered weights",
        case.device,
        case.element * whole,
        note="small weights, never partitioned",
    )
    live = int(zero.stage3_max_live_parameters or 0) + int(zero.stage3_prefetch_bucket_size or 0)
    # DeepSpeed limits only what it prefetches, not what a module or a recomputed block needs.
    blocks = case.model.units if case.workload.gradient_checkpointing else ()
    groups = gathered_together(released, blocks)
    needed = max([sum([each.numel for each in group]) for group in groups], default=0)
    yield case.item(
        "gathered weights",
        case.device,
        min(
            case.element * max(live, needed),
            case.model.weight_bytes(case.element) - case.element * whole,
        ),
        BACKWARD,
        "prefetched weights, and those of a recomputed block",
    )


def _reduction(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    bucket = case.element * int(zero.reduce_bucket_size or 0)
    yield case.item("buckets", case.device, bucket, note="allocated once")
    # A single rank's sum is the flattened bucket itself. Sums copied to the host come back for
    # their norms (``partition_grads``).
    returned = not case.on_cpu and case.resolved.offload_optimizer != "none"
    parts = 1 + ((case.ranks > 1) + returned) / case.ranks
    note = "a flattened bucket, and this rank's part of the sum"
    yield case.item("buckets", case.device, bucket * parts, BACKWARD, note)
    nbytes = case.element * case.largest
    yield case.item("temporaries", case.device, nbytes, BACKWARD, "the largest gradient")


def _optimizer_on_device(case: Costing) -> Iterator[MemoryItem]:
    part = case.owned
    yield case.item("master weights", case.device, 4 * part, note="fp32")
    yield case.item("optimizer states", case.device, 4 * case.states * part, TRAINING, "fp32")
    group = _largest_group(case)
    cast = 0 if case.element == 4 else 4 * group
    yield case.item(
        "temporaries",
        case.device,
        case.element * group + cast,
        STEP,
        "fp32 gradients of the largest sub-group",
    )


def _optimizer_on_host(case: Costing, pin: bool) -> Iterator[MemoryItem]:
    part = case.owned - sum(case.stays)
    yield from _share_on_device(case)
    yield case.item("master weights", "host", 4 * part, note="fp32")
    gradients = [4 * group for group in case.sub_groups[len(case.stays) :]]
    yield case.host("gradients", gradients, pin, note="fp32, master's")
    yield case.item("optimizer states", "host", 4 * case.states * part, TRAINING, "fp32")


def _share_on_device(case: Costing) -> Iterator[MemoryItem]:
    """Yield what an offload ratio below 1 keeps on the device, in fp32."""
    stays, note = sum(case.stays), "fp32, the part that is not offloaded"
    yield case.item("master weights", case.device, 4 * stays, note=note)
    yield case.item("gradients", case.device, 4 * stays, note=note)
    yield case.item("optimizer states", case.device, 4 * case.states * stays, TRAINING, note)
    copied = 4 * max(case.stays, default=0)
    yield case.item("temporaries", case.device, copied, INITIALIZATION, "a copy of one sub-group")


def _optimizer_in_files(
    case: Costing, zero: ZeroSection, section: OffloadSection | None
) -> Iterator[MemoryItem]:
    part, files = case.owned, swap_files(case.resolved, case.model)
    for component in ("master weights", "optimizer states", "gradients"):
        yield case.item(component, "nvme", files[component].nbytes, note="fp32")
        stays = files[component].stays
        yield case.item(component, "host", stays, note="fp32, too small to swap")
    count = int(section.buffer_count or 0) if section is not None else 0
    group = _largest_group(case)
    yield case.locked(
        "swap buffers",
        4 * group * count,
        f"{count} buffers of {group:,} elements, the size of the largest sub-group",
    )
    bucket = max(int(zero.reduce_bucket_size or 0), case.largest) / case.ranks
    note = "a bucket's gradients in fp32, before they are written"
    yield case.item("temporaries", case.device, 4 * min(bucket, part), BACKWARD, note)
    note = "states of the largest sub-group, which the first step creates"
    yield case.item("temporaries", "host", 4 * case.states * group, STEP, note)
