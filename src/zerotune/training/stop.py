"""Conditions that end ``fit``: its goal, a signal or a request."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune._util.text import positive, whole
from zerotune.checkpoint.folders import step_folder
from zerotune.decisions import Decision, announce
from zerotune.errors import DataError, InvalidValueError
from zerotune.offload.lease import give_back, holds_folders
from zerotune.training.events import Callback
from zerotune.training.save import is_saved

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup
    from zerotune.backend.engine import Engine
    from zerotune.training.view import RunView


_USUAL: Final = (signal.SIGINT, signal.SIGTERM)
_ENDS_PROCESS: Final = (signal.SIG_DFL, give_back)
_DEFAULTS: Final = (signal.default_int_handler, *_ENDS_PROCESS)


class StopOnSignals(Callback):
    """Callback that stops ``fit`` when the process receives a signal; every trainer has one.

    All ranks finish the current step and stop together, even if only one rank receives the signal.
    Every checkpoint callback saves once, and ``fit`` returns with the signal's name in
    ``report.stopped``. The script then continues after ``fit``. A second signal raises
    ``KeyboardInterrupt`` at once. When ``fit`` ends, the previous signal handlers are restored.

    Outside the main thread, where Python allows no signal handlers, the callback has no effect.

    Args:
        save_to: Folder in which a checkpoint ``step-…`` is saved after a stop, for runs without
            ``SaveEvery``.
        signals: Signals to handle; an empty sequence handles none. The default is SIGINT and
            SIGTERM, except a signal for which the script has installed its own handler.
    """

    def __init__(
        self,
        *,
        save_to: str | os.PathLike[str] | None = None,
        signals: Iterable[int] | None = None,
    ) -> None:
        self._save_to = None if save_to is None else Path(save_to)
        self._signals = None if signals is None else tuple(signals)
        self._former: dict[int, Any] = {}
        self._received: int | None = None
        self._trainer: RunView | None = None
        self._process = 0

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:  # noqa: ARG002
        """Install the signal handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._trainer, self._process, self._received = trainer, os.getpid(), None
        for number in self._wanted():
            self._former[number] = signal.signal(number, self._handle)

    def on_stop(self, trainer: RunView, reason: str) -> None:  # noqa: ARG002
        """Save to ``save_to``, unless a checkpoint of the current step is already there."""
        self._received = None
        if self._save_to is not None and not is_saved(trainer, self._save_to):
            trainer.save(step_folder(self._save_to, trainer.step))

    def on_fit_end(self, trainer: RunView) -> None:  # noqa: ARG002
        """Restore the previous handlers, and resend any signal that arrived after the last step.

        After an error, a launcher's SIGTERM is not resent, so that the rank can still delete its
        swap folder.
        """
        failing = sys.exc_info()[1] is not None
        late, self._received = self._received, None
        while self._former:
            number, former = self._former.popitem()
            ends_it = failing and former in _ENDS_PROCESS and holds_folders()
            if ends_it and number == late:
                late = None
            signal.signal(number, give_back if ends_it else former)
        self._trainer = None
        if late is not None:
            signal.raise_signal(late)

    def _wanted(self) -> tuple[int, ...]:
        if self._signals is not None:
            return self._signals
        return tuple(number for number in _USUAL if signal.getsignal(number) in _DEFAULTS)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._handle_in_child(number)
            return
        if self._received is not None or self._trainer is None:
            self._received = None
            raise KeyboardInterrupt(signal.Signals(number).name)
        self._received = number
        self._trainer.request_stop(f"signal {signal.Signals(number).name}")

    def _handle_in_child(self, number: int) -> None:
        # Forked data workers inherit the handler. A terminal sends SIGINT to them too, and they
        # must live until the step is finished; any other signal must end them, as their parent
        # expects.
        if number == signal.SIGINT:
            return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def with_signals(callbacks: tuple[Callback, ...]) -> tuple[Callback, ...]:
    """Append a ``StopOnSignals`` unless one is present.

    Because ``StopOnSignals`` is the last callback, a signal does not interrupt the ``on_fit_end``
    of other callbacks.
    """
    if any(isinstance(callback, StopOnSignals) for callback in callbacks):
        return callbacks
    return (*callbacks, StopOnSignals())


# -- Goals and requests.


