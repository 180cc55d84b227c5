"""Memory of engines that keep every weight on every rank: plain and ZeRO stages 0 to 2.

Read in DeepSpeed 0.19.8 (``runtime/engine.py``, ``runtime/fp16/fused_optimizer.py``,
``runtime/zero/stage_1_and_2.py``) and measured on the CPU accelerator; N elements, P of the
largest parameter, B of a bucket, D of this rank's part, e bytes each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zerotune.plan.memory.costing import BACKWARD, INITIALIZATION, STEP, TRAINING, Costing
from zerotune.plan.memory.values import MemoryItem
from zerotune.plan.sections import ZeroSection

_STAGE_0_BUCKET: Final = 500_000_000
"""``MEMORY_OPT_ALLREDUCE_SIZE``: elements of gradients flattened at a time at stage 0."""
_DDP_BUCKETS: Final = 4
"""torch's DistributedDataParallel copies every gradient into its buckets, in fp32."""


def plain(case: Costing) -> Iterator[MemoryItem]:
    """The plain engine: fp32 weights, autocast in the forward pass."""
    count = case.trained
    yield case.item("weights", case.device, 4 * case.all_elements, note="fp32")
    yield case.item("gradients", case.device, 4 * count, BACKWARD | STEP, "fp32")
    yield case.item("optimizer states", case.device, 4 * case.states * count, TRAINING, "fp32")
    if case.resolved.precision != "fp32":
        yield case.item(
            "weights", case.device, 2 * case.all_elements, BACKWARD, "copies that autocast keeps"
        )
    if case.ranks > 1:
        yield case.item("buckets", case.device, _DDP_BUCKETS * count, note="one copy of gradients")
    if case.on_cpu:
        yield case.item("temporaries", case.device, 12 * case.largest, STEP, "of the update")
    else:
        yield case.item(
            "temporaries", case.device, 4 * count, STEP, "torch updates all tensors at once"
        )


def stage_0(case: Costing) -> Iterator[MemoryItem]:
    """DeepSpeed without ZeRO: fp32 as it is, or master weights beside low-precision ones."""
    count, element = case.trained, case.element
    low = element == 2
    yield case.item("weights", case.device, element * case.all_elements, note=_precision(case))
    yield case.item("gradients", case.device, element * count, BACKWARD | STEP, _precision(case))
    yield case.item(
        "buckets",
        case.device,
        element * min(count, _STAGE_0_BUCKET),
        BACKWARD,
        "gradients flattened to be reduced",
    )
    states = 4 * case.states * count
    if not low:
        yield case.item("optimizer states", case.device, states, TRAINING, "fp32")
        return
    yield case.item("master weights", case.device, 4 * count, note="fp32")
    # The half-precision wrapper takes a step with zero gradients when it is made.
    yield case.item("optimizer states", case.device, states, note="fp32")
    yield case.item("temporaries", case.device, 4 * count, INITIALIZATION, "zero gradients, fp32")
    yield case.item(
        "temporaries", case.device, 8 * count, STEP, "gradients cast to fp32 and flattened"
    )


def stages_1_and_2(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    """ZeRO with whole weights: partitioned optimizer, and gradients at stage 2."""
    yield case.item("weights", case.device, case.element * case.all_elements, note=_precision(case))
    yield from _buckets(case, zero)
    offloads = zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    if offloads:
        pin = zero.offload_optimizer is not None and zero.offload_optimizer.pin_memory is True
        yield from _offloaded(case, zero, pin)
    else:
        yield from _on_device(case, zero)


def _buckets(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    bucket = int(zero.reduce_bucket_size or 0)
    copies = 1 + (zero.overlap_comm is True)
    note = "doubled by overlap_comm" if zero.overlap_comm is True else ""
    if case.ranks > 1:
        # What spans two ranks' parts is flattened once more; with one rank it is one slice.
        copies += 1
    yield case.item("buckets", case.device, case.element * bucket * copies, BACKWARD, note)


def _on_device(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    count, part, element = case.trained, case.flat_part, case.element
    yield case.item("master weights", case.device, 4 * part, note=_split(case, "fp32"))
    yield case.item(
        "optimizer states",
        case.device,
        4 * case.states * part,
        TRAINING,
        _split(case, "fp32"),
    )
    kept = count if zero.stage == 1 else part
    yield case.item("gradients", case.device, element * kept, BACKWARD | STEP, _precision(case))
    yield case.item(
        "temporaries", case.device, element * case.largest, BACKWARD, "the largest gradient"
    )
    cast = 0 if element == 4 else 4 * part
    yield case.item(
        "temporaries", case.device, element * part + cast, STEP, "gradients flattened, in fp32"
    )
    if _is_foreach(case):
        yield case.item("temporaries", case.device, 4 * part, STEP, "of the torch optimizer")
    # The weights are flattened into a copy; later a zero gradient lies beside the master weights.
    flattening = element * count - 4 * part
    yield case.item(
        "temporaries",
        case.device,
        max(flattening, element * part, 4 * part),
        INITIALIZATION,
        "flat copy of the weights, then zero gradients",
    )


def _offloaded(case: Costing, zero: ZeroSection, pin: bool) -> Iterator[MemoryItem]:
    count, part, element, largest = case.trained, case.flat_part, case.element, case.largest
    master = case.master_bytes
    note = _split(case, "fp32" if master == 4 else "bf16")
    yield case.host("master weights", [master * part], pin, note=note)
    yield case.host("gradients", [master * part], pin, note=note)
    yield case.host("staging", [element * part], pin, note="weights on their way to the device")
    yield case.host("staging", [element * largest], pin, note="one gradient")
    yield case.item(
        "optimizer states",
        "host",
        case.state_bytes * case.states * part,
        TRAINING,
        _split(case, "fp32" if case.state_bytes == 4 else "bf16"),
    )
    if (case.resolved.gradient_accumulation_steps or 1) > 1 and master == 4:
        yield case.host(
            "accumulated gradients",
            [element * parameter.numel / case.ranks for parameter in case.model.trainable],
            pin,
            TRAINING,
            "one block per parameter",
        )
    if zero.stage == 1:
        yield case.item("gradients", case.device, element * count, BACKWARD, _precision(case))
    yield case.item("temporaries", case.device, element * largest, note="one gradient")
    cast = 0 if element == 4 or case.on_cpu else 4
    yield case.item(
        "temporaries",
        case.device,
        (element + cast + 8) * largest,
        BACKWARD,
        "largest gradient, in fp32 for the host and in fp64 for the norm",
    )
    # The backend flattens them on the host, and the model as loaded is more than that.
    moving = element * largest if not case.on_cpu else element * part
    yield case.item(
        "temporaries", case.device, moving, INITIALIZATION, "weights on their way to one block"
    )


def _is_foreach(case: Costing) -> bool:
    choice = case.resolved.optimizer
    return choice is not None and choice.source == "torch" and not case.on_cpu


def _precision(case: Costing) -> str:
    return case.resolved.precision


def _split(case: Costing, precision: str) -> str:
    return precision if case.ranks == 1 else f"{precision}, 1/{case.ranks} of it"
