"""How long a training step takes: what is computed, what is moved, and what of it overlaps.

Phases follow one another. Within a phase the device computes, bytes cross the bus, host memory
and the disk are read and written beside each other, and the slowest of these lanes counts:

- gradients cross the bus while the backward pass computes, and activations in both passes;
- parameters in host memory do not: DeepSpeed waits on the host for each that it fetches;
- an optimizer in host memory begins when all gradients are there, and weights go back when it has
  ended (`StepTime.hidden_seconds`: as if it ran beside the next step's passes);
- with NVMe, states are read and written around the optimizer; an EMA follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import attrs

from zerotune.plan.memory.estimate import Costing, offloads_activations
from zerotune.plan.memory.model import MemoryEstimate
from zerotune.plan.memory.rates import Rates
from zerotune.plan.memory.traffic import step_traffic
from zerotune.plan.model import ArithmeticFacts, PassWork

Lane = Literal["device", "bus", "host", "disk"]
"""What works while something happens."""
StepPhase = Literal["forward", "backward", "optimizer", "weights", "ema"]
"""When it happens; one phase begins when the one before has ended."""
_PASSES: Final = ("forward", "backward")
_BESIDE: Final = 0.15
"""Of a step whose optimizer is hidden: what it takes of cores, memory and bus meanwhile."""
_PER_GRADIENT: Final[Mapping[int, int]] = {0: 5, 1: 12, 2: 12, 3: 12}
"""By stage: operators, views included, that DeepSpeed begins for the gradient of each parameter.
Counted in backward passes of DeepSpeed 0.19.8 beside those of the plain engine."""
_PER_CHECKED: Final[Mapping[tuple[bool, int], tuple[int, int]]] = {
    (False, 2): (40, 20), (False, 4): (32, 5), (True, 2): (56, 9), (True, 4): (72, 8),
}  # fmt: skip
"""By whether it is stage 3, and the bytes of a weight: bytes of each element and operators of each
gradient that DeepSpeed goes over besides for an optimizer in host memory, where zerotune does not:
overflow, and a norm in fp64. Counted likewise."""
_PER_GATHERED: Final = 4
"""The same for each parameter of a forward pass at stage 3."""


@attrs.frozen(kw_only=True)
class TimePart:
    """Something a step does."""

    phase: StepPhase
    lane: Lane
    what: str
    """In words."""
    seconds: float
    """Per optimizer step."""
    rate: str
    """The name in ``Rates`` that it was divided by."""


@attrs.frozen(kw_only=True)
class StepTime:
    """What one optimizer step takes, by phase. Made by ``step_time``."""

    parts: tuple[TimePart, ...]
    rates: Rates
    """What the arithmetic and the bytes were divided by."""
    notes: tuple[str, ...] = ()
    """What is not in the numbers, and why."""
    hides: bool = False
    """Whether the plan has the optimizer run beside the next passes."""

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase, in order: of its slowest lane."""
        lanes: dict[str, dict[str, float]] = {}
        for part in self.parts:
            phase = lanes.setdefault(part.phase, {})
            phase[part.lane] = phase.get(part.lane, 0.0) + part.seconds
        return {phase: max(found.values()) for phase, found in lanes.items()}

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.phases.values())

    @property
    def hidden_seconds(self) -> float:
        """Seconds of a step whose optimizer and averages run beside the next passes."""
        passes = sum(self.phases.get(name, 0.0) for name in _PASSES)
        lanes: dict[str, float] = {}
        for part in self.parts:
            if part.phase not in _PASSES:
                # Weights go back while the next ones are computed.
                lanes[part.lane] = lanes.get(part.lane, 0.0) + part.seconds
        on_host = any(p.lane in ("host", "disk") for p in self.parts if p.phase == "optimizer")
        return max(passes, *lanes.values()) if on_host else self.seconds

    @property
    def expected(self) -> float:
        """Seconds of a step as the plan takes it, hidden or not."""
        if not self.hides:
            return self.seconds
        return min(self.seconds, (1 + _BESIDE) * self.hidden_seconds)

    @property
    def bound(self) -> TimePart:
        """The part that takes longest."""
        return max(self.parts, key=lambda part: part.seconds)

    @property
    def sources(self) -> dict[str, str]:
        """Whether each rate that counts was ``"measured"`` or ``"catalogued"``."""
        names = dict.fromkeys(part.rate for part in self.parts)
        return {name: self.rates.source(name) for name in names}

    @property
    def origin(self) -> str:
        """Where the rates that count come from, in words."""
        found = self.sources
        catalogued = [name for name, source in found.items() if source == "catalogued"]
        if not catalogued or len(catalogued) == len(found):
            return self.rates.origin
        return f"{self.rates.origin}; catalogued: {', '.join(catalogued)}"


