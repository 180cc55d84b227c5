"""Memory of the host engine: some or all units on the device, everything in host memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Final

import attrs

from zerotune._util.text import format_size
from zerotune.decisions import Decision
from zerotune.plan.context import Streaming
from zerotune.plan.facts import resident_units
from zerotune.plan.memory.costing import BACKWARD, STEP, TRAINING, Costing
from zerotune.plan.memory.items import Estimate, MemoryItem
from zerotune.plan.memory.whole import cast_copies, kept_in, share_of
from zerotune.plan.resolved import Resolved
from zerotune.plan.sections import pins

# From the code of ``zerotune.backend.host``, and counted in its passes on the CPU.

GRADIENTS_UNDER_WAY: Final = 2
"""Number of units whose gradients are copied to the host while another unit is in its backward
pass."""


WEIGHTS_AT_A_TIME: Final = 2
"""Number of streams on which weights are updated on the device in turns. Each keeps the memory of a
weight for its next one."""


NOISE_PERIOD: Final = 2**22
"""Number of elements of a group after which a step's random bits repeat. Elements may share bits:
an element's rounding errors cancel over the steps as long as its bits differ between steps."""


_UPDATED: Final = 12
"""Bytes per element, beside states, of a weight's update on the device: its master weight and
gradient in fp32, and what the optimizer computes."""
_SPLIT: Final = 16
"""Bytes per element while a weight is divided into its halves, after states and gradient."""


KEPT_BY_STREAM: Final = "free memory that the other stream keeps for its next weight"


def gradients_stay(resolved: Resolved) -> bool:
    """Return whether gradients of streamed weights stay on the device, where these are updated.

    Args:
        resolved: The plan.
    """
    at_once = not resolved.gradient_clipping and resolved.gradient_accumulation_steps == 1
    alone = resolved.world_size == 1 and resolved.streaming is not None
    return resolved.update is not None and at_once and alone


def gradient_buffers(resolved: Resolved, sizes: Collection[int]) -> tuple[int, str]:
    """Return the number of gradient buffers that streamed units share in host memory.

    Args:
        resolved: The plan.
        sizes: Number of gradient elements in each streamed unit.

    Returns:
        The number of buffers (0 if every unit has its own), and the reason for that number.
    """
    count = (resolved.streaming or Streaming()).gradient_buffers
    obstacles = {
        "updates start only when the norm of all gradients is known": resolved.gradient_clipping
        > 0,
        "an overflow in fp16 must leave all weights as they are": resolved.precision == "fp16",
        "host memory accumulates the gradients of "
        "all micro batches": resolved.gradient_accumulation_steps > 1,
        f"{count} buffers of the largest unit's size would not save memory": (
            count * max(sizes, default=0) >= sum(sizes)
        ),
    }
    stay = next((reason for reason, holds in obstacles.items() if holds), None)
    if stay is not None:
        return 0, stay
    return count, "each unit is updated in the backward pass, and then frees its buffer"


_LEAST_BUFFERS: Final = 3
"""Minimum number of gradient buffers; with fewer, gradients must wait for optimizer passes."""


BUFFERS_IN_BACKWARD: Final = 2
"""Number of gradient buffers in use during the backward pass: one receives gradients while a unit
is updated from the other."""


_LEFT: Final = 4
"""At most one in this many units is updated in the next forward pass, which takes at least that
share of the time of both passes."""


def with_gradients_kept(estimate: Estimate, usable: int) -> Resolved:
    """Return a streaming plan with as many gradient buffers as fit in host memory and save time.

    Args:
        estimate: Estimate of the streaming plan.
        usable: Bytes of host memory that each rank may use.
    """
    resolved = estimate.resolved
    if resolved.model is None or resolved.streaming is None:
        return resolved
    case = Costing(resolved=resolved, model=resolved.model, workload=estimate.workload)
    units = case.streamed.trained
    buffers, _ = gradient_buffers(resolved, units)
    if not buffers:
        return resolved
    room = (usable - estimate.host) // math.ceil(case.unit_element * max(units) / case.ranks)
    useful = BUFFERS_IN_BACKWARD + math.ceil(len(units) / _LEFT)
    kept = min(max(buffers + room, _LEAST_BUFFERS), max(useful, _LEAST_BUFFERS))
    decision = Decision(
        "streamed.gradient_buffers",
        buffers,
        kept,
        f"as many as fit in the {format_size(usable)} of host memory per rank; more than "
        f"{useful} buffers have no benefit for {len(units)} units",
    )
    streaming = attrs.evolve(resolved.streaming, gradient_buffers=kept)
    return resolved.decided(decision, streamed=streaming)


def hosted(case: Costing) -> Iterator[MemoryItem]:
    """Yield the memory used by the host engine; master weights and states are on the host."""
    if case.resolved.streaming is None:
        yield from _resident(case)
        return
    units, element, precision = case.streamed, case.unit_element, case.resolved.precision
    resident = units.resident_trained + units.resident_frozen
    yield case.item(
        "weights", case.device, element * resident, note=f"{precision}, outside of units"
    )
    capacity = case.streamed_capacity
    note = f"room for {capacity / (element * units.total or 1):.0%} of {len(units.units)} units"
    yield case.item("streamed weights", case.device, capacity, TRAINING, note)
    coming = (1 + GRADIENTS_UNDER_WAY) * max(units.trained, default=0) + units.resident_trained
    yield from _coming(case, coming)
    yield from _on_host(case, [*units.units, units.resident_trained])


