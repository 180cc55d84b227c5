"""Predict the time of a training step from hardware rates, data traffic and overlap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import attrs

from zerotune.plan.memory.costing import Costing
from zerotune.plan.memory.estimate import offloads_activations
from zerotune.plan.memory.hosted import (
    BUFFERS_IN_BACKWARD,
    WEIGHTS_AT_A_TIME,
    gradient_buffers,
    gradients_stay,
)
from zerotune.plan.memory.items import Estimate
from zerotune.plan.memory.rates import PUBLISHED_SPREAD, Rates
from zerotune.plan.memory.traffic import step_traffic
from zerotune.plan.work import ArithmeticFacts, PassWork

# A step uses several lanes (``Lane``). Times in the same lane add up; lanes run in parallel, so a
# phase takes as long as its slowest lane. Phases follow one another, except for an optimizer in
# host memory, which engines may run at other times (``Schedule``):
#
# - gradients cross the bus while the backward pass computes, and activations in both passes;
# - copies of parameters in host memory do not overlap: DeepSpeed waits for each parameter;
# - transfers over the bus also use host memory, as the optimizer and EMAs do;
# - with NVMe, states are read before and written after they are updated.

Lane = Literal["device", "in", "out", "host", "calls", "disk"]
"""Resource that a part of a step uses: the device, one direction of the bus (to or from the
device), host memory, operator launches, or the disk."""


StepPhase = Literal["forward", "backward", "optimizer", "weights", "ema"]
"""Phase of a step."""


Schedule = Literal["in turn", "hidden", "eager"]
"""When an optimizer in host memory runs: ``"in turn"`` after the backward pass, ``"hidden"`` during
the next forward pass, or ``"eager"`` during the last backward pass (as gradients arrive) and the
next forward pass."""


_DRAINED: Final = 1.2
"""Factor by which updates on the device take longer because each unit waits for its last copies,
fitted to steps in virtual time (``bench.stream``)."""
_PASSES: Final[tuple[StepPhase, ...]] = ("forward", "backward")


_AFTER: Final[tuple[StepPhase, ...]] = ("optimizer", "weights", "ema")


_PER_GRADIENT: Final[Mapping[int, int]] = {0: 5, 1: 12, 2: 12, 3: 12}
"""Operators (including views) per parameter that DeepSpeed adds to the backward pass, by stage;
counted in runs of DeepSpeed 0.19.8 and of the plain engine."""


_PER_CHECKED: Final[Mapping[tuple[bool, int], tuple[int, int]]] = {
    (False, 2): (40, 20), (False, 4): (32, 5), (True, 2): (56, 9), (True, 4): (72, 8),
}  # fmt: skip
"""Bytes per element and operators per gradient of DeepSpeed's overflow checks and fp64 norms for an
optimizer in host memory. Keys: whether the stage is 3, and bytes of a weight."""


_PER_GATHERED: Final = 4
"""Operators per parameter that DeepSpeed adds to a forward pass at stage 3."""


@attrs.frozen
class TimePart:
    """One part of the predicted time of a step."""

    phase: StepPhase
    lane: Lane
    what: str
    """Description in words."""
    seconds: float
    """Seconds per optimizer step."""
    rate: str
    """Name of the rate in ``Rates`` that limits the part."""


_Lanes = Mapping[Lane, float]
"""Seconds of a phase by lane."""


def _together(
    passes: Sequence[tuple[_Lanes, float]], after: Sequence[_Lanes], share: float
) -> float:
    """Return the seconds of shares of successive passes, and of a share of ``after`` beside them.

    This is the time of the busiest lane, but at least that of the passes one by one.
    """
    total: dict[Lane, float] = {}
    for lanes, part in (*passes, *((lanes, share) for lanes in after)):
        for lane, seconds in lanes.items():
            total[lane] = total.get(lane, 0.0) + part * seconds
    return max(sum(part * max(lanes.values()) for lanes, part in passes), *total.values())


@attrs.frozen(kw_only=True)
class StepTime:
    """Predicted time of an optimizer step by phase, from ``step_time``."""

    parts: tuple[TimePart, ...]
    rates: Rates
    """Rates that the prediction uses."""
    notes: tuple[str, ...] = ()
    """Parts of a step that the prediction does not include, with reasons."""
    schedule: Schedule = "in turn"
    """When the plan's optimizer runs."""
    published_spread: tuple[float, float] | None = None
    """``PUBLISHED_SPREAD`` for a card whose rates were not measured; otherwise ``None``."""
    micro_batches: int = 1
    """Forward passes per optimizer step; the optimizer step overlaps with one of them."""
    updates_on_device: bool = False
    """Whether weights in host memory are updated on the device."""
    carried: float = 1.0
    """Share of the optimizer's work that may overlap with the next forward pass, limited by how
    many gradients host memory can buffer."""

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase if phases do not overlap."""
        return {phase: max(lanes.values()) for phase, lanes in self._lanes.items() if lanes}

    @property
    def _lanes(self) -> dict[StepPhase, dict[Lane, float]]:
        found: dict[StepPhase, dict[Lane, float]] = {}
        for part in self.parts:
            lanes = found.setdefault(part.phase, {})
            lanes[part.lane] = lanes.get(part.lane, 0.0) + part.seconds
        return found

    def scheduled(self, schedule: Schedule) -> float:
        """Return the predicted seconds per step if the optimizer runs as ``schedule`` specifies.

        An optimizer on the device never overlaps with the passes.

        Args:
            schedule: ``"in turn"``, ``"hidden"`` or ``"eager"``.
        """
        lanes = self._lanes
        if self.updates_on_device and schedule != "in turn":
            return self._updated_on_device(eager=schedule == "eager")
        on_host = any(lane in ("host", "disk") for lane in lanes.get("optimizer", ()))
        if schedule == "in turn" or not on_host:
            return sum(self.phases.values())
        first, after = 1 / self.micro_batches, [lanes[each] for each in _AFTER if each in lanes]
        forward, backward = (lanes.get(each) or {"device": 0.0} for each in _PASSES)
        if schedule == "eager" and self.carried < 1:
            # The forward pass has room for a part of the optimizer's work.
            needed = sum(phase.get("host", 0.0) for phase in after)
            free = max(forward.values()) - forward.get("host", 0.0)
            left = min(self.carried, free / needed) if needed else 0.0
            hidden = _together([(forward, 1.0)], after, left)
            return hidden + _together([(backward, 1.0)], after, 1 - left)
        hides = [forward, backward] if schedule == "eager" else [forward]
        rest = sum((1 - first) * max(each.values()) for each in hides)
        rest += 0.0 if schedule == "eager" else max(backward.values())
        return rest + _together([(each, first) for each in hides], after, 1.0)

    def _updated_on_device(self, *, eager: bool) -> float:
        """Return the seconds of a step whose weights are updated on the device in turns."""
        lanes = self._lanes
        after = [lanes[phase] for phase in _AFTER if phase in lanes]
        update: Sequence[Lane] = ("in", "out", "device")
        seconds = {lane: sum(phase.get(lane, 0.0) for phase in after) for lane in update}
        turns = _DRAINED * sum(seconds.values()) / WEIGHTS_AT_A_TIME
        forward, backward = (max(lanes[phase].values()) for phase in _PASSES)
        if not eager:
            return forward + backward + turns
        # The backward pass computes while weights are copied, and waits while they are updated.
        waits = min(1.0, seconds["device"] / turns) if turns else 1.0
        return forward + max(turns + backward * waits, backward + seconds["device"])

    @property
    def seconds(self) -> float:
        """Predicted seconds per step if phases do not overlap."""
        return self.scheduled("in turn")

    @property
    def expected(self) -> float:
        """Predicted seconds per step if the optimizer runs as ``schedule`` specifies."""
        return self.scheduled(self.schedule)

    @property
    def bound(self) -> TimePart:
        """The part of the step that takes the longest."""
        return max(self.parts, key=lambda part: part.seconds)

    @property
    def sources(self) -> dict[str, str]:
        """Maps the name of each relevant rate to ``"measured"`` or ``"catalogued"``."""
        names = dict.fromkeys(part.rate for part in self.parts)
        return {name: self.rates.source(name) for name in names}

    @property
    def origin(self) -> str:
        """Where the relevant rates come from, in words."""
        found = self.sources
        catalogued = [name for name, source in found.items() if source == "catalogued"]
        if not catalogued or len(catalogued) == len(found):
            return self.rates.origin
        return f"{self.rates.origin}; catalogued: {', '.join(catalogued)}"


def step_time(estimate: Estimate, rates: Rates) -> StepTime | None:
    """Predict the time of one optimizer step.

    Args:
        estimate: Estimate for an image resolution; its plan must be resolved with a model.
        rates: Speeds of the machine.

    Returns:
        The time; ``None`` if the model's operation counts (``ModelFacts.arithmetic``) or the image
        size are unknown.
    """
    model, work = estimate.resolved.model, estimate.workload
    if model is None or model.arithmetic is None or work.height is None:
        return None
    case = Costing(resolved=estimate.resolved, model=model, workload=work)
    parts = [*_pass_parts(case, model.arithmetic, rates), *_moved(case, estimate, rates)]
    sends = case.ranks > 1 and not case.hosted
    is_catalogued = not case.on_cpu and rates.source("products") == "catalogued"
    notes = ("communication between ranks is not included",) if sends else ()
    kept = tuple(part for part in parts if part.seconds > 0)
    return StepTime(
        parts=kept,
        rates=rates,
        notes=notes,
        schedule=_schedule(case),
        published_spread=PUBLISHED_SPREAD if is_catalogued else None,
        micro_batches=case.resolved.gradient_accumulation_steps,
        updates_on_device=case.resolved.update is not None and not case.on_cpu,
        carried=_carried(case),
    )


def _carried(case: Costing) -> float:
    """Return ``StepTime.carried`` for the plan without clipping."""
    plan = attrs.evolve(case.resolved.plan, gradient_clipping=0.0)
    unclipped, units = attrs.evolve(case.resolved, plan=plan), case.streamed.trained
    buffers, _ = gradient_buffers(unclipped, units)
    if not buffers or case.resolved.streaming is None:
        return 1.0
    return max(0, buffers - BUFFERS_IN_BACKWARD) / len(units)


def _schedule(case: Costing) -> Schedule:
    """Return when Adam in host memory runs."""
    resolved = case.resolved
    if not case.hosted:
        return "in turn"
    waits = resolved.gradient_clipping or resolved.precision == "fp16"
    in_backward = case.resolved.streaming is not None and not waits
    if resolved.update is not None:
        in_backward = gradients_stay(resolved)
    return "eager" if in_backward else "hidden"


def _pass_parts(case: Costing, facts: ArithmeticFacts, rates: Rates) -> Iterator[TimePart]:
    yield from _computed(case, facts.forward, rates, "forward", "the forward pass")
    yield from _computed(case, facts.backward, rates, "backward", "the backward pass")
    if case.workload.gradient_checkpointing and facts.recomputed is not None:
        yield from _computed(case, facts.recomputed, rates, "backward", "recomputed blocks")
    yield from _dequantized(case, rates)
    if facts.backward.operators and case.resolved.uses_deepspeed:
        stage = case.resolved.stage
        yield _looked_after(case, rates, "backward", "gradient bookkeeping", _PER_GRADIENT[stage])
        if case.checks_gradients:
            _, each = _PER_CHECKED[stage == 3, case.element]
            yield _looked_after(case, rates, "backward", "gradient checks", each)
        if stage == 3 and not case.hosted:
            yield _looked_after(case, rates, "forward", "parameter gathering", _PER_GATHERED)


def _dequantized(case: Costing, rates: Rates) -> Iterator[TimePart]:
    """Yield the time in which each pass writes quantized weights in the plan's precision."""
    if not case.model.storages:
        return
    weights = [one for one in case.model.parameters if one.storage is not None]
    nbytes = sum(one.nbytes(case.element) + case.element * one.numel for one in weights)
    passes: Mapping[StepPhase, int] = {
        "forward": 1,
        "backward": 1 + case.workload.gradient_checkpointing,
    }
    for phase, times in passes.items():
        moved = case.resolved.gradient_accumulation_steps * times * nbytes
        yield TimePart(
            phase, "device", "weights dequantized", moved / rates.device_memory, "device_memory"
        )


