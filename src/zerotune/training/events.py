"""Callbacks and the events they receive, such as the metrics of each step."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import attrs

from zerotune._util.files import reading_regular, system_errors, write_atomically
from zerotune._util.text import json_of
from zerotune.decisions import Decision, announce
from zerotune.errors import DataError, InvalidValueError

if TYPE_CHECKING:
    import torch

    from zerotune.training.view import RunView


PHASES: Final = ("data", "forward", "backward", "optimizer", "ema")
"""Phases into which the time of a step is divided."""


@attrs.frozen(kw_only=True)
class StepMetrics:
    """Metrics of one step. Times and memory are this rank's; all other values are global."""

    step: int
    """Number of optimizer steps taken, including this step."""
    loss: float
    """Loss of the step, averaged over all ranks and micro batches."""
    lr: float
    """Learning rate of the first parameter group during this step."""
    grad_norm: float | None
    """Global L2 norm of the unclipped gradient; ``None`` if the engine computes no norm."""
    applied: bool
    """Whether the weights changed; ``False`` if the step was skipped, as after an fp16 overflow."""
    samples: int
    """Number of samples that all ranks have processed since the run began."""
    seconds: float
    """Wall-clock time of the step in seconds."""
    phases: Mapping[str, float]
    """Seconds per phase in ``PHASES``."""
    host_peak: int
    """Peak RAM of this process in bytes."""
    device_peak: int | None
    """Peak GPU memory of this process in bytes, including the CUDA context; ``None`` without a
    GPU."""


class Callback:
    """Base class of callbacks; its methods do nothing unless a subclass overrides them.

    Every rank calls every callback, so callbacks may call collective methods such as
    ``trainer.save`` and ``trainer.sample``. Print only on rank 0: ``if trainer.is_main``.
    """

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:
        """Called when ``fit`` begins.

        Args:
            trainer: The trainer that runs ``fit``.
            steps: Optimizer step at which training ends; ``None`` if only a time limit is given.
        """

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:
        """Called after each optimizer step and its EMA update.

        Args:
            trainer: The trainer that took the step.
            metrics: Loss, learning rate, times and memory of the step.
        """

    def on_stop(self, trainer: RunView, reason: str) -> None:
        """Called when ``fit`` stops early because of a signal, a time limit or ``request_stop``.

        Args:
            trainer: The trainer that runs ``fit``.
            reason: Why ``fit`` stops, as in ``report.stopped``.
        """

    def on_finish(self, trainer: RunView) -> None:
        """Called when ``trainer.fit`` has taken its last step.

        Args:
            trainer: The trainer that runs ``fit``.
        """

    def on_fit_end(self, trainer: RunView) -> None:
        """Called when ``trainer.fit`` ends, even if ``fit`` raises an error.

        Args:
            trainer: The trainer that runs ``fit``.
        """

    def on_close(self, trainer: RunView) -> None:
        """Called when the trainer is closed.

        Args:
            trainer: The trainer.
        """

    def on_save(self, trainer: RunView, path: Path) -> None:
        """Called after a checkpoint was saved to the folder ``path``.

        Args:
            trainer: The trainer that saved.
            path: Folder of the checkpoint.
        """

    def on_resume(self, trainer: RunView, path: Path) -> None:
        """Called after ``resume`` or ``roll_back`` has loaded the checkpoint ``path``.

        Args:
            trainer: The trainer that was resumed.
            path: Folder of the checkpoint.
        """

    def on_values(self, trainer: RunView, values: Mapping[str, float]) -> None:
        """Called with values measured at the current step, such as a validation loss.

        Args:
            trainer: The trainer that runs ``fit``.
            values: Values by name.
        """

    def on_images(self, trainer: RunView, name: str, images: torch.Tensor) -> None:
        """Called with images that were sampled at the current step.

        Args:
            trainer: The trainer that sampled the images.
            name: Name under which the images are logged.
            images: Images (n, c, h, w), or clips (n, c, frames, h, w), in [-1, 1].
        """


# -- Metrics on disk: one line of JSON per optimizer step.


