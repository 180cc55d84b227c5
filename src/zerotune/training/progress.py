"""Live progress of a run on a terminal or in a notebook."""

from __future__ import annotations

import math
import time
from collections import deque
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zerotune._util.text import format_seconds, format_size
from zerotune.training.events import Callback

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from zerotune.training.events import StepMetrics
    from zerotune.training.view import RunView

_BAR_FIELDS = ("loss {loss}", "lr {lr}", "{rate} it/s", "peak {peak}", "ETA {eta}")


class ProgressBar(Callback):
    """Shows the progress of a run on rank 0: mean loss, learning rate, speed, memory and time left.

    A terminal, or a notebook with ipywidgets, shows a live bar. Any other output shows one line
    every few steps. The memory shown is the peak GPU memory, or the peak RAM if there is no GPU.

    Args:
        every: Steps between two lines; also the number of steps over which the loss is averaged.
        console: Console for the output; by default standard output.
    """

    def __init__(self, *, every: int = 20, console: Console | None = None) -> None:
        self._every = max(1, every)
        self._console = console
        self._losses: deque[float] = deque(maxlen=self._every)
        self._times: deque[float] = deque(maxlen=self._every + 1)
        self._total: int | None = None
        self._resumed = ""
        self._bar: Any = None

    def on_resume(self, trainer: RunView, path: Path) -> None:  # noqa: ARG002
        """Remember the step at which the run resumes; ``on_fit_start`` prints it."""
        self._resumed = next(str(d) for d in reversed(trainer.decisions) if d.key == "step")

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:
        """Show the bar."""
        self._total = steps
        self._losses.clear()
        self._times.clear()
        if not trainer.is_main or (steps is not None and trainer.step >= steps):
            return
        if self._console is None:
            from rich.console import Console

            self._console = Console(soft_wrap=True)
            # Use the notebook's console only if it can show a moving bar.
            if self._console.is_jupyter and find_spec("ipywidgets") is None:
                self._console = Console(soft_wrap=True, force_jupyter=False)
        if self._resumed:
            self._console.print(self._resumed, markup=False, highlight=False)
            self._resumed = ""
        self._times.append(time.perf_counter())
        if self._console.is_terminal or self._console.is_jupyter:
            self._bar = _start_bar(self._console, done=trainer.step, total=steps)

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:
        """Update the bar, or print a line if one is due."""
        if not trainer.is_main or self._console is None:
            return
        self._losses.append(metrics.loss)
        self._times.append(time.perf_counter())
        fields = self._fields(metrics)
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=metrics.step, **fields)
        elif metrics.step % self._every == 0 or metrics.step in (1, self._total):
            text = "  ".join(field.format(**fields) for field in _BAR_FIELDS)
            total = "" if self._total is None else str(self._total)
            number = f"{metrics.step:>{len(total)}}/{total}" if total else str(metrics.step)
            self._console.print(
                f"step {number}  {text}",
                markup=False,
                highlight=False,
            )

    def on_fit_end(self, trainer: RunView) -> None:  # noqa: ARG002
        """Stop the bar."""
        if self._bar is not None:
            # In a notebook, stopping does not draw the final state.
            self._bar[0].refresh()
            self._bar[0].stop()
            self._bar = None

    def _fields(self, metrics: StepMetrics) -> dict[str, str]:
        elapsed = self._times[-1] - self._times[0]
        rate = (len(self._times) - 1) / elapsed if elapsed > 0 else 0.0
        left = None
        if self._total is not None:
            left = (self._total - metrics.step) / rate if rate > 0 else 0.0
        peak = metrics.host_peak if metrics.device_peak is None else metrics.device_peak
        # Without skipped steps, whose NaN or infinite losses would hide all others.
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        return {
            "loss": f"{sum(finite) / len(finite) if finite else math.nan:.4f}",
            "lr": f"{metrics.lr:.2e}",
            "rate": f"{rate:.2f}",
            "peak": format_size(peak),
            "eta": "-" if left is None else format_seconds(left),
        }


def _start_bar(console: Console, *, done: int, total: int | None) -> tuple[Any, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    texts = [
        TextColumn(field.replace("{", "{task.fields[").replace("}", "]}")) for field in _BAR_FIELDS
    ]
    bar = Progress(BarColumn(), MofNCompleteColumn(), *texts, console=console)
    empty: dict[str, Any] = dict.fromkeys(("loss", "lr", "rate", "peak", "eta"), "-")
    task = bar.add_task("training", total=total, completed=done, **empty)
    bar.start()
    return bar, task