def _looked_after(case: Costing, rates: Rates, phase: StepPhase, what: str, each: int) -> TimePart:
    trained = sum(one.trainable for one in case.model.parameters)
    begun = each * (trained if phase == "backward" else len(case.model.parameters))
    return TimePart(
        phase,
        "device" if case.on_cpu else "calls",
        what,
        case.resolved.gradient_accumulation_steps * begun / rates.operators,
        "operators",
    )


def _computed(
    case: Costing, work: PassWork, rates: Rates, phase: StepPhase, what: str
) -> Iterator[TimePart]:
    size = {"batch": case.workload.batch, "pixels": case.positions}
    times = case.resolved.gradient_accumulation_steps
    suffix = "_fp32" if case.element == 4 else ""
    # On the CPU accelerator, ranks share the cores.
    shared = _sharing(case) if case.on_cpu else 1
    relative = _ON_PROCESSOR[case.element] if case.on_cpu else ON_CARD
    for name, speed in relative.items():
        amount = getattr(work, name).of(**size) / speed
        seconds = shared * times * amount / getattr(rates, f"products{suffix}")
        yield TimePart(phase, "device", f"{name} of {what}", seconds, f"products{suffix}")
    # A device computes while the host launches the next operators.
    yield TimePart(
        phase,
        "device" if case.on_cpu else "calls",
        f"operator launches of {what}",
        shared * times * work.operators / rates.operators,
        "operators",
    )
    calls = (work.product_calls + work.attention_calls) * (
        _CALL[case.element] if case.on_cpu else 1
    )
    yield TimePart(
        phase,
        "device",
        f"product and attention calls of {what}",
        shared * times * calls / rates.operators,
        "operators",
    )
    nbytes = times * work.moved.of(**size) * case.element / 2
    yield TimePart(
        phase,
        "device",
        f"other operators of {what}",
        shared * nbytes / getattr(rates, f"device_memory{suffix}"),
        f"device_memory{suffix}",
    )