@attrs.frozen(kw_only=True)
class Goal:
    """When training ends."""

    last_step: int | None
    """Last optimizer step; ``None`` if only a time limit is given."""
    seconds: float | None
    """Time limit in seconds from the start of ``fit``; ``None`` without a time limit."""

    @classmethod
    def of(
        cls,
        engine: Engine,
        stream: Any,
        *,
        steps: int | None,
        epochs: float | None,
        time_limit: float | timedelta | None,
    ) -> Goal:
        """Build the goal from the arguments of ``fit``.

        Args:
            engine: Engine of the run.
            stream: Stream of micro batches.
            steps: Optimizer step at which training ends.
            epochs: Number of passes over the data; converted to the step at which training ends.
            time_limit: Time limit in seconds or as a ``timedelta``.
        """
        if steps is None and epochs is None and time_limit is None:
            raise InvalidValueError(
                "no limit is given",
                "call fit(steps=1000), fit(epochs=3) or fit(time_limit=timedelta(hours=8))",
                "fit",
            )
        if isinstance(time_limit, timedelta):
            time_limit = time_limit.total_seconds()
        if steps is not None:
            asked: Any = steps  # Accepts 1e4.
            asked = int(asked) if isinstance(asked, float) and asked.is_integer() else asked
            whole(asked, key="fit(steps)", least=0)
        for value, key in ((epochs, "fit(epochs)"), (time_limit, "fit(time_limit)")):
            if value is not None:
                positive(value, key=key)
        ends = [] if steps is None else [steps]
        if epochs is not None:
            ends.append(_step_of_epoch(epochs, engine=engine, stream=stream))
        return cls(last_step=min(ends, default=None), seconds=time_limit)

    def reached(self, step: int) -> bool:
        """Return whether the run has taken its last step."""
        return self.last_step is not None and step >= self.last_step


class Stopping:
    """Requests to stop ``fit`` early; a request from one rank stops all ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._request: str | None = None
        self._deadline: float | None = None
        self._limit = 0.0
        self.reason: str | None = None
        """Why the latest ``fit`` ended early; ``None`` if it reached its goal."""

    def begin(self, goal: Goal) -> None:
        """Clear earlier stop requests, and start the clock for the time limit."""
        self._request = self.reason = None
        self._limit = goal.seconds or 0.0
        self._deadline = None if goal.seconds is None else time.monotonic() + goal.seconds

    def request(self, reason: str) -> None:
        """Request a stop before the next step. Not collective; safe in a signal handler.

        Args:
            reason: Why ``fit`` stops; only the first request's reason is reported.
        """
        self._request = self._request or reason

    def agreed(self) -> bool:
        """Return whether any rank requested a stop, and set ``reason``. Collective."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        mine = self._request or (f"time limit of {self._limit:g} s" if late else None)
        if not self._group.any(mine is not None):
            return False
        each = self._group.gather(mine)
        reasons = []
        for reason in dict.fromkeys(each):
            ranks = [str(rank) for rank, given in enumerate(each) if given == reason]
            where = "" if len(ranks) == len(each) else f" on rank {', '.join(ranks)}"
            if reason is not None:
                reasons.append(reason + where)
        self.reason = "; ".join(reasons)
        return True

    def decisions(
        self, step: int, last_saved: tuple[int, Path] | None, goal: Goal
    ) -> tuple[Decision, ...]:
        """Log the early stop on rank 0, and return it as a decision.

        Args:
            step: The last optimizer step taken.
            last_saved: Step and folder of the latest checkpoint.
            goal: Last step and time limit of ``fit``.
        """
        saved = last_saved is not None and last_saved[0] == step
        what = (
            "a checkpoint was saved"
            if saved
            else "no checkpoint was saved; add SaveEvery or StopOnSignals(save_to=...)"
        )
        decision = Decision(
            "fit.last_step",
            goal.last_step,
            step,
            f"stopped early: {self.reason}; {what}",
            "note" if saved else "warning",
        )
        announce((decision,), rank=self._group.rank)
        return (decision,)


def _step_of_epoch(epochs: float, *, engine: Engine, stream: Any) -> int:
    if not hasattr(stream, "steps_per_epoch"):
        raise DataError(
            f"{type(stream).__name__} has no epoch length",
            "pass a dataset with __len__ and __getitem__, or call fit(steps=...)",
            "fit(epochs)",
            epochs,
        )
    windows = (epochs - stream.epoch) * stream.steps_per_epoch
    # Rounding errors must not add a step to a whole number of epochs (0.1 + 0.2 != 0.3).
    left: int = math.ceil(round(windows / engine.plan.gradient_accumulation_steps, 9))
    return engine.state.global_step + max(0, left)
