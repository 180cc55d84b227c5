"""Bytes that a step moves over the bus, through host memory, and to swap files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from zerotune.plan.context import MastersName
from zerotune.plan.memory.costing import Costing
from zerotune.plan.memory.hosted import NOISE_PERIOD, gradients_stay
from zerotune.plan.memory.items import Estimate

# Counted by the kernel (``/proc/self/io``) in real runs of DeepSpeed 0.19.8: the optimizer reads
# and writes weight, gradient and states of every element once per step; parameters are read for
# the forward and for the backward pass of each micro batch and written once per step.


@attrs.frozen(kw_only=True)
class SwapTraffic:
    """Bytes that one rank reads from and writes to swap files in one optimizer step."""

    read: int
    written: int


def swap_traffic(estimate: Estimate) -> SwapTraffic:
    """Compute the swap traffic per step from the sizes of swap files; 0 without NVMe offload."""
    weights = optimizer = 0
    for item in estimate.items:
        if item.place == "nvme" and item.component == "weights":
            weights += item.nbytes
        elif item.place == "nvme" and item.component != "EMA":
            optimizer += item.nbytes
    passes = 2 * estimate.resolved.gradient_accumulation_steps
    return SwapTraffic(read=optimizer + passes * weights, written=optimizer + weights)


# -- Minimum bytes that a step moves over the bus and through host memory.
#
# From the code of DeepSpeed 0.19.8 (``stage_1_and_2.py``, ``stage3.py``, ``csrc/adam``). N elements
# of this rank's part, e bytes of a weight in the forward pass, m of a master weight, s of a state,
# k states, a micro batches:
#
# - gradients to the host: ``e N`` for zerotune's one pass over states in RAM, otherwise ``m N``;
# - sums of gradients, which the device forms: ``a e N`` to the host and ``(a - 1) e N`` back at
#   stages 1 and 2 with several micro batches; ``a e N`` in either direction at stage 3;
# - updated weights to the device: ``e N``, unless parameters are on the host;
# - parameters on the host: ``2 a e`` per element on this rank, once for each pass;
# - the optimizer in host memory: it reads master weight, gradient and states and writes master
#   weight, states and the weight: ``(3m + 2 s k + e) N``;
# - the share that an offload ratio below 1 leaves on the device: its gradients and weights do not
#   cross the bus in fp32, and its optimizer works in the device's memory;
# - an EMA in host memory reads master weight and shadow and writes the shadow: ``12 N``, or
#   ``8 N`` within a hidden pass; an EMA on disk is also read from and written to the disk;
# - master weights on the device cross the bus for an EMA in host memory: ``m N``.


@attrs.frozen(kw_only=True)
class StepTraffic:
    """Bytes that one rank moves in one optimizer step, by purpose."""

    gradients: int
    """Bytes of gradients that the backward pass copies to host memory."""
    parameters: int
    """Bytes of parameters on the host that the forward and backward passes copy over the bus."""
    weights: int
    """Bytes of updated weights that the optimizer step copies over the bus to the device."""
    optimizer: int
    """Host memory traffic of an optimizer that runs on the CPU."""
    ema: int
    """Host memory traffic of an ``EMAShadow`` in host memory or on disk."""
    swap: SwapTraffic
    """Swap file traffic."""
    returned: int = 0
    """Bytes of summed gradients that the backward pass copies back to the device."""
    added: int = 0
    """Host memory traffic for summing gradients, if the ranks of a machine do so in host memory."""
    chain: int = 0
    """Additional host memory traffic of DeepSpeed's optimizer step, for clipping and casts."""
    on_device: int = 0
    """Device memory traffic of an optimizer on the device."""
    new_in_backward: int = 0
    """Newly allocated host memory for gradients and copies, if the accelerator is the CPU; the C
    library returns this memory to the system after each use."""
    ema_on_disk: int = 0
    """Bytes of an ``EMAShadow`` on disk that are read, and as many written."""
    ema_from_device: int = 0
    """Bytes of master weights that an ``EMAShadow`` in host memory or on disk copies from the
    device."""
    new_in_step: int = 0
    """Newly allocated host memory in the optimizer step."""
    updated: int = 0
    """Bytes that an update on the device of weights in host memory copies back there."""

    @property
    def bus(self) -> int:
        """Total bytes copied over the bus; 0 if the accelerator is the CPU."""
        returned = self.returned + self.parameters + self.weights + self.updated
        return self.gradients + self.ema_from_device + returned