def as_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Check one or several callbacks, and return them as a tuple.

    Raises:
        InvalidValueError: An object lacks a method of ``Callback``, or is a class.
    """
    events = [name for name in vars(Callback) if name.startswith("on_")]
    several = isinstance(callbacks, Iterable) and not isinstance(callbacks, Callback)
    given = tuple(callbacks) if several else (callbacks,)
    for each in given:
        lacking = [name for name in events if not hasattr(each, name)]
        if not lacking and not isinstance(each, type):
            continue
        name = getattr(each, "__name__", type(each).__name__)
        raise InvalidValueError(
            f"has no method {lacking[0]}" if lacking else "is a class",
            "pass objects of classes that inherit from zerotune.training.Callback"
            if lacking
            else f"create an instance: {name}(…)",
            "callbacks",
            name,
        )
    return given


class MetricsFile(Callback):
    """Appends every step's metrics to a JSON-lines file, on rank 0.

    When a run resumes, the lines of steps that will be repeated are deleted, so the file contains
    each step once. If a run begins at step 0, an existing file is renamed to ``NAME.1``,
    ``NAME.2``, …. If the disk is full or read-only, a warning is logged, metrics are dropped and
    training continues.

    Args:
        path: Path of the file; a missing folder is created.

    Raises:
        InvalidValueError: The file at ``path`` exists when ``fit`` starts, but is not a metrics
            file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: IO[str] | None = None

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._path

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:  # noqa: ARG002
        """Open the file."""
        if trainer.is_main:
            with system_errors(InvalidValueError, self._path, "cannot be used as a metrics file"):
                with suppress(OSError):  # Opening it reports the error.
                    if self._path.exists() and not self._path.is_file():
                        raise _not_metrics(self._path)
                self._attempt(lambda: self._begin(trainer.step))

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:  # noqa: ARG002
        """Write one line."""
        file = self._file
        if file is not None:
            line = json.dumps(attrs.asdict(metrics)) + "\n"
            self._attempt(lambda: file.write(line))

    def on_resume(self, trainer: RunView, path: Path) -> None:  # noqa: ARG002
        """Delete the lines of steps that will be repeated."""
        if self._file is not None:
            self._close()
            self._attempt(lambda: self._open(trainer.step))

    def on_fit_end(self, trainer: RunView) -> None:  # noqa: ARG002
        """Close the file."""
        self._close()

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self._close()
            lost = Decision(
                "MetricsFile.path",
                str(self._path),
                None,
                f"metrics cannot be written ({error.strerror or error}), so training "
                "continues without a metrics file; free disk space or make the folder writable, "
                "and the next fit or resume writes metrics again",
                "warning",
            )
            announce((lost,), rank=0)

    def _begin(self, step: int) -> None:
        # If renaming fails, the file must not be opened, because opening drops later steps.
        if step == 0:
            _set_aside(self._path)
        self._open(step)

    def _open(self, step: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            # Drops later steps, and a partial line that a killed run has left.
            lines = [line for line, at in _whole_lines(self._path) if at <= step]
            content = "".join(f"{line}\n" for line in lines).encode()
            write_atomically(self._path.resolve(), content)
        # Line buffered: a killed run keeps its metrics.
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # Closing retries a write that failed on a full disk.
                file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[StepMetrics]:
    """Read ``path``, a file written by ``MetricsFile``.

    Raises:
        DataError: The file cannot be read, or a line is invalid; the message gives the line number.
    """
    with system_errors(DataError, path, "metrics cannot be read"):
        return [metrics for _, metrics in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[str, StepMetrics]]:
    try:
        lines = _text_of(path).splitlines()
    except UnicodeDecodeError as error:
        raise DataError(
            f"is not a metrics file: it is not UTF-8 ({error.reason})",
            "pass a file written by MetricsFile",
            str(path),
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            fields: dict[str, Any] = json_of(line)
            yield line, StepMetrics(**fields)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"is not a valid metrics line ({error})",
                "delete the line, or choose a different file for MetricsFile",
                f"{path}:{number}",
                line,
            ) from error


def _set_aside(path: Path) -> None:
    """Rename the metrics file of an earlier run, because a new run begins at step 0."""
    if not path.exists() or not path.stat().st_size:
        return
    _whole_lines(path)  # Rejects a file that contains no metrics.
    numbers = itertools.count(1)
    while (aside := path.with_name(f"{path.name}.{next(numbers)}")).exists():
        pass
    path.rename(aside)
    kept = Decision(
        "MetricsFile.path",
        str(path),
        str(aside),
        "this run begins at step 0, so the metrics file of an earlier run was renamed; "
        "to append to an earlier run's file, resume from a checkpoint",
        "warning",
    )
    announce((kept,), rank=0)


_BEGINNING: Final = '{"step": '
"""First characters of every metrics line."""


def _whole_lines(path: Path) -> list[tuple[str, int]]:
    """Return lines with their steps, without a partial line that a killed run has left."""
    try:
        text = _text_of(path)
    except UnicodeDecodeError as error:
        raise _not_metrics(path) from error
    end = text.rfind("\n") + 1
    half = text[end:].rstrip("\0")  # Zeros may follow a power failure.
    if half[: len(_BEGINNING)] != _BEGINNING[: len(half)]:
        raise _not_metrics(path)
    try:
        return [(line, int(json_of(line)["step"])) for line in text[:end].splitlines()]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise _not_metrics(path) from error


def _text_of(path: Path) -> str:
    with reading_regular(path) as file:
        return file.read().decode("utf-8")


def _not_metrics(path: Path) -> InvalidValueError:
    return InvalidValueError(
        "is not a metrics file, so it is not overwritten",
        "choose a different file name",
        "MetricsFile.path",
        str(path),
    )