ON_CARD: Final = {"products": 1.0, "convolutions": 0.75, "attention": 0.75}
"""Rates of convolutions and attention on a card relative to that of matrix products."""


_ON_PROCESSOR: Final[Mapping[int, Mapping[str, float]]] = {
    2: {"products": 1.0, "convolutions": 0.8, "attention": 0.4},
    4: {"products": 1.0, "convolutions": 1.1, "attention": 0.9},
}
"""The same on a processor, by bytes of a weight."""


_CALL: Final[Mapping[int, int]] = {2: 10, 4: 4}
"""Number of launched operators that take as long as one product or attention call on a processor,
besides its arithmetic, by bytes of a weight."""


_NEW_MEMORY: Final = 10
"""Bytes that a copy in host memory reads and writes while one byte of newly allocated memory is
written for the first time."""


def _sharing(case: Costing) -> int:
    return case.workload.ranks_per_machine or case.ranks


_BUS: Final = frozenset({"to_host", "to_device"})


_ANEW: Final = "memory allocated anew"


_Moved = tuple[StepPhase, Lane, str, float, str]
"""Phase, lane, description, amount in units of the rate, and name of the rate."""


def _moved(case: Costing, estimate: Estimate, rates: Rates) -> Iterator[TimePart]:
    ranks = _sharing(case)
    for phase, lane, what, nbytes, rate in _amounts(case, estimate):
        # The ranks of a machine share its memory and its disk.
        shared = ranks if lane in ("host", "disk") or what == _ANEW else 1
        seconds = shared * nbytes / getattr(rates, rate)
        yield TimePart(phase, lane, what, seconds, rate)
        if rate in _BUS:
            # Host memory is at least as fast as the bus.
            through = ranks * nbytes / max(rates.host_memory, getattr(rates, rate))
            yield TimePart(phase, "host", f"{what}, through host memory", through, "host_memory")


