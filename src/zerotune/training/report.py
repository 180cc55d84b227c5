"""What a run did: loss, time and memory, as data and as pictures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from zerotune.training.callbacks import Callback
from zerotune.training.progress import format_bytes
from zerotune.training.timing import PHASES

if TYPE_CHECKING:
    from zerotune.training.memory import MemoryPart
    from zerotune.training.metrics import StepMetrics
    from zerotune.training.trainer import Trainer


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
    memory: tuple[MemoryPart, ...]
    """What the plan says each component takes, per rank."""
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
        rows: list[tuple[str, str, str, str]] = [
            (p.component, p.place, format_bytes(p.nbytes), p.note) for p in self.memory
        ]
        for place in dict.fromkeys(part.place for part in self.memory):
            total = sum(part.nbytes for part in self.memory if part.place == place)
            rows.append(("sum", place, format_bytes(total), "components above"))
        if self.device_peak is not None:
            rows.append(("measured peak", "GPU", format_bytes(self.device_peak), "torch"))
        before = format_bytes(self.host_before)
        rows.append(("measured before", "host", before, "libraries, model and data"))
        rows.append(("measured peak", "host", format_bytes(self.host_peak), "whole process"))
        return rows

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
        speed = f"{self.steps_per_second:.2f} it/s, {self.samples_per_second:.0f} samples/s"
        lines = [
            f"{self.steps} steps in {self.seconds:.1f} s on {self.processes}: {speed}",
            "time per step:",
            *(f"  {name:<12}{value:>12}{share:>7}" for name, value, share in self.time_rows()),
            "memory per rank:",
            *(
                f"  {component:<18}{place:<6}{size:>12}  {note}"
                for component, place, size, note in self.memory_rows()
            ),
        ]
        if self.stopped is not None:
            lines.append(f"stopped early: {self.stopped}")
        return "\n".join(lines)

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write ``loss.png`` and ``memory.png``; returns their paths.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        from zerotune.training.plots import plot_loss, plot_report

        into = Path(folder)
        steps = range(self.first_step + 1, self.first_step + self.steps + 1)
        return (
            plot_loss(into / "loss.png", steps=list(steps), losses=self.losses),
            plot_report(into / "memory.png", self),
        )


class Record(Callback):
    """Adds up what a report needs; every trainer carries one."""

    def __init__(self) -> None:
        self._first_step = 0
        self._clear()

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:  # noqa: ARG002
        """Add a step."""
        self._losses.append(metrics.loss)
        self._seconds += metrics.seconds
        for name, seconds in metrics.phases.items():
            self._phases[name] += seconds

    def on_resume(self, trainer: Trainer, path: Path) -> None:  # noqa: ARG002
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