def step_time(estimate: MemoryEstimate, rates: Rates) -> StepTime | None:
    """What one optimizer step of a plan takes.

    Args:
        estimate: Of a plan that was resolved with its model, for a size of images.
        rates: Of the machine.

    Returns:
        ``None`` where the arithmetic of the model or the size of images is not known.
    """
    model, work = estimate.resolved.model, estimate.workload
    if model is None or model.arithmetic is None or work.height is None:
        return None
    case = Costing(resolved=estimate.resolved, model=model, workload=work)
    parts = [*_passes(case, model.arithmetic, rates), *_moved(case, estimate, rates)]
    notes = ("what ranks send each other is left out",) if case.ranks > 1 else ()
    kept = tuple(part for part in parts if part.seconds > 0)
    return StepTime(parts=kept, rates=rates, notes=notes, hides=_hides(case))


def _hides(case: Costing) -> bool:
    """Whether Adam in host memory is taken behind the next forward, where that is proven."""
    resolved = case.resolved
    in_files = "nvme" in (resolved.offload_optimizer, resolved.offload_param)
    alone = resolved.stage == 3 or case.ranks == 1
    return case.may_hide and alone and case.steps_in_one_pass and not in_files and not case.stays


def _passes(case: Costing, facts: ArithmeticFacts, rates: Rates) -> Iterator[TimePart]:
    yield from _computed(case, facts.forward, rates, "forward", "the forward pass")
    yield from _computed(case, facts.backward, rates, "backward", "the backward pass")
    if case.workload.gradient_checkpointing and facts.recomputed is not None:
        yield from _computed(case, facts.recomputed, rates, "backward", "blocks once more")
    if facts.backward.operators and case.resolved.uses_deepspeed:
        stage = case.resolved.stage
        yield _looked_after(case, rates, "backward", "gradients looked after", _PER_GRADIENT[stage])
        if case.checks_gradients:
            _, each = _PER_CHECKED[stage == 3, case.element]
            yield _looked_after(case, rates, "backward", "gradients checked", each)
        if stage == 3:
            yield _looked_after(case, rates, "forward", "parameters gathered", _PER_GATHERED)


def _looked_after(case: Costing, rates: Rates, phase: StepPhase, what: str, each: int) -> TimePart:
    trained = sum(one.trainable for one in case.model.parameters)
    begun = each * (trained if phase == "backward" else len(case.model.parameters))
    return TimePart(
        phase=phase,
        lane="device" if case.on_cpu else "host",
        what=what,
        seconds=case.resolved.gradient_accumulation_steps * begun / rates.operators,
        rate="operators",
    )


