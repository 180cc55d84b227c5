"""Reports of a run: loss, time and memory as data and text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from typing_extensions import override

from zerotune._util.files import system_errors, write_atomically
from zerotune._util.table import Block, Line, Page, Readable, Table
from zerotune._util.text import counted, format_size
from zerotune.errors import TrainingError
from zerotune.plan.memory.items import DURING, PLACES
from zerotune.plan.memory.items import PHASES as MOMENTS
from zerotune.plan.text.advice import time_data
from zerotune.plan.text.memory import PLACE_NAMES
from zerotune.training.events import PHASES, Callback

if TYPE_CHECKING:
    from zerotune.plan.memory.items import MemoryItem
    from zerotune.plan.memory.time import StepTime
    from zerotune.plan.plan import MemoryEstimate
    from zerotune.training.events import StepMetrics
    from zerotune.training.view import RunView


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
