"""Experiment trackers (TensorBoard, wandb, …) through accelerate, in one process."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from zerotune.backend.upstream import require_accelerate
from zerotune.errors import InvalidValueError, MissingDependencyError, TrainingError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("zerotune")

Scalar: TypeAlias = "str | int | float | bool"

_TEXT: Final = ("tensorboard", "wandb", "comet_ml", "trackio", "swanlab")
"""Trackers that support texts; all others fail or ignore texts."""
_TRACKER_PACKAGES: Final = {"comet_ml": "comet-ml"}


class Tracker:
    """Wrapper around an accelerate tracker; an error disables the tracker, and training continues.

    Args:
        inner: accelerate's tracker.
    """

    def __init__(self, inner: Any) -> None:
        self._inner: Any = inner
        self.name: str = inner.name

    def values(self, values: Mapping[str, float], *, step: int) -> None:
        """Log numbers.

        Args:
            values: Numbers by name.
            step: Optimizer step.
        """
        self._try(lambda inner: inner.log(dict(values), step=step))

    def text(self, name: str, text: str, *, step: int) -> None:
        """Log text, if the tracker supports it.

        Args:
            name: Name of the text.
            text: The text.
            step: Optimizer step.
        """
        if self.name in _TEXT:
            # TensorBoard renders Markdown; indentation keeps the lines unchanged.
            shown = "\n".join(f"    {line}" for line in text.splitlines())
            self._try(lambda inner: inner.log({name: shown}, step=step))

    def settings(self, values: Mapping[str, Scalar]) -> None:
        """Log hyperparameters; call this once per run.

        Args:
            values: Hyperparameters by name.
        """
        self._try(lambda inner: inner.store_init_configuration(dict(values)))

    def images(self, name: str, images: torch.Tensor, *, step: int) -> None:
        """Log images, if the tracker supports them.

        Args:
            name: Name of the images.
            images: Images, uint8, of shape (n, h, w, c).
            step: Optimizer step.
        """
        array = images.numpy()
        if self.name == "tensorboard":
            self._try(lambda inner: inner.log_images({name: array}, step=step, dataformats="NHWC"))
        elif hasattr(self._inner, "log_images"):
            self._try(lambda inner: inner.log_images({name: list(array)}, step=step))

    def close(self) -> None:
        """End the tracker's run. Calling ``close`` again has no effect."""
        self._try(lambda inner: inner.finish())
        self._inner = None

    def _try(self, work: Any) -> None:
        if self._inner is None:
            return
        try:
            work(self._inner)
        except Exception as error:  # noqa: BLE001 - a service's own errors have no common base
            self._inner = None
            logger.warning(
                "%s failed and is disabled for the rest of the run (%s: %s)",
                self.name, type(error).__name__, error,
            )  # fmt: skip


def start_trackers(
    wanted: Sequence[Any],
    *,
    project: str,
    folder: str | os.PathLike[str],
    options: Mapping[str, Mapping[str, Any]],
) -> tuple[Tracker, ...]:
    """Start experiment trackers in this process.

    Args:
        wanted: accelerate's names for trackers, or ``accelerate.tracking.GeneralTracker`` objects.
        project: Name of the run or project.
        folder: Folder in which trackers write their files.
        options: Arguments for each tracker by name, such as ``{"wandb": {"mode": "offline"}}``.
    """
    require_accelerate()
    from accelerate import tracking

    # accelerate's adapter rejects every message before an Accelerator exists. Creating accelerate's
    # state would set RANK, threads and devices of the process, which the engine controls.
    if not isinstance(tracking.logger, _Messages):
        tracking.logger = _Messages(logging.getLogger("accelerate.tracking"), {})
    started: list[Tracker] = []
    try:
        for each in wanted:
            inner = each
            if isinstance(each, str):
                inner = _make_tracker(tracking, each, project, folder, options)
            # Only one process has the tracker anyway; accelerate's check would create accelerate's
            # state.
            inner.main_process_only = False
            try:
                inner.start()
            except Exception as error:
                raise TrainingError(
                    f"the tracker could not be started ({type(error).__name__}: {error})",
                    "log in to the tracker's service, use its offline mode, or remove the tracker",
                    f"trackers.{inner.name}",
                ) from error
            started.append(Tracker(inner))
    except BaseException:
        for tracker in started:
            tracker.close()
        raise
    return tuple(started)


def _make_tracker(
    tracking: Any,
    name: str,
    project: str,
    folder: str | os.PathLike[str],
    options: Mapping[str, Mapping[str, Any]],
) -> Any:
    known = {str(kind): maker for kind, maker in tracking.LOGGER_TYPE_TO_CLASS.items()}
    if name not in known:
        raise InvalidValueError(
            "accelerate has no tracker with this name",
            f"use one of {', '.join(sorted(known))}",
            "trackers",
            name,
        )
    if name not in [str(kind) for kind in tracking.get_available_trackers()]:
        raise MissingDependencyError(
            "is not installed", f"pip install {_TRACKER_PACKAGES.get(name, name)}", name
        )
    places = {"logging_dir": os.fspath(folder)} if known[name].requires_logging_directory else {}
    return known[name](project, **places, **options.get(name, {}))


class _Messages(logging.LoggerAdapter[logging.Logger]):
    """Send accelerate's messages to Python's logging, without accelerate's state."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("main_process_only", None)
        kwargs.pop("in_order", None)
        super().log(level, msg, *args, **kwargs)

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        self.warning(msg, *args, **kwargs)
