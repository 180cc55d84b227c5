"""What a run tells callbacks of itself, each step's metrics first; ``RunView`` is the trainer."""

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

    from zerotune.training.trainer import RunView as RunView  # noqa: PLC0414 - for callbacks


PHASES: Final = ("data", "forward", "backward", "optimizer", "ema")
"""What the time of a step is split into."""


@attrs.frozen(kw_only=True)
class StepMetrics:
    """What one optimizer step did. Times and memory are this rank's, all else is everyone's."""

    step: int
    """Optimizer steps taken, this one included."""
    loss: float
    """Mean over the ranks and over the accumulation window."""
    lr: float
    """Learning rate of the first group during this step."""
    grad_norm: float | None
    """Global L2 norm of the unclipped gradient; ``None`` where the engine does not compute it."""
    applied: bool
    """Whether the weights changed: ``False`` when the fp16 loss scale overflowed."""
    samples: int
    """Samples all ranks have seen since the run began."""
    seconds: float
    """Wall-clock time of the step."""
    phases: Mapping[str, float]
    """Seconds spent on each of ``PHASES``."""
    host_peak: int
    """Most RAM this process has ever held, bytes."""
    device_peak: int | None
    """Most GPU memory this process has taken, context included, bytes; ``None`` without a GPU."""


class Callback:
    """Base class whose methods do nothing; override those of interest.

    Every rank calls every callback, so collective work (``trainer.save``, ``trainer.sample``) is
    safe in them, and output belongs on rank 0: ``if trainer.is_main``.
    """

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:
        """``fit`` begins; it goes on until optimizer step ``steps``, or ``None``: until stopped."""

    def on_step_end(self, trainer: RunView, metrics: StepMetrics) -> None:
        """One optimizer step is done, EMA included."""

    def on_stop(self, trainer: RunView, reason: str) -> None:
        """``fit`` ends early: a signal, the time limit, or ``trainer.request_stop``."""

    def on_finish(self, trainer: RunView) -> None:
        """``fit`` has reached its goal."""

    def on_fit_end(self, trainer: RunView) -> None:
        """``fit`` ends, also when it raises."""

    def on_close(self, trainer: RunView) -> None:
        """The trainer is closed."""

    def on_save(self, trainer: RunView, path: Path) -> None:
        """A checkpoint has been written to ``path``."""

    def on_resume(self, trainer: RunView, path: Path) -> None:
        """The checkpoint at ``path`` has been loaded; also when a bad step made ``fit`` go back."""

    def on_values(self, trainer: RunView, values: Mapping[str, float]) -> None:
        """Somebody measured something at this step, such as a validation loss."""

    def on_images(self, trainer: RunView, name: str, images: torch.Tensor) -> None:
        """Somebody drew images (n, c, h, w) in [-1, 1] at this step, such as for validation."""


# -- Metrics on disk: one line of JSON per optimizer step.


def as_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Check callbacks and return them as a tuple; a single callback is accepted as well.

    Raises:
        InvalidValueError: One has not every method of ``Callback``.
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
            f"has no {lacking[0]}" if lacking else "is a class",
            key="callbacks",
            value=name,
            fix="give objects of classes that inherit from zerotune.training.Callback"
            if lacking
            else f"make one of it: {name}(…)",
        )
    return given


class MetricsFile(Callback):
    """Appends every step's metrics to a JSON-lines file, on rank 0.

    After a resume the lines of steps that will be taken again are removed, so that the file
    holds each step once. A run that begins at step 0 renames the file of an earlier one to
    ``NAME.1``, ``NAME.2``, … and begins its own. A disk that is full or cannot be written costs
    a warning and the lines, not the run.

    Args:
        path: The file; its folder is made.

    Raises:
        InvalidValueError: When ``fit`` begins: the path holds something else than metrics.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: IO[str] | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:  # noqa: ARG002
        """Open the file."""
        if trainer.is_main:
            with system_errors(InvalidValueError, self._path, "is no place for metrics"):
                with suppress(OSError):  # Opening it says why.
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
        """Remove the steps that a run which went back will take again."""
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
                key="MetricsFile.path",
                before=str(self._path),
                after=None,
                reason=f"metrics cannot be written ({error.strerror or error}), so training goes "
                "on without them; free space or make the folder writable, and the next fit or "
                "resume writes again",
                severity="warning",
            )
            announce((lost,), rank=0)

    def _begin(self, step: int) -> None:
        # What cannot be set aside is not written to either: opening drops later steps.
        if step == 0:
            _set_aside(self._path)
        self._open(step)

    def _open(self, step: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            # Without later steps, and without a line that a killed run left half written.
            lines = [line for line, at in _whole_lines(self._path) if at <= step]
            content = "".join(f"{line}\n" for line in lines).encode()
            write_atomically(self._path.resolve(), content)
        # Line buffered: a killed run keeps its metrics.
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # What a full disk did not take is tried again here.
                file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[StepMetrics]:
    """Read what ``MetricsFile`` wrote.

    Raises:
        DataError: The file cannot be read, or a line is not what ``MetricsFile`` writes; the
            message names it.
    """
    with system_errors(DataError, path, "metrics cannot be read from it"):
        return [metrics for _, metrics in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[str, StepMetrics]]:
    try:
        lines = _text_of(path).splitlines()
    except UnicodeDecodeError as error:
        raise DataError(
            f"is not a metrics file: it is not UTF-8 ({error.reason})",
            key=str(path),
            fix="name the file that MetricsFile wrote",
        ) from error
    for number, line in enumerate(lines, start=1):
        try:
            fields: dict[str, Any] = json_of(line)
            yield line, StepMetrics(**fields)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"is not a line of metrics ({error})",
                key=f"{path}:{number}",
                value=line,
                fix="remove the line, or write to another file",
            ) from error


def _set_aside(path: Path) -> None:
    """Give the metrics of an earlier run another name: a new one begins at step 0."""
    if not path.exists() or not path.stat().st_size:
        return
    _whole_lines(path)  # Somebody else's file is refused, not renamed.
    numbers = itertools.count(1)
    while (aside := path.with_name(f"{path.name}.{next(numbers)}")).exists():
        pass
    path.rename(aside)
    kept = Decision(
        key="MetricsFile.path",
        before=str(path),
        after=str(aside),
        reason="it holds the steps of an earlier run and this one begins at step 0, so it was "
        "renamed; resume from a checkpoint to go on in it",
        severity="warning",
    )
    announce((kept,), rank=0)


_BEGINNING: Final = '{"step": '
"""Of every line of metrics."""


def _whole_lines(path: Path) -> list[tuple[str, int]]:
    """Lines and their steps, but for one that a killed run left half written."""
    try:
        text = _text_of(path)
    except UnicodeDecodeError as error:
        raise _not_metrics(path) from error
    end = text.rfind("\n") + 1
    half = text[end:].rstrip("\0")  # What a disk that lost its power may have put there.
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
        "holds something else than metrics, so it is not written to",
        key="MetricsFile.path",
        value=str(path),
        fix="name another file",
    )
