"""How much a step reads from and writes to swap files.

Counted by the kernel (``/proc/self/io``) in real runs of DeepSpeed 0.19.8: the optimizer reads and
writes weight, gradient and states of every element once per step; parameters are read for the
forward and for the backward pass of each micro batch and written once per step.
"""

from __future__ import annotations

from typing import Final

import attrs

from zerotune._util.text import is_number
from zerotune.errors import InvalidValueError
from zerotune.plan.memory.estimate import Costing
from zerotune.plan.memory.model import MemoryEstimate


@attrs.frozen(kw_only=True)
class SwapTraffic:
    """Bytes of one rank and one optimizer step."""

    read: int
    written: int

    def seconds(self, *, read_rate: float, write_rate: float) -> float:
        """The least time a step spends on the disk, when nothing overlaps.

        Args:
            read_rate: Bytes per second, shared by the ranks of a machine.
            write_rate: Bytes per second, likewise.

        Raises:
            InvalidValueError: A rate that is not positive.
        """
        for key, rate in (("read_rate", read_rate), ("write_rate", write_rate)):
            if not is_number(rate) or rate <= 0:
                raise InvalidValueError(
                    "must be a positive number of bytes per second",
                    key=key,
                    value=rate,
                    fix="measure it with DeepSpeed's `ds_nvme_tune --nvme_dir ROOT`",
                )
        return self.read / read_rate + self.written / write_rate


def swap_traffic(estimate: MemoryEstimate) -> SwapTraffic:
    """What a step moves, from what lies in the files; zero without NVMe."""
    weights = optimizer = 0
    for item in estimate.items:
        if item.place == "nvme" and item.component == "weights":
            weights += item.nbytes
        elif item.place == "nvme" and item.component != "EMA":
            optimizer += item.nbytes
    passes = 2 * estimate.resolved.gradient_accumulation_steps
    return SwapTraffic(read=optimizer + passes * weights, written=optimizer + weights)


# -- How many bytes a step moves over the bus and through host memory: the least it can.
#
# Read in DeepSpeed 0.19.8 (``stage_1_and_2.py``, ``stage3.py``, ``csrc/adam``). N elements of this
# rank's part, e bytes of a weight in the forward pass, m of a master weight, s of a state, k
# states, a micro batches:
#
# - gradients to the host: ``m N`` at stages 1 and 2, where more than one micro batch is added up by
#   bringing what is there to the device and back (``(2a - 1) e N`` more); at stage 3 they go there,
#   back, and there again in fp32 (``2e N a + m N``);
# - updated weights to the device: ``e N``, unless parameters live on the host;
# - parameters on the host: ``2 a e`` of every element this rank keeps, once for each pass;
# - the optimizer in host memory: it reads master weight, gradient and states and writes master
#   weight, states and the weight: ``(3m + 2 s k + e) N``;
# - of what an offload ratio below 1 leaves on the device, gradients and weights do not cross the
#   bus in fp32, and the optimizer works in the device's memory;
# - an EMA in host memory reads master weight and shadow and writes the shadow: ``12 N``.


@attrs.frozen(kw_only=True)
class StepTraffic:
    """Bytes of one rank and one optimizer step, each for the part that moves them."""

    gradients: int
    """Over the bus in the backward pass, on their way to an optimizer on the host."""
    parameters: int
    """Over the bus in forward and backward pass, from parameters on the host."""
    weights: int
    """Over the bus in the optimizer step: updated weights back to the device."""
    optimizer: int
    """Read and written in host memory by an optimizer that runs on the CPU."""
    ema: int
    """Read and written in host memory by an ``EMAShadow`` that lies there."""
    swap: SwapTraffic
    """Read from and written to swap files."""
    chain: int = 0
    """Besides ``optimizer``, what DeepSpeed's own chain goes over for clipping and casts."""
    on_device: int = 0
    """Read and written in the device's memory by an optimizer that runs there."""
    new_in_backward: int = 0
    """Host memory that gradients and their copies are written to for the first time since it was
    allocated, where the CPU is the accelerator: the C library gives it back each time."""
    new_in_step: int = 0
    """The same in the optimizer step."""

    @property
    def bus(self) -> int:
        """All that crosses the bus; 0 where the CPU is the accelerator."""
        return self.gradients + self.parameters + self.weights


