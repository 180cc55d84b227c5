"""Trace a few steps with torch's profiler and summarise the result."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from torch.profiler import ProfilerActivity, profile

from zerotune._util.files import drafted, sync, system_errors
from zerotune._util.text import brief_size, whole
from zerotune.backend.accelerator import accelerator_of
from zerotune.decisions import logger
from zerotune.errors import TrainingError
from zerotune.training.events import Callback

if TYPE_CHECKING:
    from zerotune.training.events import RunView, StepMetrics


@attrs.frozen(kw_only=True)
class Profile:
    """Settings of a torch profiler trace, which a trainer records once.

    Profiling does not change training results, but traced steps are slower.
    """

    folder: str | os.PathLike[str]
    """Folder of ``trace-rank0.json``; open the file in Perfetto or ``chrome://tracing``."""
    steps: int = 3
    """Number of traced steps."""
    warmup: int = 1
    """Number of untraced warm-up steps, during which caches fill and kernels compile."""
    ranks: tuple[int, ...] = attrs.field(default=(0,), converter=tuple[int, ...])
    """Ranks to trace; each of these ranks writes a file."""
    memory: bool = False
    """Whether to record memory allocations."""
    shapes: bool = False
    """Whether to record the operators' input shapes."""
    top: int = 10
    """Number of operators in the report."""

    def __attrs_post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup", 0), ("top", 1)):
            whole(getattr(self, name), key=f"profile.{name}", least=least)


@attrs.frozen(kw_only=True)
class Operator:
    """Totals of all calls of one operator in the traced steps."""

    name: str
    calls: int
    """Calls per step."""
    seconds: float
    """Self time per step in seconds, without nested calls, on the device that ran the operator."""
    share: float
    """Share of the total time of all operators, from 0 to 1."""
    nbytes: int = 0
    """Net bytes that the operator allocates per step; 0 unless memory was recorded."""

    def __str__(self) -> str:
        words = f"{self.name:<40} {1000 * self.seconds:>9.2f} ms {self.share:>6.1%}"
        words += f" {self.calls:>7} calls"
        return words + (f" {brief_size(self.nbytes):>12}" if self.nbytes else "")


class Profiler(Callback):
    """Callback that records a trace during training; ``Trainer(profile=...)`` adds it."""

    def __init__(self, wanted: Profile) -> None:
        self._wanted = wanted
        self._seen = 0
        self._running: Any = None
        self.operators: tuple[Operator, ...] = ()
        """The most expensive operators; empty before the trace is written."""
        self.path: Path | None = None
        """Path of the trace; ``None`` before the trace is written."""

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:  # noqa: ARG002
        """Begin the trace if ``warmup`` is 0."""
        self._begin_if_due(trainer)

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:  # noqa: ARG002
        """Count the step, and begin or end the trace after the configured number of steps."""
        self._seen += 1
        if self._running is None:
            self._begin_if_due(trainer)
        elif self._seen == self._wanted.warmup + self._wanted.steps:
            self._finish(trainer)

    def on_fit_end(self, trainer: RunView) -> None:
        """Write the trace if ``fit`` ends during tracing."""
        if self._running is not None:
            self._finish(trainer)

    def _begin_if_due(self, trainer: RunView) -> None:
        due = self._seen == self._wanted.warmup and self.path is None
        if not due or trainer.engine.group.rank not in self._wanted.ranks:
            return
        on_device = accelerator_of(trainer.engine.device).profiler_activity
        activities = {ProfilerActivity.CPU, on_device or ProfilerActivity.CPU}
        self._running = profile(
            activities=activities,
            profile_memory=self._wanted.memory,
            record_shapes=self._wanted.shapes,
        )
        self._running.start()

    def _finish(self, trainer: RunView) -> None:
        running, self._running = self._running, None
        running.stop()
        taken = self._seen - self._wanted.warmup
        if taken == 0:
            return  # ``fit`` ended within the first traced step.
        self.operators = _costliest_operators(running, steps=taken, top=self._wanted.top)
        self.path = Path(self._wanted.folder) / f"trace-rank{trainer.engine.group.rank}.json"
        try:
            with system_errors(TrainingError, self.path, "the profile cannot be written"):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with drafted(self.path) as draft:
                    running.export_chrome_trace(str(draft))
                    sync(draft)
        except TrainingError as error:
            # Not worth ending a run; the measured times are in ``operators``.
            logger.warning("%s Training continues.", error)
            return
        logger.info("profile of %d step(s) written to %s", taken, self.path)


def _costliest_operators(running: Any, *, steps: int, top: int) -> tuple[Operator, ...]:
    events = [event for event in running.key_averages() if not event.key.startswith("ProfilerStep")]
    on_device = any(_device_time(event) for event in events)
    times = [
        (event, _device_time(event) if on_device else event.self_cpu_time_total) for event in events
    ]
    total = sum(spent for _, spent in times) or 1.0
    first = sorted(times, key=lambda pair: -pair[1])[:top]
    return tuple(
        Operator(
            name=event.key,
            calls=round(event.count / steps),
            seconds=spent / 1e6 / steps,
            share=spent / total,
            nbytes=max(0, round(event.self_cpu_memory_usage / steps)),
        )
        for event, spent in first
        if spent > 0
    )


def _device_time(event: Any) -> float:
    return float(getattr(event, "self_device_time_total", 0.0))
