"""What bounds a run: which phase takes the time, what it moves meanwhile, and how fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

import attrs
import torch

from zerotune._util.text import brief_size
from zerotune.backend import rates
from zerotune.plan.memory.time import step_traffic

if TYPE_CHECKING:
    from zerotune.plan.memory.estimate import MemoryEstimate
    from zerotune.plan.memory.time import StepTraffic


Resource = Literal["compute", "bus", "host memory", "disk", "data", "other"]

_rates: dict[int, float] = {}
_PASSES: Final = "forward and backward"
_NEAR: Final = 0.5
"""Share of a copy's rate from which moving bytes, not computing, is what takes the time."""


@attrs.frozen(kw_only=True)
class Bound:
    """One phase of a step, and what it waits for."""

    resource: Resource
    """What the phase is bound by, as far as the numbers tell."""
    phase: str
    """``"data"``, ``"forward and backward"``, ``"optimizer"``, ``"ema"`` or ``"rest"``."""
    seconds: float
    """Per step."""
    share: float
    """Of the step, 0 to 1."""
    nbytes: int = 0
    """The least the phase moves per step and rank; 0: nothing that is counted."""
    reference: float | None = None
    """Bytes per second of a plain copy on this machine, all threads; ``None``: not measured."""

    @property
    def rate(self) -> float:
        """Bytes per second that were reached."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def words(self) -> str:
        """What it waits for, and how fast that is."""
        words = _WAITS[self.resource]
        if self.nbytes and self.phase == _PASSES:
            moved, rate = brief_size(self.nbytes), brief_size(self.rate)
            return f"{words}; meanwhile at least {moved} cross the bus, {rate}/s"
        if self.nbytes:
            words += f": at least {brief_size(self.nbytes)} at {brief_size(self.rate)}/s"
        if self.reference:
            words += f", {self.rate / self.reference:.0%} of what a plain copy reaches"
        return words

    def __str__(self) -> str:
        milliseconds = 1000 * self.seconds
        return f"{self.phase}, {self.share:.0%} of the step, {milliseconds:.1f} ms: {self.words}"


_WAITS: Final[Mapping[Resource, str]] = {
    "compute": "compute",
    "bus": "the bus between host and device",
    "host memory": "host memory",
    "disk": "swap files on disk",
    "data": "reading data",
    "other": "outside of the phases",
}


def bounds(
    *,
    phases: Mapping[str, float],
    seconds: float,
    steps: int,
    estimate: MemoryEstimate | None,
    reference: float | None = None,
) -> tuple[Bound, ...]:
    """What each part of a step waits for, the largest part first: that one bounds the run.

    Bytes are the least the plan's engine moves; where several things happen in one phase, the
    slower names it. What overlaps with computing is not counted against it.

    Args:
        phases: Seconds of all steps by phase, as ``StepMetrics.phases``.
        seconds: Wall-clock time of all steps.
        steps: How many.
        estimate: Of the running plan; without it no bytes are counted.
        reference: Bytes per second (read and written) of a plain copy in host memory.
    """
    if steps <= 0 or seconds <= 0:
        return ()
    each = {name: value / steps for name, value in phases.items()}
    step = seconds / steps
    passes = each.get("forward", 0.0) + each.get("backward", 0.0)
    traffic = _traffic(estimate)
    found = [
        _bound("data", "data", each.get("data", 0.0), step),
        _passes(passes, step, traffic),
        _optimizer(each.get("optimizer", 0.0), step, traffic, reference),
        _ema(each.get("ema", 0.0), step, traffic, reference),
        _bound("other", "rest", max(0.0, step - sum(each.values())), step),
    ]
    return tuple(sorted((one for one in found if one.seconds > 0), key=lambda one: -one.seconds))


def copy_rate() -> float:
    """Bytes per second that a copy in host memory reads and writes together, best of four.

    Measured with torch's present number of threads, once for each.
    """
    threads = torch.get_num_threads()
    if threads not in _rates:
        _rates[threads] = rates.copy_rate()
    return _rates[threads]


def _traffic(estimate: MemoryEstimate | None) -> StepTraffic | None:
    return None if estimate is None else step_traffic(estimate)


def _bound(resource: Resource, phase: str, seconds: float, step: float, nbytes: int = 0) -> Bound:
    return Bound(
        resource=resource, phase=phase, seconds=seconds, share=seconds / step, nbytes=nbytes
    )


def _passes(seconds: float, step: float, traffic: StepTraffic | None) -> Bound:
    # Whether the bus or the device is slower cannot be told from the time alone: gradients and
    # parameters cross while the device computes. The rate is given for the reader to judge.
    crossing = traffic.gradients + traffic.parameters if traffic else 0
    return _bound("compute", _PASSES, seconds, step, crossing)


def _optimizer(
    seconds: float, step: float, traffic: StepTraffic | None, reference: float | None
) -> Bound:
    phase = "optimizer"
    if traffic is None:
        return _bound("compute", phase, seconds, step)
    on_disk = traffic.swap.read + traffic.swap.written
    if on_disk:
        return _bound("disk", phase, seconds, step, on_disk)
    if traffic.optimizer:
        kind = _moving(traffic.optimizer, seconds, reference)
        found = _bound(kind, phase, seconds, step, traffic.optimizer)
        return attrs.evolve(found, reference=reference)
    return _bound("compute", phase, seconds, step)


def _ema(
    seconds: float, step: float, traffic: StepTraffic | None, reference: float | None
) -> Bound:
    if traffic is None or not traffic.ema:
        return _bound("compute", "ema", seconds, step)
    found = _bound(_moving(traffic.ema, seconds, reference), "ema", seconds, step, traffic.ema)
    return attrs.evolve(found, reference=reference)


def _moving(nbytes: int, seconds: float, reference: float | None) -> Resource:
    """Whether moving bytes in host memory is what takes the time, or computing on the way."""
    near = reference is None or nbytes / max(seconds, 1e-9) > _NEAR * reference
    return "host memory" if near else "compute"