def _resident(case: Costing) -> Iterator[MemoryItem]:
    element = case.unit_element
    nbytes, note = case.model.weight_bytes(element), kept_in(case, case.unit_precision)
    if not case.resolved.uses_deepspeed:
        yield from cast_copies(case)
    if case.in_place:
        nbytes -= element * case.model.trainable_numel
    yield case.item("weights", case.device, nbytes, note=note)
    count = resident_units(case.streamed.resident_trained)
    each = case.streamed.resident_trained / count
    # A unit ends with the parameter that completes its size.
    yield from _coming(case, (1 + GRADIENTS_UNDER_WAY) * (each + case.largest))
    yield from _on_host(case, [each] * count)


def _coming(case: Costing, elements: float) -> Iterator[MemoryItem]:
    """Yield the device memory of gradients that are copied to the host."""
    element = case.unit_element
    nbytes = element * min(elements, case.streamed.trained_total)
    stay = gradients_stay(case.resolved)
    note = "unit gradients before " + ("their update" if stay else "the copy to the host")
    yield case.item("gradients", case.device, nbytes, BACKWARD, note)
    if case.resolved.update is not None:
        least = _SPLIT if case.resolved.masters == "split" else 0
        own = max(least, _UPDATED + 4 * case.states) * case.largest
        note = "of the update of a weight, with its states"
        yield case.item("temporaries", case.device, own, STEP, note)
        others = (WEIGHTS_AT_A_TIME - 1) * own
        yield case.item("temporaries", case.device, others, STEP, KEPT_BY_STREAM)
        # Clipped units are updated in the forward pass, when no gradient is on the device.
        more = own + others - (0 if stay else nbytes)
        note = f"of updates on {WEIGHTS_AT_A_TIME} streams, beyond gradients"
        yield case.item("temporaries", case.device, max(0, more), BACKWARD, note)
        if case.resolved.masters == "stochastic":
            note = "random numbers of a step"
            yield case.item("temporaries", case.device, 4 * NOISE_PERIOD, TRAINING, note)
    if (case.resolved.gradient_accumulation_steps or 1) > 1:
        note = "the largest gradient, and the sum that it is added to"
        yield case.item("temporaries", case.device, 2 * element * case.largest, BACKWARD, note)


def with_units_kept(estimate: Estimate, usable: int) -> Resolved:
    """Return a streaming plan with as many units on the device as fit.

    Args:
        estimate: Estimate of the streaming plan.
        usable: Bytes of device memory that may be used.
    """
    resolved = estimate.resolved
    if resolved.model is None or resolved.streaming is None:
        return resolved
    case = Costing(resolved=resolved, model=resolved.model, workload=estimate.workload)
    others = estimate.device - case.streamed_capacity
    total = case.unit_element * case.streamed.total
    memory = max(0, min(usable - others, total))
    decision = Decision(
        "streamed.memory",
        resolved.streaming.memory,
        memory,
        f"other components need {format_size(others)} of the {format_size(usable)} of "
        f"usable device memory; all units together need {format_size(total)}",
    )
    return resolved.decided(decision, streamed=attrs.evolve(resolved.streaming, memory=memory))


def _gradients_at_a_time(case: Costing, blocks: list[float]) -> tuple[list[float], str]:
    """Return the elements of each block of gradients in host memory, and a note."""
    units, note = case.streamed, share_of(case, case.unit_precision)
    if gradients_stay(case.resolved):
        return [], note
    if case.resolved.streaming is None:
        return blocks, note
    buffers, _ = gradient_buffers(case.resolved, units.trained)
    if not buffers:
        return [*units.trained, units.resident_trained], note
    note += f", in {buffers} buffers that units share"
    return [*([max(units.trained)] * buffers), units.resident_trained], note


def _on_host(case: Costing, blocks: list[float]) -> Iterator[MemoryItem]:
    zero, units, element = case.resolved.plan.zero_optimization, case.streamed, case.unit_element
    pin = zero is not None and pins(zero.offload_optimizer) and not case.on_cpu
    count = units.trained_total / case.ranks

    def locked(component: str, sizes: Iterable[float], note: str) -> MemoryItem:
        wanted = [element * size / case.ranks for size in sizes]
        if not pin:
            return case.item(component, "host", sum(wanted), note=note)
        if case.ranks > 1:
            return case.locked(component, sum(wanted), note)
        return case.pinned(component, wanted, note=note)

    if case.ranks > 1:
        note = "the largest unit's gradients, summed over ranks"
        yield case.item(
            "staging", "host", element * max(units.trained, default=max(blocks)), note=note
        )
    yield locked("weights", blocks, share_of(case, case.unit_precision))
    yield locked("gradients", *_gradients_at_a_time(case, blocks))
    master = case.master_bytes
    note = "their low halves" if master == 2 else "fp32"
    if element < 4 and master:
        # Otherwise, the weights are the master weights.
        yield case.item("master weights", "host", master * count, note=share_of(case, note))
    nbytes = 4 * case.states * count
    yield case.item("optimizer states", "host", nbytes, TRAINING, share_of(case, ""))
