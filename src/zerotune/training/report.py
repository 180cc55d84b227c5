"""Reports of a run: loss, time and memory as data and text."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import torch
from typing_extensions import override

from zerotune._util.files import system_errors, write_atomically
from zerotune._util.table import Block, Line, Page, Readable, Table
from zerotune._util.text import counted, format_size
from zerotune.backend import rates
from zerotune.errors import TrainingError
from zerotune.plan.memory.estimate import PHASES as MOMENTS
from zerotune.plan.memory.estimate import PLACES
from zerotune.plan.memory.time import step_traffic
from zerotune.plan.text import DURING, PLACE_NAMES, time_data
from zerotune.training.events import PHASES, Callback

if TYPE_CHECKING:
    from zerotune.plan.memory.estimate import MemoryItem
    from zerotune.plan.memory.time import StepTime
    from zerotune.plan.plan import MemoryEstimate
    from zerotune.training.events import RunView, StepMetrics


_PREDICTED: Final = ("forward", "backward", "optimizer", "ema")
"""Phases for which the plan predicts a time."""


@attrs.frozen(kw_only=True, repr=False)
class Report(Readable):
    """Loss, time and memory of the steps that a trainer has taken, as measured on one rank."""

    first_step: int
    """Optimizer step from which the run was resumed; 0 if it was not resumed."""
    steps: int
    """Number of optimizer steps in this report."""
    world_size: int
    samples_per_step: int
    """Samples per optimizer step, over all ranks."""
    losses: tuple[float, ...]
    """Loss of each step, averaged over all ranks and micro batches."""
    seconds: float
    """Total wall-clock time of all steps in seconds."""
    phases: Mapping[str, float]
    """Seconds per phase: ``"data"``, ``"forward"``, ``"backward"``, ``"optimizer"``, ``"ema"``."""
    host_before: int
    """RAM of this process in bytes before the engine was built: libraries, model and data."""
    host_peak: int
    """Peak RAM of this process in bytes, libraries included."""
    device_peak: int | None
    """Peak GPU memory of this process in bytes, including the CUDA context; ``None`` without a
    GPU."""
    estimate: MemoryEstimate | None
    """The plan's memory estimate per rank; ``None`` if the plan was resolved without a model."""
    copy_rate: float | None = None
    """Host memory bandwidth in bytes per second; ``None`` if not measured."""
    stopped: str | None = None
    """Why the latest ``fit`` ended early; ``None`` if it reached its goal."""

    @property
    def steps_per_second(self) -> float:
        """Optimizer steps per second; 0 before the first step."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.steps_per_second * self.samples_per_step

    @property
    def processes(self) -> str:
        """Number of processes as text, such as ``"1 process"`` or ``"2 processes"``."""
        return counted(self.world_size, "process", "processes")

    def memory_rows(self) -> list[tuple[str, str, str, str]]:
        """Return rows (component, place, size, note); the last rows contain measured values."""
        rows: list[tuple[str, str, str, str]] = []
        if self.estimate is not None:
            items = sorted(
                self.estimate.items, key=lambda one: (PLACES.index(one.place), -one.nbytes)
            )
            rows += [_item_row(item) for item in items]
            for place in dict.fromkeys(item.place for item in items):
                peak = self.estimate.peak(place)
                size, when = format_size(peak.nbytes), DURING[peak.phase]
                rows.append(("expected peak", PLACE_NAMES[place], size, when))
        if self.device_peak is not None:
            size = format_size(self.device_peak)
            rows.append(("measured peak", "device", size, "whole process, context included"))
        before = format_size(self.host_before)
        rows.append(("measured before", "host", before, "libraries, model and data"))
        rows.append(("measured peak", "host", format_size(self.host_peak), "whole process"))
        return rows

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """Bottleneck of each phase, longest phase first."""
        return bounds(
            phases=self.phases,
            seconds=self.seconds,
            steps=self.steps,
            estimate=self.estimate,
            reference=self.copy_rate,
        )

    @property
    def split(self) -> dict[str, float]:
        """Seconds per phase; time outside the phases is ``"rest"``."""
        rest = self.seconds - sum(self.phases.values())
        return {name: self.phases.get(name, 0.0) for name in PHASES} | {"rest": max(0.0, rest)}

    def time_rows(self) -> list[tuple[str, str, str]]:
        """Return rows (phase, milliseconds per step, share); the last row is ``"rest"``."""
        each = max(1, self.steps)
        whole = self.seconds or 1.0
        return [
            (name, f"{1000 * value / each:.1f} ms", f"{100 * value / whole:.0f} %")
            for name, value in self.split.items()
        ]

    @property
    def predicted(self) -> StepTime | None:
        """The step time that the plan predicts for this machine; ``None`` if unknown."""
        return None if self.estimate is None else self.estimate.step_time()

    def prediction_rows(self) -> list[tuple[str, str, str]]:
        """Return rows (phase, predicted time, measured time); empty without a prediction."""
        predicted = self.predicted
        if predicted is None or not self.steps:
            return []
        phases = predicted.phases
        expected = {name: phases.get(name, 0.0) for name in ("forward", "backward", "ema")}
        expected["optimizer"] = phases.get("optimizer", 0.0) + phases.get("weights", 0.0)
        whole = ("step", predicted.seconds, self.seconds)
        rows = [(name, expected[name], self.phases.get(name, 0.0)) for name in _PREDICTED]
        return [
            (name, f"{1000 * one:.1f} ms", f"{1000 * other / self.steps:.1f} ms")
            for name, one, other in (*rows, whole)
        ]

    def render(self) -> str:
        """Return the report as text."""
        return self.page().text()

    @override
    def brief(self) -> str:
        """Summarise steps and speed in one line."""
        speed = f"{self.steps_per_second:.2f} it/s, {self.samples_per_second:.0f} samples/s"
        return f"{counted(self.steps, 'step')} in {self.seconds:.1f} s on {self.processes}: {speed}"

    @override
    def page(self) -> Page:
        """Return the report as a page that can be shown as text, in a terminal or in a notebook."""
        blocks: list[Block] = [
            Line("time per step:", style="title"),
            Table(rows=tuple(self.time_rows()), align="lrr", widths=(12, 10, 5)),
            Line("memory per rank:", style="title"),
            Table(rows=tuple(self.memory_rows()), align="llr", widths=(16, 8, 10)),
        ]
        rows = self.prediction_rows()
        if rows and self.predicted is not None:
            title = f"predicted and measured time per step (rates: {self.predicted.origin}):"
            blocks += [
                Line(title, style="title"),
                Table(rows=tuple(rows), align="lrr", widths=(12, 10, 10)),
            ]
        if self.bounds:
            blocks += [Line("bottleneck of each phase:", style="title")]
            blocks += [Line(str(bound), indent=2) for bound in self.bounds]
        if self.stopped is not None:
            blocks.append(Line(f"stopped early: {self.stopped}", style="warning"))
        return Page(title=self.brief(), blocks=tuple(blocks))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-serialisable dict; sizes are in bytes, times in seconds."""
        plain = attrs.asdict(self, recurse=False)
        return plain | {
            "losses": list(self.losses),
            "phases": dict(self.phases),
            "steps_per_second": self.steps_per_second,
            "samples_per_second": self.samples_per_second,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
            "predicted": None if self.predicted is None else time_data(self.predicted),
            "bounds": [attrs.asdict(one) | {"rate": one.rate} for one in self.bounds],
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``report.json``, and return its path.

        Args:
            folder: Folder to write to; a missing folder is created.

        Raises:
            TrainingError: The file cannot be written.
        """
        file = Path(folder) / "report.json"
        with system_errors(TrainingError, folder, "the report cannot be written to this folder"):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(self.to_dict(), indent=1).encode())
        return file


def _item_row(item: MemoryItem) -> tuple[str, str, str, str]:
    held = [moment for moment in MOMENTS if moment in item.phases]
    when = "" if len(held) == len(MOMENTS) else "only " + " and ".join(DURING[one] for one in held)
    if len(held) == len(MOMENTS) - 1 and MOMENTS[0] not in held:
        when = "not during set-up"
    note = "; ".join(part for part in (item.note, "pinned" if item.pinned else "", when) if part)
    return item.component, PLACE_NAMES[item.place], format_size(item.nbytes), note


class Record(Callback):
    """Callback that accumulates the values of a report; every trainer has one."""

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
        """Discard the values recorded before the resume."""
        self._first_step = trainer.step
        self._clear()

    @property
    def totals(self) -> dict[str, Any]:
        """Values of those ``Report`` fields that this callback accumulates."""
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


# -- Bottlenecks of a run: which phase takes the time, what it moves meanwhile, and how fast.


Resource = Literal["compute", "bus", "host memory", "disk", "data", "other"]

_FORWARD_BACKWARD: Final = "forward and backward"
_NEAR: Final = 0.5
"""If a phase moves bytes at more than this share of the copy rate, memory bandwidth is its
bottleneck."""


@attrs.frozen(kw_only=True)
class Bound:
    """One phase of a step and its bottleneck."""

    resource: Resource
    """Likely bottleneck, based on the measurements."""
    phase: str
    """``"data"``, ``"forward and backward"``, ``"optimizer"``, ``"ema"`` or ``"rest"``."""
    seconds: float
    """Seconds per step."""
    share: float
    """Share of the step time, from 0 to 1."""
    nbytes: int = 0
    """Minimum number of bytes that the phase moves per step and rank; 0 if unknown."""
    reference: float | None = None
    """Host memory bandwidth in bytes per second, to compare with ``rate``; ``None`` if not
    measured."""

    @property
    def rate(self) -> float:
        """Transfer rate of the phase in bytes per second."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def words(self) -> str:
        """Describe the bottleneck and its rate."""
        words = _WAITS[self.resource]
        if self.nbytes and self.phase == _FORWARD_BACKWARD:
            moved, rate = format_size(self.nbytes), format_size(self.rate)
            return f"{words}; meanwhile the bus transfers at least {moved} at {rate}/s"
        if self.nbytes:
            words += f": at least {format_size(self.nbytes)} at {format_size(self.rate)}/s"
        if self.reference:
            words += f", {self.rate / self.reference:.0%} of a plain copy's rate"
        return words

    def __str__(self) -> str:
        milliseconds = 1000 * self.seconds
        return f"{self.phase}, {self.share:.0%} of the step, {milliseconds:.1f} ms: {self.words}"


_WAITS: Final[Mapping[Resource, str]] = {
    "compute": "compute",
    "bus": "the bus between host and device",
    "host memory": "host memory",
    "disk": "files on disk",
    "data": "reading data",
    "other": "work outside the phases",
}


def bounds(
    *,
    phases: Mapping[str, float],
    seconds: float,
    steps: int,
    estimate: MemoryEstimate | None,
    reference: float | None = None,
) -> tuple[Bound, ...]:
    """Return the bottleneck of each phase, longest phase first.

    Args:
        phases: Total seconds of each phase.
        seconds: Total wall-clock seconds of all steps.
        steps: Number of optimizer steps.
        estimate: The plan's memory estimate, from which transferred bytes are computed.
        reference: Host memory bandwidth in bytes per second; ``None`` if not measured.
    """
    if steps <= 0 or seconds <= 0:
        return ()
    each = {name: value / steps for name, value in phases.items()}
    step = seconds / steps
    passes = each.get("forward", 0.0) + each.get("backward", 0.0)
    traffic = None if estimate is None else step_traffic(estimate)
    # The time alone does not show whether the bus or the device is slower, because gradients and
    # parameters cross the bus while the device computes. The rate lets the reader judge.
    crossing = traffic.bus - traffic.weights if traffic else 0
    on_disk = traffic.swap.read + traffic.swap.written if traffic else 0
    averaged = 2 * traffic.ema_on_disk if traffic else 0
    optimizer = each.get("optimizer", 0.0)

    def bound(resource: Resource, phase: str, seconds: float, nbytes: int = 0) -> Bound:
        return Bound(
            resource=resource, phase=phase, seconds=seconds, share=seconds / step, nbytes=nbytes
        )

    def on_host(phase: str, nbytes: int) -> Bound:
        """Return the bottleneck of a phase in host memory: memory bandwidth or compute."""
        spent = each.get(phase, 0.0)
        if not nbytes:
            return bound("compute", phase, spent)
        near = reference is None or nbytes / max(spent, 1e-9) > _NEAR * reference
        moving = bound("host memory" if near else "compute", phase, spent, nbytes)
        return attrs.evolve(moving, reference=reference)

    parts = [
        bound("data", "data", each.get("data", 0.0)),
        bound("compute", _FORWARD_BACKWARD, passes, crossing),
        bound("disk", "optimizer", optimizer, on_disk)
        if on_disk
        else on_host("optimizer", traffic.optimizer if traffic else 0),
        bound("disk", "ema", each.get("ema", 0.0), averaged)
        if averaged
        else on_host("ema", traffic.ema if traffic else 0),
        bound("other", "rest", max(0.0, step - sum(each.values()))),
    ]
    return tuple(sorted((one for one in parts if one.seconds > 0), key=lambda one: -one.seconds))


def copy_rate() -> float:
    """Measure host memory bandwidth in bytes per second, counting a copy's reads and writes.

    The result is the rate of the fastest of four copies, with torch's current number of threads.
    The result is cached for each number of threads.
    """
    return _copy_rate_with(torch.get_num_threads())


@functools.cache
def _copy_rate_with(_threads: int) -> float:
    return rates.copy_rate()