def step_traffic(estimate: Estimate) -> StepTraffic:
    """Return the bytes that one rank moves in one optimizer step.

    Args:
        estimate: Estimate of a plan that was resolved with its model.
    """
    resolved, model = estimate.resolved, estimate.resolved.model
    swap = swap_traffic(estimate)
    if model is None:
        return StepTraffic(gradients=0, parameters=0, weights=0, optimizer=0, ema=0, swap=swap)
    case = Costing(resolved=resolved, model=model, workload=estimate.workload)
    if case.hosted:
        return _hosted_traffic(case, estimate)
    owned, kept = case.owned, case.model.weight_bytes(case.element, ranks=case.ranks)
    over_bus = not case.on_cpu and resolved.offload_optimizer != "none"
    on_host = case.on_cpu or resolved.offload_optimizer != "none"
    params_away = resolved.offload_param != "none"
    # The share that an offload ratio below 1 leaves on the device never crosses the bus in fp32.
    stays = sum(case.stays)
    away = owned - stays
    passes = 2 * resolved.gradient_accumulation_steps
    averaged = _averaged_on_host(estimate)
    in_backward, in_step = _allocated(case) if case.on_cpu else (0, 0)
    sums, returned, taken = _gradients(case)
    return StepTraffic(
        gradients=sums * owned + taken * away if over_bus else 0,
        returned=returned * owned if over_bus else 0,
        parameters=passes * kept if params_away and not case.on_cpu else 0,
        weights=case.element * away if over_bus and not params_away else 0,
        optimizer=round(_update(case) * away) if on_host else 0,
        ema=12 * owned if averaged else 0,
        ema_on_disk=_ema_on_disk(estimate),
        ema_from_device=4 * (stays if on_host else owned) if averaged else 0,
        swap=swap,
        chain=round(_chain(case) * away) if on_host else 0,
        # Also, gradients are cast to fp32, read for their norm, and scaled; weights are cast.
        on_device=round((_update(case) + 16 + 2 * case.element) * (stays if on_host else owned)),
        new_in_backward=in_backward,
        new_in_step=in_step,
    )


def _averaged_on_host(estimate: Estimate) -> bool:
    # An EMA on disk has chunks in host memory.
    return any(item.component == "EMA" and item.place == "host" for item in estimate.items)


def _ema_on_disk(estimate: Estimate) -> int:
    items = estimate.items
    return sum(one.nbytes for one in items if one.component == "EMA" and one.place == "nvme")


def _hosted_traffic(case: Costing, estimate: Estimate) -> StepTraffic:
    """Return the traffic of the host engine.

    The units that the forward pass used last are still on the device when the backward pass begins.
    After a step, units on the device are outdated and are copied again.
    """
    units, element = case.streamed, case.unit_element
    accumulated = case.resolved.gradient_accumulation_steps
    trained = sum(units.trained)
    absent = element * units.total - case.streamed_capacity
    written = round(case.streamed_capacity * trained / (units.total or 1))
    stepped = units.trained_total
    # Micro batches after the first are added up on the device.
    # A split or fp32 master weight contains the weight, which is not written a second time.
    saved = 2 if case.master_bytes == 2 else 4 if element == 4 else 0
    back = (accumulated - 1) * element * stepped
    part = stepped / case.ranks
    arriving = accumulated * element * stepped
    new = accumulated * element * case.model.trainable_numel
    uploaded = 0 if case.in_place else element * units.resident_trained
    # Reads all ranks' gradients of this rank's share, and writes their sum.
    added = round(arriving + accumulated * element * part) if case.ranks > 1 else 0
    # On a CPU, a copy reads and writes host memory.
    copied = 2 * (arriving + uploaded) if case.on_cpu else 0
    if case.resolved.update is not None and not case.on_cpu:
        # The new weights of streamed units are copied to the device again before they are used.
        kept = case.master_bytes + 4 * case.states
        # An fp32 master weight contains the weight.
        read = 0 if case.master_bytes == 4 else 2
        stay = gradients_stay(case.resolved)
        return StepTraffic(
            gradients=0 if stay else arriving,
            parameters=2 * accumulated * absent + written,
            returned=back,
            weights=uploaded + round((2 * (not stay) + kept + read) * part),
            optimizer=0,
            ema=round(8 * part) if _averaged_on_host(estimate) else 0,
            ema_on_disk=_ema_on_disk(estimate),
            swap=swap_traffic(estimate),
            added=added,
            on_device=round((_BY_OPERATORS[case.resolved.masters] + 4 * case.states) * part)
            + _DRAWN * NOISE_PERIOD * (case.resolved.masters == "stochastic"),
            updated=round((kept + 2) * part),
        )
    return StepTraffic(
        gradients=0 if case.on_cpu else arriving,
        parameters=0 if case.on_cpu else 2 * accumulated * absent + written,
        returned=0 if case.on_cpu else back,
        weights=0 if case.on_cpu else uploaded,
        # Gradients stay in the weights' precision, and are first read for their norm.
        optimizer=round((_update(case) - 4 + 2 * element - saved) * part),
        ema=round(8 * part) if _averaged_on_host(estimate) else 0,
        ema_on_disk=_ema_on_disk(estimate),
        swap=swap_traffic(estimate),
        added=added + copied,
        new_in_backward=new if case.on_cpu and new > _KEPT_BY_C else 0,
    )


