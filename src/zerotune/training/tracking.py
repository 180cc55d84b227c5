"""Send a run's metrics, images and decisions to TensorBoard, wandb and other trackers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zerotune.backend.distributed import together
from zerotune.backend.trackers import Scalar, Tracker, start_trackers
from zerotune.decisions import render_decisions
from zerotune.errors import InvalidValueError
from zerotune.training.events import Callback

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from zerotune.training.events import StepMetrics
    from zerotune.training.view import RunView


class Trackers(Callback):
    """Logs a run to experiment trackers from rank 0, through accelerate.

    Trackers receive loss, learning rate, gradient norm, speed, phase times, memory and validation
    results. The resolved plan is logged as hyper-parameters, and all decisions are logged as text.
    Several calls of ``fit`` are logged as one run, because trackers stay open until the trainer is
    closed::

        Trainer(..., callbacks=[Trackers("tensorboard", folder="runs", project="digits")])

    A tracker that fails is disabled with a warning.

    Args:
        trackers: accelerate's names for trackers, such as ``"tensorboard"``, ``"wandb"`` and
            ``"mlflow"``, or ``accelerate.tracking.GeneralTracker`` objects.
        project: Name of the project or run.
        folder: Folder for trackers that write files.
        every: Optimizer steps between two log entries.
        options: Arguments for each tracker by name: ``{"wandb": {"mode": "offline"}}``.

    Raises:
        InvalidValueError: No tracker is given, or ``every`` is below 1.
    """

    def __init__(
        self,
        *trackers: Any,
        project: str = "zerotune",
        folder: str | os.PathLike[str] = "runs",
        every: int = 1,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        if not trackers or every < 1:
            raise InvalidValueError(
                "needs at least one tracker, and every= must be 1 or more",
                'write Trackers("tensorboard", every=10)',
                "Trackers",
                (trackers, every),
            )
        self._wanted, self._project, self._folder = trackers, project, folder
        self._every, self._options = every, dict(options or {})
        self._running: tuple[Tracker, ...] | None = None

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:  # noqa: ARG002
        """Start the trackers when ``fit`` is called for the first time."""
        if self._running is not None:
            return
        # Only rank 0 starts trackers; if that fails, the other ranks must not continue.
        self._running = ()
        together(trainer.engine.group, "start the trackers", lambda: self._start(trainer))
        for tracker in self._mine(trainer):
            tracker.settings(_hyperparameters(trainer))
            tracker.text("run/plan", trainer.explain(), step=trainer.step)
        self._tell_decisions(trainer)

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:
        """Log the step's metrics."""
        if metrics.step % self._every == 0:
            for tracker in self._mine(trainer):
                tracker.values(_step_values(trainer, metrics), step=metrics.step)

    def on_values(self, trainer: RunView, values: Mapping[str, float]) -> None:
        """Log measured values."""
        for tracker in self._mine(trainer):
            tracker.values(values, step=trainer.step)

    def on_images(self, trainer: RunView, name: str, images: torch.Tensor) -> None:
        """Log sampled images."""
        for tracker in self._mine(trainer):
            tracker.images(name, _pixels(images), step=trainer.step)

    def on_resume(self, trainer: RunView, path: Path) -> None:  # noqa: ARG002
        """Log the decisions made when resuming."""
        self._tell_decisions(trainer)

    def on_fit_end(self, trainer: RunView) -> None:
        """Log decisions made during the run."""
        self._tell_decisions(trainer)

    def on_close(self, trainer: RunView) -> None:
        """Close the trackers."""
        for tracker in self._mine(trainer):
            tracker.close()
        self._running = None

    def _start(self, trainer: RunView) -> None:
        if trainer.is_main:
            self._running = start_trackers(
                self._wanted, project=self._project, folder=self._folder, options=self._options
            )

    def _mine(self, trainer: RunView) -> Iterator[Tracker]:
        if trainer.is_main:
            yield from self._running or ()

    def _tell_decisions(self, trainer: RunView) -> None:
        decisions = trainer.engine.decisions + trainer.decisions
        for tracker in self._mine(trainer):
            tracker.text("run/decisions", render_decisions(decisions), step=trainer.step)


def _step_values(trainer: RunView, metrics: StepMetrics) -> dict[str, float]:
    seconds = metrics.seconds
    values: dict[str, float | None] = {
        "train/loss": metrics.loss,
        "train/lr": metrics.lr,
        "train/grad_norm": metrics.grad_norm,
        "train/applied": float(metrics.applied),
        "speed/seconds_per_step": seconds,
        "speed/samples_per_second": trainer.engine.plan.train_batch_size / seconds
        if seconds > 0
        else None,
        "memory/host_peak_gib": metrics.host_peak / 2**30,
        "memory/device_peak_gib": None
        if metrics.device_peak is None
        else metrics.device_peak / 2**30,
        **{f"time/{phase}": spent for phase, spent in metrics.phases.items()},
    }
    return {name: value for name, value in values.items() if value is not None}


def _hyperparameters(trainer: RunView) -> dict[str, Scalar]:
    plan = trainer.engine.plan
    settings: dict[str, Scalar | None] = {
        "model": type(trainer.engine.module).__name__,
        "objective": type(trainer.objective).__name__,
        "engine": type(trainer.engine).__name__,
        "stage": plan.stage,
        "offload_optimizer": plan.offload_optimizer,
        "offload_param": plan.offload_param,
        "precision": plan.precision,
        "world_size": plan.world_size,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "train_batch_size": plan.train_batch_size,
        "gradient_clipping": float(plan.gradient_clipping),
        "optimizer": plan.optimizer.implementation,
        "lr": plan.optimizer.lr,
        "scheduler": plan.scheduler.name if plan.scheduler else None,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _pixels(images: torch.Tensor) -> torch.Tensor:
    """(n, c, h, w) in [-1, 1] as uint8 (n, h, w, c); of clips (n, c, f, h, w) the middle frame."""
    if images.ndim == 5:
        images = images[:, :, images.shape[2] // 2]
    scaled = (images.detach().float().cpu().clamp(-1, 1) + 1) * 127.5
    return scaled.round().byte().permute(0, 2, 3, 1).contiguous()
