"""What bounds a run: which phase takes the time, what it moves meanwhile, and how fast."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import torch

from zerotune._util.files import write_atomically
from zerotune._util.table import Block, Column, Line, Page, Row, Table
from zerotune._util.text import brief_size
from zerotune.plan.memory.model import PHASES as MOMENTS
from zerotune.plan.memory.model import PLACES
from zerotune.plan.text import DURING, PLACE_NAMES
from zerotune.training.events import PHASES, Callback

if TYPE_CHECKING:
    from zerotune.plan.api import MemoryEstimate
    from zerotune.plan.memory.model import MemoryItem
    from zerotune.plan.memory.traffic import StepTraffic
    from zerotune.training.events import RunView, StepMetrics
    from zerotune.training.profile import Operator


Resource = Literal["compute", "bus", "host memory", "disk", "data", "other"]

_COPIED: Final = 64 * 2**20
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
        _rates[threads] = _measured_copy()
    return _rates[threads]


def _measured_copy() -> float:
    source = torch.ones(_COPIED // 4)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        begun = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - begun)
    return 2 * _COPIED / best


def _traffic(estimate: MemoryEstimate | None) -> StepTraffic | None:
    from zerotune.plan.memory.traffic import step_traffic

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
        near = reference is None or traffic.optimizer / max(seconds, 1e-9) > _NEAR * reference
        kind: Resource = "host memory" if near else "compute"
        found = _bound(kind, phase, seconds, step, traffic.optimizer)
        return attrs.evolve(found, reference=reference)
    return _bound("compute", phase, seconds, step)


def _ema(
    seconds: float, step: float, traffic: StepTraffic | None, reference: float | None
) -> Bound:
    if traffic is None or not traffic.ema:
        return _bound("compute", "ema", seconds, step)
    found = _bound("host memory", "ema", seconds, step, traffic.ema)
    return attrs.evolve(found, reference=reference)


# -- What a run did: loss, time and memory, as data and as pictures.


@attrs.frozen(kw_only=True)
class Report:
    """One rank's account of the steps a trainer took since it was made."""

    first_step: int
    """Steps taken before, by a run that was resumed."""
    steps: int
    """Optimizer steps taken."""
    world_size: int
    samples_per_step: int
    """All ranks together."""
    losses: tuple[float, ...]
    """Loss of each step, mean over ranks and accumulation window."""
    seconds: float
    """Wall-clock time of all steps."""
    phases: Mapping[str, float]
    """Seconds spent on ``"data"``, ``"forward"``, ``"backward"``, ``"optimizer"``, ``"ema"``."""
    host_before: int
    """RAM this process held before the engine was built, bytes: libraries, model, data."""
    host_peak: int
    """Most RAM this process has ever held, bytes; libraries included."""
    device_peak: int | None
    """Most GPU memory torch has allocated, bytes; ``None`` without a GPU."""
    estimate: MemoryEstimate | None
    """What the plan says each component takes, per rank; ``None``: the model is not known."""
    copy_rate: float | None = None
    """Bytes per second a plain copy reads and writes in host memory; ``None``: not measured."""
    operators: tuple[Operator, ...] = ()
    """The most expensive operators, where a ``Profile`` was taken."""
    stopped: str | None = None
    """Why the latest ``fit`` ended early; ``None`` if it did not."""

    @property
    def steps_per_second(self) -> float:
        """Optimizer steps per second; 0 before the first."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0

    @property
    def samples_per_second(self) -> float:
        """Samples per second, all ranks together."""
        return self.steps_per_second * self.samples_per_step

    @property
    def processes(self) -> str:
        """``"1 process"``, ``"2 processes"``."""
        return f"{self.world_size} process{'es' if self.world_size > 1 else ''}"

    def memory_rows(self) -> list[tuple[str, str, str, str]]:
        """Component, place, size and note of each part, then what was measured."""
        rows: list[tuple[str, str, str, str]] = []
        if self.estimate is not None:
            items = sorted(
                self.estimate.items, key=lambda one: (PLACES.index(one.place), -one.nbytes)
            )
            rows += [_item_row(item) for item in items]
            for place in dict.fromkeys(item.place for item in items):
                peak = self.estimate.peak(place)
                size, when = brief_size(peak.nbytes), DURING[peak.phase]
                rows.append(("expected peak", PLACE_NAMES[place], size, when))
        if self.device_peak is not None:
            size = brief_size(self.device_peak)
            rows.append(("measured peak", "device", size, "allocated by torch, without context"))
        before = brief_size(self.host_before)
        rows.append(("measured before", "host", before, "libraries, model and data"))
        rows.append(("measured peak", "host", brief_size(self.host_peak), "whole process"))
        return rows

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """What each part of a step waits for, largest first."""
        return bounds(
            phases=self.phases,
            seconds=self.seconds,
            steps=self.steps,
            estimate=self.estimate,
            reference=self.copy_rate,
        )

    def time_rows(self) -> list[tuple[str, str, str]]:
        """Phase, milliseconds per step and share of the step; what is left over is last."""
        rest = self.seconds - sum(self.phases.values())
        parts = {name: self.phases.get(name, 0.0) for name in PHASES} | {"rest": max(0.0, rest)}
        each = max(1, self.steps)
        whole = self.seconds or 1.0
        return [
            (name, f"{1000 * value / each:.1f} ms", f"{100 * value / whole:.0f} %")
            for name, value in parts.items()
        ]

    def render(self) -> str:
        """The report as text."""
        return self.page().text()

    def page(self) -> Page:
        """The report, for text or a terminal."""
        speed = f"{self.steps_per_second:.2f} it/s, {self.samples_per_second:.0f} samples/s"
        blocks: list[Block] = [_times(self.time_rows()), _memory(self.memory_rows())]
        for title, told in (
            ("what the step waits for:", self.bounds),
            ("operators, profiled:", self.operators),
        ):
            if told:
                blocks += [Line(title), *(Line(str(one), indent=2) for one in told)]
        if self.stopped is not None:
            blocks.append(Line(f"stopped early: {self.stopped}", style="warning"))
        return Page(
            title=f"{self.steps} steps in {self.seconds:.1f} s on {self.processes}: {speed}",
            blocks=tuple(blocks),
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data that JSON can hold; sizes in bytes, times in seconds."""
        plain = attrs.asdict(self, recurse=False)
        return plain | {
            "losses": list(self.losses),
            "phases": dict(self.phases),
            "steps_per_second": self.steps_per_second,
            "samples_per_second": self.samples_per_second,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
            "bounds": [attrs.asdict(one) | {"rate": one.rate} for one in self.bounds],
            "operators": [attrs.asdict(one) for one in self.operators],
        }

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write ``loss.png``, ``memory.png`` and ``report.json``; returns the pictures' paths.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        from zerotune.training.plots import plot_loss, plot_report

        into = Path(folder)
        into.mkdir(parents=True, exist_ok=True)
        write_atomically(into / "report.json", json.dumps(self.to_dict(), indent=1).encode())
        steps = range(self.first_step + 1, self.first_step + self.steps + 1)
        return (
            plot_loss(into / "loss.png", steps=list(steps), losses=self.losses),
            plot_report(into / "memory.png", self),
        )


