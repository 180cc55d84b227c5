"""What a run did: loss, time and memory, as data, as text and as pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from typing_extensions import override

from zerotune._util.files import system_errors, write_atomically
from zerotune._util.palette import PHASES as PHASE_COLOURS
from zerotune._util.palette import STRONG
from zerotune._util.table import Block, Line, Page, Readable, Table
from zerotune._util.text import brief_size, common_unit, counted
from zerotune.errors import TrainingError
from zerotune.plan.charts import (
    PIXELS_PER_INCH,
    Panel,
    draw_panels,
    memory_heading,
    memory_panels,
)
from zerotune.plan.memory.estimate import PHASES as MOMENTS
from zerotune.plan.memory.estimate import PLACES, Place
from zerotune.plan.text import DURING, PLACE_NAMES, time_data
from zerotune.training.bounds import Bound, bounds
from zerotune.training.events import PHASES, Callback
from zerotune.training.plots import plot_loss, write_png

if TYPE_CHECKING:
    from zerotune.plan.memory.estimate import MemoryEstimate, MemoryItem
    from zerotune.plan.memory.time import StepTime
    from zerotune.training.events import RunView, StepMetrics
    from zerotune.training.profile import Operator


_PREDICTED: Final = ("forward", "backward", "optimizer", "ema")
"""Phases of a step whose time is predicted."""


@attrs.frozen(kw_only=True, repr=False)
class Report(Readable):
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
    """Most GPU memory this process has taken, context included, bytes; ``None`` without a GPU."""
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
        return counted(self.world_size, "process", "processes")

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
            rows.append(("measured peak", "device", size, "whole process, context included"))
        before = brief_size(self.host_before)
        rows.append(("measured before", "host", before, "libraries, model and data"))
        rows.append(("measured peak", "host", brief_size(self.host_peak), "whole process"))
        return rows

    def measured_memory(self) -> dict[Place, int]:
        """Bytes of the peak that was measured at each place, where it was."""
        peaks: dict[Place, int] = {"host": self.host_peak}
        return peaks if self.device_peak is None else peaks | {"device": self.device_peak}

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

    @property
    def split(self) -> dict[str, float]:
        """Seconds of each phase; what is left over is ``"rest"``."""
        rest = self.seconds - sum(self.phases.values())
        return {name: self.phases.get(name, 0.0) for name in PHASES} | {"rest": max(0.0, rest)}

    def time_rows(self) -> list[tuple[str, str, str]]:
        """Phase, milliseconds per step and share of the step; what is left over is last."""
        each = max(1, self.steps)
        whole = self.seconds or 1.0
        return [
            (name, f"{1000 * value / each:.1f} ms", f"{100 * value / whole:.0f} %")
            for name, value in self.split.items()
        ]

    @property
    def predicted(self) -> StepTime | None:
        """What the plan says a step takes on this machine; ``None``: not known."""
        return None if self.estimate is None else self.estimate.step_time()

    def prediction_rows(self) -> list[tuple[str, str, str]]:
        """Phase, predicted and measured milliseconds per step; none without a prediction."""
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
        """The report as text."""
        return self.page().text()

    @override
    def brief(self) -> str:
        """How many steps, and how fast."""
        speed = f"{self.steps_per_second:.2f} it/s, {self.samples_per_second:.0f} samples/s"
        return f"{counted(self.steps, 'step')} in {self.seconds:.1f} s on {self.processes}: {speed}"

    @override
    def page(self) -> Page:
        """The report, for text, a terminal or a notebook."""
        blocks: list[Block] = [
            Line("time per step:", style="title"),
            Table(rows=tuple(self.time_rows()), align="lrr", widths=(12, 10, 5)),
            Line("memory per rank:", style="title"),
            Table(rows=tuple(self.memory_rows()), align="llr", widths=(16, 8, 10)),
        ]
        rows = self.prediction_rows()
        if rows and self.predicted is not None:
            title = f"predicted and measured, per step; rates: {self.predicted.origin}:"
            blocks += [
                Line(title, style="title"),
                Table(rows=tuple(rows), align="lrr", widths=(12, 10, 10)),
            ]
        for title, values in (
            ("what the step waits for:", self.bounds),
            ("operators, profiled:", self.operators),
        ):
            if values:
                blocks += [Line(title, style="title")]
                blocks += [Line(str(value), indent=2) for value in values]
        if self.stopped is not None:
            blocks.append(Line(f"stopped early: {self.stopped}", style="warning"))
        return Page(title=self.brief(), blocks=tuple(blocks))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data that JSON can hold; sizes in bytes, times in seconds."""
        plain = attrs.asdict(self, recurse=False)
        return plain | {
            "losses": list(self.losses),
            "phases": dict(self.phases),
            "steps_per_second": self.steps_per_second,
            "samples_per_second": self.samples_per_second,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
            "predicted": None if self.predicted is None else time_data(self.predicted),
            "bounds": [attrs.asdict(one) | {"rate": one.rate} for one in self.bounds],
            "operators": [attrs.asdict(one) for one in self.operators],
        }

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write ``loss.png``, ``memory.png`` and ``report.json``; returns the pictures' paths.

        Raises:
            MissingDependencyError: matplotlib is not installed.
            TrainingError: The folder cannot be written to.
        """
        into = Path(folder)
        with system_errors(TrainingError, into, "the report cannot be written to it"):
            into.mkdir(parents=True, exist_ok=True)
            write_atomically(into / "report.json", json.dumps(self.to_dict(), indent=1).encode())
        steps = range(self.first_step + 1, self.first_step + self.steps + 1)
        return (
            plot_loss(into / "loss.png", steps=list(steps), losses=self.losses),
            plot_report(into / "memory.png", self),
        )


def plot_report(path: str | os.PathLike[str], report: Report) -> Path:
    """Write memory as a bar for each place, and the split of the step time, as PNG.

    Bars of memory are the estimate's parts, with a line where the measured peak was; without an
    estimate they are what was measured.

    Args:
        path: The file; its folder is made.
        report: What ``Trainer.report`` gave.

    Returns:
        ``path``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    measured = report.measured_memory()
    if report.estimate is not None:
        heading = memory_heading(report.estimate)
        panels = memory_panels(report.estimate, measured=measured)
    else:
        heading = f"Memory per rank ({report.processes})"
        unit, size = common_unit(measured.values())
        panels = [
            Panel(
                title=PLACE_NAMES[place],
                parts=[("measured peak", measured[place] / size, STRONG)],
                unit=unit,
            )
            for place in PLACES
            if place in measured
        ]
    mean = {name: 1000 * value / max(1, report.steps) for name, value in report.split.items()}
    step = Panel(
        title=f"time per step: {sum(mean.values()):.1f} ms",
        parts=[(name, value, PHASE_COLOURS[name]) for name, value in mean.items()],
        unit="ms",
        decimals=1,
        note=f"{counted(report.steps, 'step')}, {report.steps_per_second:.2f} it/s",
    )
    return write_png(path, draw_panels(heading, [*panels, step]), dpi=PIXELS_PER_INCH)


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