def step_traffic(estimate: MemoryEstimate) -> StepTraffic:
    """What one optimizer step of one rank moves.

    Args:
        estimate: Of a plan that was resolved with its model.
    """
    resolved, model = estimate.resolved, estimate.resolved.model
    swap = swap_traffic(estimate)
    if model is None:
        return StepTraffic(gradients=0, parameters=0, weights=0, optimizer=0, ema=0, swap=swap)
    case = Costing(resolved=resolved, model=model, workload=estimate.workload)
    owned, kept = _owned(case), _kept(case)
    over_bus = not case.on_cpu and resolved.offload_optimizer != "none"
    on_host = case.on_cpu or resolved.offload_optimizer != "none"
    params_away = resolved.offload_param != "none"
    # What an offload ratio below 1 leaves on the device never crosses the bus in fp32.
    stays = sum(case.stays)
    away = owned - stays
    passes = 2 * resolved.gradient_accumulation_steps
    ema = any(item.component == "EMA" and item.place == "host" for item in estimate.items)
    uploaded = case.element if resolved.uses_deepspeed else 4
    one_pass = case.steps_in_one_pass
    in_backward, in_step = _allocated(case) if case.on_cpu else (0, 0)
    return StepTraffic(
        gradients=_gradients(case) * owned - case.master_bytes * stays if over_bus else 0,
        parameters=passes * kept if params_away and not case.on_cpu else 0,
        weights=uploaded * away if over_bus and not params_away else 0,
        optimizer=round(_update(case) * away) if on_host else 0,
        ema=12 * owned if ema else 0,
        swap=swap,
        chain=0 if one_pass or not on_host else round(_chain(case) * away),
        on_device=round((_update(case) + _cast(case)) * (stays if on_host else owned)),
        new_in_backward=in_backward,
        new_in_step=in_step,
    )


def _cast(case: Costing) -> float:
    # Gradients are widened, read for their norm, scaled; weights are cast.
    return 4 * case.master_bytes + 2 * case.element


def _chain(case: Costing) -> float:
    # On the host each of these is an operator of its own; what is written is read first.
    if case.checks_gradients:
        # Extremes and norm were taken as gradients came: a product, and a cast.
        return 4 * case.master_bytes + (2 * case.element if case.element == 2 else 0)
    # Extremes for the overflow check, a norm, a product, copies, or what torch's AdamW is made of.
    return 16 * case.master_bytes + (4 * case.element if case.element == 2 else 0)


_KEPT_BY_C: Final = 32 * 2**20
"""Bytes up to which glibc keeps what is freed, to use it again."""


def _allocated(case: Costing) -> tuple[int, int]:
    """Bytes allocated anew in the backward passes and in the optimizer step.

    Found by counting page faults (``getrusage``) by phase in runs of DeepSpeed 0.19.8.
    """
    resolved, element = case.resolved, case.element
    low, owned = element == 2, _owned(case)
    offloads = resolved.offload_optimizer != "none"
    # Freed in the step or when they are in their bucket, and given back to the system each time.
    passed = element * case.trained * resolved.gradient_accumulation_steps
    if not resolved.uses_deepspeed:
        # Besides gradients, the copies of the weights that autocast makes.
        blocks = (4 * case.trained + 2 * case.all_elements * low, 0)
    elif resolved.stage == 0:
        # Gradients flattened to be reduced; cast to fp32, and flattened once more.
        blocks = (element * owned, 8 * owned if low else 0)
    elif resolved.stage == 3:
        # Of each bucket a flat copy, and this rank's part of the sum.
        reduced = 0 if case.reduces_nothing else 2 * element * owned
        blocks = (reduced, 0 if offloads else (element + 4 * low) * owned)
    else:
        # Partitioned gradients; flattened, and in fp32.
        kept = (0, 0) if offloads else (element * owned, (element + 4 * low) * owned)
        blocks = (passed + kept[0], kept[1])
    in_backward, in_step = (size if size > _KEPT_BY_C else 0 for size in blocks)
    return in_backward, in_step


def _gradients(case: Costing) -> int:
    accumulated = case.resolved.gradient_accumulation_steps
    if not case.resolved.uses_deepspeed:
        # Added up on the device.
        return 4
    if case.resolved.stage == 3:
        return 2 * case.element * accumulated + case.master_bytes
    extra = (2 * accumulated - 1) * case.element if accumulated > 1 else 0
    return case.master_bytes + extra


def _update(case: Costing) -> float:
    master, states = case.master_bytes, 2 * case.state_bytes * case.states
    separate = case.resolved.uses_deepspeed and (case.resolved.stage > 0 or case.element == 2)
    return 3 * master + states + (case.element if separate else 0)


def _owned(case: Costing) -> int:
    if case.resolved.stage == 3:
        return sum(case.model.trainable_parts(case.ranks))
    return case.trained if case.resolved.stage == 0 else case.flat_part


def _kept(case: Costing) -> int:
    return case.model.weight_bytes(case.element, ranks=case.ranks)