def _times(rows: Iterable[Row]) -> Table:
    return Table(
        above="time per step:",
        columns=(
            Column(name="phase", width=12),
            Column(name="mean", width=12, gap=0, right=True),
            Column(name="share", width=7, gap=0, right=True),
        ),
        rows=tuple(rows),
    )


def _memory(rows: Iterable[Row]) -> Table:
    return Table(
        above="memory per rank:",
        columns=(
            Column(name="component", width=18),
            Column(name="place", width=8, gap=0),
            Column(name="size", width=12, gap=0, right=True),
            Column(name="note"),
        ),
        rows=tuple(rows),
    )


def _item_row(item: MemoryItem) -> tuple[str, str, str, str]:
    held = [moment for moment in MOMENTS if moment in item.phases]
    when = "" if len(held) == len(MOMENTS) else "only " + " and ".join(DURING[one] for one in held)
    if len(held) == len(MOMENTS) - 1 and MOMENTS[0] not in held:
        when = "not during set-up"
    note = "; ".join(part for part in (item.note, "pinned" if item.pinned else "", when) if part)
    return item.component, PLACE_NAMES[item.place], brief_size(item.nbytes), note


class Record(Callback):
    """Adds up what a report needs; every trainer carries one."""

    def __init__(self) -> None:
        self._first_step = 0
        self._clear()

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:  # noqa: ARG002
        """Add a step."""
        self._losses.append(metrics.loss)
        self._seconds += metrics.seconds
        for name, seconds in metrics.phases.items():
            self._phases[name] += seconds

    def on_resume(self, trainer: RunView, path: Path) -> None:  # noqa: ARG002
        """Start again: what came before belongs to another history."""
        self._first_step = trainer.step
        self._clear()

    @property
    def totals(self) -> dict[str, Any]:
        """The fields of ``Report`` that were counted."""
        return {
            "first_step": self._first_step,
            "steps": len(self._losses),
            "losses": tuple(self._losses),
            "seconds": self._seconds,
            "phases": dict(self._phases),
        }

    def _clear(self) -> None:
        self._losses: list[float] = []
        self._seconds = 0.0
        self._phases = dict.fromkeys(PHASES, 0.0)
