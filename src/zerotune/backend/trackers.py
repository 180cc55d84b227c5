"""Experiment trackers (TensorBoard, wandb, …) through accelerate's, for one process."""

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
"""Trackers that take texts; the others fail or drop them."""
_TRACKER_PACKAGES: Final = {"comet_ml": "comet-ml"}


class Tracker:
    """One of accelerate's; a failure of its service ends the tracking, not the training."""

    def __init__(self, inner: Any) -> None:
        self._inner: Any = inner
        self.name: str = inner.name

    def values(self, values: Mapping[str, float], *, step: int) -> None:
        """Log numbers."""
        self._try(lambda inner: inner.log(dict(values), step=step))

    def text(self, name: str, text: str, *, step: int) -> None:
        """Log a text, where the tracker takes texts."""
        if self.name in _TEXT:
            # TensorBoard shows Markdown; indented, the lines stay as they are.
            shown = "\n".join(f"    {line}" for line in text.splitlines())
            self._try(lambda inner: inner.log({name: shown}, step=step))

    def settings(self, values: Mapping[str, Scalar]) -> None:
        """Log hyper-parameters, once per run."""
        self._try(lambda inner: inner.store_init_configuration(dict(values)))

    def images(self, name: str, images: torch.Tensor, *, step: int) -> None:
        """Log images, uint8 (n, h, w, c), where the tracker takes images."""
        array = images.numpy()
        if self.name == "tensorboard":
            self._try(lambda inner: inner.log_images({name: array}, step=step, dataformats="NHWC"))
        elif hasattr(self._inner, "log_images"):
            self._try(lambda inner: inner.log_images({name: list(array)}, step=step))

    def close(self) -> None:
        """End the run. May be repeated."""
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
                "%s fails and is left out from here on (%s: %s)",
                self.name, type(error).__name__, error,
            )  # fmt: skip


def start_trackers(
    wanted: Sequence[Any],
    *,
    project: str,
    folder: str | os.PathLike[str],
    options: Mapping[str, Mapping[str, Any]],
) -> tuple[Tracker, ...]:
    """Start trackers in this process.

    Args:
        wanted: accelerate's names of them, or ``accelerate.tracking.GeneralTracker`` objects.
        project: The run's or project's name.
        folder: For those that write files.
        options: Arguments of each tracker, by name: ``{"wandb": {"mode": "offline"}}``.
    """
    require_accelerate()
    from accelerate import tracking

    # accelerate's own adapter refuses every message before an Accelerator exists, and making its
    # state sets RANK, threads and devices for the whole process, which belong to the engine.
    if not isinstance(tracking.logger, _Messages):
        tracking.logger = _Messages(logging.getLogger("accelerate.tracking"), {})
    started: list[Tracker] = []
    try:
        for each in wanted:
            inner = each
            if isinstance(each, str):
                inner = _make_tracker(tracking, each, project, folder, options)
            # Only one process has it; asking accelerate which one would start its state.
            inner.main_process_only = False
            try:
                inner.start()
            except Exception as error:
                raise TrainingError(
                    f"could not be started ({type(error).__name__}: {error})",
                    key=f"trackers.{inner.name}",
                    fix="log in to its service, use its offline mode, or leave it out",
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
            f"accelerate knows {', '.join(sorted(known))}", key="trackers", value=name
        )
    if name not in [str(kind) for kind in tracking.get_available_trackers()]:
        raise MissingDependencyError(
            "is not installed", key=name, fix=f"pip install {_TRACKER_PACKAGES.get(name, name)}"
        )
    places = {"logging_dir": os.fspath(folder)} if known[name].requires_logging_directory else {}
    return known[name](project, **places, **options.get(name, {}))


class _Messages(logging.LoggerAdapter[logging.Logger]):
    """accelerate's messages through Python's logging alone."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("main_process_only", None)
        kwargs.pop("in_order", None)
        super().log(level, msg, *args, **kwargs)

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        self.warning(msg, *args, **kwargs)
