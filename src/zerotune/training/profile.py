"""A torch profiler trace of a few steps, and what it says in short."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.profiler import ProfilerActivity, profile

from zerotune._util.files import drafted, sync, system_errors
from zerotune._util.text import brief_size, whole
from zerotune.decisions import logger
from zerotune.errors import TrainingError
from zerotune.training.events import Callback

if TYPE_CHECKING:
    from zerotune.training.events import RunView, StepMetrics


@attrs.frozen(kw_only=True)
class Profile:
    """What to trace: ``steps`` optimizer steps after ``warmup`` others, once per trainer.

    Profiling does not change training by a bit, but traced steps are slower.
    """

    folder: str | os.PathLike[str]
    """Where ``trace-rank0.json`` goes, to be opened in Perfetto or ``chrome://tracing``."""
    steps: int = 3
    """Steps that are traced."""
    warmup: int = 1
    """Steps before them: caches fill and compilers run in the first."""
    ranks: tuple[int, ...] = attrs.field(default=(0,), converter=tuple[int, ...])
    """Who traces; every traced rank writes a file of its own."""
    memory: bool = False
    """Whether allocations are recorded too."""
    shapes: bool = False
    """Whether the shapes of the operators' inputs are recorded too."""
    top: int = 10
    """Operators in the report."""

    def __attrs_post_init__(self) -> None:
        for name, least in (("steps", 1), ("warmup", 0), ("top", 1)):
            whole(getattr(self, name), key=f"profile.{name}", least=least)


@attrs.frozen(kw_only=True)
class Operator:
    """One operator of the traced steps, all its calls together."""

    name: str
    calls: int
    """Per step."""
    seconds: float
    """Per step, of its own, without what it calls; on the device where it ran there."""
    share: float
    """Of all operators together, 0 to 1."""
    nbytes: int = 0
    """Allocated per step, net; 0 unless memory was recorded."""

    def __str__(self) -> str:
        words = f"{self.name:<40} {1000 * self.seconds:>9.2f} ms {self.share:>6.1%}"
        words += f" {self.calls:>7} calls"
        return words + (f" {brief_size(self.nbytes):>12}" if self.nbytes else "")


class Profiler(Callback):
    """Takes a ``Profile`` while a trainer trains; added by ``Trainer(profile=...)``."""

    def __init__(self, wanted: Profile) -> None:
        self._wanted = wanted
        self._seen = 0
        self._running: Any = None
        self.operators: tuple[Operator, ...] = ()
        """The most expensive operators; empty before the trace is written."""
        self.path: Path | None = None
        """The trace, once it is written."""

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:  # noqa: ARG002
        """Begin, when no step is to be left out."""
        self._begin_if_due(trainer)

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:  # noqa: ARG002
        """Count; begin before the first step to be traced and end after the last."""
        self._seen += 1
        if self._running is None:
            self._begin_if_due(trainer)
        elif self._seen == self._wanted.warmup + self._wanted.steps:
            self._finish(trainer)

    def on_fit_end(self, trainer: RunView) -> None:
        """Write what there is, if ``fit`` ends before the trace does."""
        if self._running is not None:
            self._finish(trainer)

    def _begin_if_due(self, trainer: RunView) -> None:
        due = self._seen == self._wanted.warmup and self.path is None
        if not due or trainer.engine.group.rank not in self._wanted.ranks:
            return
        activities = [ProfilerActivity.CPU]
        if trainer.engine.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
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
            # No reason to lose a run; what was measured is in ``operators``.
            logger.warning("%s Training goes on.", error)
            return
        logger.info("profile of %d step(s) written to %s", taken, self.path)


def _costliest_operators(running: Any, *, steps: int, top: int) -> tuple[Operator, ...]:
    events = [event for event in running.key_averages() if not event.key.startswith("ProfilerStep")]
    on_device = torch.cuda.is_available() and any(_device_time(event) for event in events)
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
