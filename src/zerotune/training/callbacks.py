"""What a trainer tells whoever wants to know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zerotune.training.metrics import StepMetrics
    from zerotune.training.trainer import Trainer


class Callback:
    """Base class whose methods do nothing; override those of interest.

    Every rank calls every callback, so collective work (``trainer.save``, ``trainer.sample``) is
    safe in them, and output belongs on rank 0: ``if trainer.is_main``.
    """

    def on_fit_start(self, trainer: Trainer, *, steps: int | None) -> None:
        """``fit`` begins; it goes on until optimizer step ``steps``, or ``None``: until stopped."""

    def on_step_end(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """One optimizer step is done, EMA included."""

    def on_stop(self, trainer: Trainer, reason: str) -> None:
        """``fit`` ends early: a signal, the time limit, or ``trainer.request_stop``."""

    def on_finish(self, trainer: Trainer) -> None:
        """``fit`` has reached its goal."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """``fit`` ends, also when it raises."""

    def on_close(self, trainer: Trainer) -> None:
        """The trainer is closed."""

    def on_save(self, trainer: Trainer, path: Path) -> None:
        """A checkpoint has been written to ``path``."""

    def on_resume(self, trainer: Trainer, path: Path) -> None:
        """The checkpoint at ``path`` has been loaded; also when a bad step made ``fit`` go back."""

    def on_values(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Somebody measured something at this step, such as a validation loss."""

    def on_images(self, trainer: Trainer, name: str, images: torch.Tensor) -> None:
        """Somebody drew images (n, c, h, w) in [-1, 1] at this step, such as for validation."""