def _amounts(case: Costing, estimate: Estimate) -> Iterator[_Moved]:
    traffic, waiting = step_traffic(estimate), _waiting(case)
    half, swap = traffic.parameters / 2, traffic.swap
    memory = "host_memory" if case.on_cpu else "device_memory_fp32"
    # DeepSpeed waits for each fetch; streamed units are prefetched.
    fetches: Lane = "in" if case.hosted else "device"
    yield "forward", fetches, "parameters to the device", half, "to_device"
    yield "forward", "out", "activations to the host", waiting, "to_host"
    yield "backward", fetches, "parameters to the device", half, "to_device"
    yield "backward", "in", "activations to the device", waiting, "to_device"
    yield "backward", "out", "gradients to the host", traffic.gradients, "to_host"
    yield "backward", "in", "gradients back to the device", traffic.returned, "to_device"
    yield "backward", "device", "gradients put into buckets", _gradients_in_memory(case), memory
    yield "backward", "device", "gradient checks", _checked(case), memory
    yield "backward", "host", "gradients copied and added up", traffic.added, "host_memory"
    new = _NEW_MEMORY * traffic.new_in_backward, _NEW_MEMORY * traffic.new_in_step
    yield "backward", "device", _ANEW, new[0], "host_memory"
    yield "optimizer", "host", _ANEW, new[1], "host_memory"
    yield "optimizer", "host", "the optimizer", traffic.optimizer + traffic.chain, "host_step"
    yield "optimizer", "device", "the optimizer", traffic.on_device, "device_memory_fp32"
    yield "optimizer", "disk", "swap files read", swap.read, "disk_read"
    yield "optimizer", "disk", "swap files written", swap.written, "disk_write"
    yield "weights", "in", "weights to the device", traffic.weights, "to_device"
    yield "weights", "out", "updated weights to the host", traffic.updated, "to_host"
    yield "ema", "out", "weights for the EMA", traffic.ema_from_device, "to_host"
    yield "ema", "host", "the EMA", traffic.ema, "host_memory"
    yield "ema", "disk", "the EMA read", traffic.ema_on_disk, "disk_read"
    yield "ema", "disk", "the EMA written", traffic.ema_on_disk, "disk_write"


def _waiting(case: Costing) -> float:
    """Return the bytes of activations that a step stores in host memory."""
    work, known = case.workload, case.model.activations
    if not offloads_activations(case) or known is None or known.offloaded_host is None:
        return 0.0
    size = {"batch": work.batch, "pixels": case.positions, "element_bytes": case.element}
    each = known.offloaded_host.nbytes(**size)
    return each * case.resolved.gradient_accumulation_steps


def _checked(case: Costing) -> float:
    """Return the bytes that DeepSpeed reads and writes once per step to check gradients."""
    each, _ = _PER_CHECKED[case.resolved.stage == 3, case.element]
    return each * case.model.trainable_numel if case.checks_gradients else 0.0


def _gradients_in_memory(case: Costing) -> float:
    """Return the bytes that copies of gradients into and out of buckets read and write."""
    if not case.resolved.uses_deepspeed or case.hosted:
        return 0.0
    # Copy into a bucket, average, copy out, and norm.
    return 7 * case.element * case.model.trainable_numel * case.resolved.gradient_accumulation_steps