def _computed(
    case: Costing, work: PassWork, rates: Rates, phase: StepPhase, what: str
) -> Iterator[TimePart]:
    size = {
        "batch": case.workload.batch,
        "pixels": case.positions,
    }
    times = case.resolved.gradient_accumulation_steps
    suffix = "_fp32" if case.element == 4 else ""
    # Ranks on processors share them.
    shared = _sharing(case) if case.on_cpu else 1
    for name in ("products", "convolutions", "attention"):
        rate, amount = f"{name}{suffix}", getattr(work, name).of(**size)
        seconds = shared * times * amount / getattr(rates, rate)
        yield TimePart(
            phase=phase, lane="device", what=f"{what}: {name}", seconds=seconds, rate=rate
        )
    yield TimePart(
        phase=phase,
        # A device computes while the next operators are begun.
        lane="device" if case.on_cpu else "host",
        what=f"{what}: operators begun",
        seconds=shared * times * work.operators / rates.operators,
        rate="operators",
    )
    for name in ("product_calls", "attention_calls"):
        rate = f"{name}{suffix}"
        yield TimePart(
            phase=phase,
            lane="device",
            what=f"{what}: {name.replace('_', ' ')}",
            seconds=shared * times * getattr(work, name) / getattr(rates, rate),
            rate=rate,
        )
    nbytes = times * work.moved.of(**size) * case.element / 2
    yield TimePart(
        phase=phase,
        lane="device",
        what=f"{what}: other operators",
        seconds=shared * nbytes / getattr(rates, f"device_memory{suffix}"),
        rate=f"device_memory{suffix}",
    )


def _sharing(case: Costing) -> int:
    return case.workload.ranks_per_machine or case.ranks


_Moved = tuple[StepPhase, Lane, str, float, str]
"""Phase, lane, what in words, bytes, and the name of the rate."""


def _moved(case: Costing, estimate: MemoryEstimate, rates: Rates) -> Iterator[TimePart]:
    ranks = _sharing(case)
    for phase, lane, what, nbytes, rate in _amounts(case, estimate):
        # The ranks of a machine share its memory and its disk.
        shared = ranks if lane in ("host", "disk") or rate == "new_memory" else 1
        seconds = shared * nbytes / getattr(rates, rate)
        yield TimePart(phase=phase, lane=lane, what=what, seconds=seconds, rate=rate)


def _amounts(case: Costing, estimate: MemoryEstimate) -> Iterator[_Moved]:
    traffic, waiting = step_traffic(estimate), _waiting(case)
    half, swap = traffic.parameters / 2, traffic.swap
    memory = "host_memory" if case.on_cpu else "device_memory_fp32"
    yield "forward", "device", "parameters to the device", half, "to_device"
    yield "forward", "bus", "activations to the host", waiting, "to_host"
    yield "backward", "device", "parameters to the device", half, "to_device"
    yield "backward", "bus", "activations to the device", waiting, "to_device"
    yield "backward", "bus", "gradients to the host", traffic.gradients, "to_host"
    yield "backward", "device", "gradients put into buckets", _gradients_in_memory(case), memory
    yield "backward", "device", "gradients checked", _checked(case), memory
    new = traffic.new_in_backward, traffic.new_in_step
    yield "backward", "device", "memory allocated anew", new[0], "new_memory"
    yield "optimizer", "host", "memory allocated anew", new[1], "new_memory"
    yield "optimizer", "host", "the optimizer", traffic.optimizer + traffic.chain, "host_step"
    yield "optimizer", "device", "the optimizer", traffic.on_device, "device_memory_fp32"
    yield "optimizer", "disk", "swap files read", swap.read, "disk_read"
    yield "optimizer", "disk", "swap files written", swap.written, "disk_write"
    yield "weights", "bus", "weights to the device", traffic.weights, "to_device"
    yield "ema", "host", "the average", traffic.ema, "host_memory"


def _waiting(case: Costing) -> float:
    """Bytes of activations that wait in host memory in a step."""
    work, known = case.workload, case.model.activations
    if not offloads_activations(case) or known is None or known.offloaded_host is None:
        return 0.0
    size = {"batch": work.batch, "pixels": case.positions, "element_bytes": case.element}
    each = known.offloaded_host.nbytes(**size)
    return each * case.resolved.gradient_accumulation_steps


def _checked(case: Costing) -> float:
    """Bytes that are read and written meanwhile, once in a step."""
    each, _ = _PER_CHECKED[case.resolved.stage == 3, case.element]
    return each * case.trained if case.checks_gradients else 0.0


def _gradients_in_memory(case: Costing) -> float:
    """Bytes that are read and written when gradients are put into buckets and out of them."""
    if not case.resolved.uses_deepspeed:
        return 0.0
    # Into a bucket, averaged there, and out again, with a norm.
    return 7 * case.element * case.trained * case.resolved.gradient_accumulation_steps