_BY_OPERATORS: Final[Mapping[MastersName, int]] = {"fp32": 80, "split": 172, "stochastic": 101}
"""Bytes of device memory per weight that the operators of an update read and write, without 4 per
fp32 state, as counted in torch's AdamW and Adafactor on the simulated device. That each operator
reaches the memory's rate is an assumption, which no card has confirmed."""
_DRAWN: Final = 128
"""Such bytes per random number of a step."""


def _chain(case: Costing) -> float:
    # On the host each of these is a separate operator; memory is read before it is written.
    if case.checks_gradients:
        # Extremes and norm were computed as gradients arrived; a product and a cast remain.
        return 16 + (2 * case.element if case.element == 2 else 0)
    # Extremes for the overflow check, a norm, a product, copies, or the operators of torch's AdamW.
    return 64 + (4 * case.element if case.element == 2 else 0)


_KEPT_BY_C: Final = 32 * 2**20
"""Maximum bytes of a freed block that glibc keeps for reuse."""


def _allocated(case: Costing) -> tuple[int, int]:
    """Return the newly allocated bytes of the backward passes and of the optimizer step.

    The formula fits page faults (``getrusage``) per phase in runs of DeepSpeed 0.19.8.
    """
    resolved, element = case.resolved, case.element
    low, owned = element == 2, case.owned
    offloads = resolved.offload_optimizer != "none"
    # Gradients are freed in the step or after the copy to the bucket, and returned to the system.
    passed = element * case.model.trainable_numel * resolved.gradient_accumulation_steps
    if not resolved.uses_deepspeed:
        # Gradients, and the copies of the weights that autocast makes.
        blocks = (4 * case.model.trainable_numel + 2 * case.model.numel * low, 0)
    elif resolved.stage == 0:
        # Backward: gradients flattened for the reduction. Step: cast to fp32, and flattened again.
        blocks = (element * owned, 8 * owned if low else 0)
    elif resolved.stage == 3:
        # Backward: a flat copy of each bucket, and this rank's part of the sum.
        blocks = (2 * element * owned, 0 if offloads else (element + 4 * low) * owned)
    else:
        # Backward: partitioned gradients. Step: flattened gradients, and their fp32 copy.
        kept = (0, 0) if offloads else (element * owned, (element + 4 * low) * owned)
        blocks = (passed + kept[0], kept[1])
    in_backward, in_step = (size if size > _KEPT_BY_C else 0 for size in blocks)
    return in_backward, in_step


def _gradients(case: Costing) -> tuple[int, int, int]:
    """Return bytes per element: of sums to the host, of sums back, and for the optimizer."""
    accumulated, element = case.resolved.gradient_accumulation_steps, case.element
    if case.resolved.stage == 3:
        return accumulated * element, accumulated * element, 4
    if accumulated == 1:
        return 0, 0, 4
    return accumulated * element, (accumulated - 1) * element, 4


def _update(case: Costing) -> float:
    wrapped = case.resolved.uses_deepspeed and (case.resolved.stage > 0 or case.element == 2)
    written = case.unit_element if case.hosted or wrapped else 0
    return 12 + 8 * case.states + written
