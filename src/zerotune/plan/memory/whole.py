"""Memory of engines that keep every weight on every rank: plain and ZeRO stages 0 to 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zerotune.plan.memory.costing import BACKWARD, INITIALIZATION, STEP, TRAINING, Costing
from zerotune.plan.memory.items import MemoryItem
from zerotune.plan.sections import ZeroSection, pins

# From the code of DeepSpeed 0.19.8 (``runtime/engine.py``, ``runtime/fp16/fused_optimizer.py``,
# ``runtime/zero/stage_1_and_2.py``), and measured on the CPU accelerator.

_STAGE_0_BUCKET: Final = 500_000_000
"""``MEMORY_OPT_ALLREDUCE_SIZE``: elements of gradients flattened at a time at stage 0."""


_DDP_BUCKETS: Final = 4
"""Bytes per element in the buckets of torch's DistributedDataParallel, which copies every gradient
in fp32."""


def plain(case: Costing) -> Iterator[MemoryItem]:
    """Yield the memory used by the plain engine: fp32 weights, and autocast in the forward pass."""
    count = case.model.trainable_numel
    yield case.item("weights", case.device, case.model.weight_bytes(4), note=kept_in(case, "fp32"))
    yield from cast_copies(case)
    if case.ranks > 1:
        yield case.item("buckets", case.device, _DDP_BUCKETS * count, note="one copy of gradients")
    yield case.item("gradients", case.device, 4 * count, BACKWARD | STEP, "fp32")
    yield case.item("optimizer states", case.device, 4 * case.states * count, TRAINING, "fp32")
    if not case.on_cpu:
        yield case.item(
            "temporaries", case.device, 4 * count, STEP, "torch updates all tensors at once"
        )
    else:
        yield case.item("temporaries", case.device, 12 * case.largest, STEP, "of the update")


def cast_copies(case: Costing) -> Iterator[MemoryItem]:
    """Yield the weights in half precision that autocast keeps until the end of the pass."""
    if case.resolved.precision != "fp32":
        copied = 2 * (case.model.numel - case.model.quantized_numel)
        yield case.item("weights", case.device, copied, BACKWARD, "copies that autocast keeps")


def stage_0(case: Costing) -> Iterator[MemoryItem]:
    """Yield the memory that DeepSpeed uses without ZeRO, in fp32 or with fp32 master weights."""
    count, element = case.model.trainable_numel, case.element
    low = element == 2
    weights = case.model.weight_bytes(element)
    yield case.item("weights", case.device, weights, note=kept_in(case, case.resolved.precision))
    yield case.item(
        "gradients", case.device, element * count, BACKWARD | STEP, case.resolved.precision
    )
    yield case.item(
        "buckets",
        case.device,
        element * min(count, _STAGE_0_BUCKET),
        BACKWARD,
        "flattened gradients for the reduction",
    )
    states = 4 * case.states * count
    if not low:
        yield case.item("optimizer states", case.device, states, TRAINING, "fp32")
        return
    yield case.item("master weights", case.device, 4 * count, note="fp32")
    # The half-precision wrapper runs a step with zero gradients when it is created.
    yield case.item("optimizer states", case.device, states, note="fp32")
    yield case.item("temporaries", case.device, 4 * count, INITIALIZATION, "zero gradients, fp32")
    yield case.item("temporaries", case.device, 8 * count, STEP, "flattened gradients in fp32")


def stages_1_and_2(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    """Yield the memory used at ZeRO stages 1 and 2, where each rank stores the whole weights."""
    weights = case.model.weight_bytes(case.element)
    yield case.item("weights", case.device, weights, note=kept_in(case, case.resolved.precision))
    yield from _buckets(case, zero)
    offloads = zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    if offloads:
        yield from _beside_offload(case, zero, pins(zero.offload_optimizer))
    else:
        yield from _on_device(case, zero)


def _buckets(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    bucket = int(zero.reduce_bucket_size or 0)
    copies = 1 + (zero.overlap_comm is True)
    note = "doubled by overlap_comm" if zero.overlap_comm is True else ""
    if case.ranks > 1:
        # Gradients that span two ranks' parts are flattened again; one rank has a single slice.
        copies += 1
    yield case.item("buckets", case.device, case.element * bucket * copies, BACKWARD, note)


def _on_device(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    count, part, element = case.model.trainable_numel, case.flat_part, case.element
    yield case.item("master weights", case.device, 4 * part, note=share_of(case, "fp32"))
    yield case.item(
        "optimizer states", case.device, 4 * case.states * part, TRAINING, share_of(case, "fp32")
    )
    kept = count if zero.stage == 1 else part
    yield case.item(
        "gradients", case.device, element * kept, BACKWARD | STEP, case.resolved.precision
    )
    yield case.item(
        "temporaries", case.device, element * case.largest, BACKWARD, "the largest gradient"
    )
    cast = 0 if element == 4 else 4 * part
    yield case.item(
        "temporaries", case.device, element * part + cast, STEP, "flattened gradients, in fp32"
    )
    if case.resolved.optimizer.source == "torch" and not case.on_cpu:
        yield case.item("temporaries", case.device, 4 * part, STEP, "of the torch optimizer")
    # First a flat copy of the weights exists; later, zero gradients beside the master weights.
    flattening = element * count - 4 * part
    yield case.item(
        "temporaries",
        case.device,
        max(flattening, element * part, 4 * part),
        INITIALIZATION,
        "a flat copy of the weights, and later zero gradients",
    )


def _beside_offload(case: Costing, zero: ZeroSection, pin: bool) -> Iterator[MemoryItem]:
    count, part = case.model.trainable_numel, case.flat_part
    element, largest = case.element, case.largest
    note = share_of(case, "fp32")
    yield case.host("master weights", [4 * part], pin, note=note)
    yield case.host("gradients", [4 * part], pin, note=note)
    yield case.host(
        "staging", [element * part], pin, note="updated weights before the copy to the device"
    )
    yield case.host("staging", [element * largest], pin, note="one gradient")
    yield case.item("optimizer states", "host", 4 * case.states * part, TRAINING, note)
    if (case.resolved.gradient_accumulation_steps or 1) > 1:
        yield case.host(
            "accumulated gradients",
            [element * parameter.numel / case.ranks for parameter in case.model.trainable],
            pin,
            TRAINING,
            "one block per parameter",
        )
    if zero.stage == 1:
        yield case.item(
            "gradients", case.device, element * count, BACKWARD, case.resolved.precision
        )
    yield case.item("temporaries", case.device, element * largest, note="one gradient")
    # One after the other: fp64 for the norm, and fp32 for the host.
    note = "copies of the largest gradient"
    yield case.item("temporaries", case.device, (element + 8) * largest, BACKWARD, note)
    moving = element * (part if case.on_cpu else count)
    yield case.item(
        "temporaries", case.device, moving, INITIALIZATION, "weights being copied to one block"
    )


def kept_in(case: Costing, precision: str) -> str:
    """Return the storage dtypes of the weights as text."""
    return ", ".join((*case.model.storages, precision))


def share_of(case: Costing, precision: str) -> str:
    """Return a precision, and the share of it on a rank, as text."""
    return precision if case.ranks == 1 else f"{precision}, 1/{case.ranks} of it"
