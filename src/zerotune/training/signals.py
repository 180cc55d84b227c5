"""SIGINT and SIGTERM end a run in good order: finish the step, save, leave ``fit``."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from zerotune.checkpoint import step_folder
from zerotune.training.callbacks import Callback
from zerotune.training.saving import absolute

if TYPE_CHECKING:
    from zerotune.training.trainer import Trainer

_USUAL: Final = (signal.SIGINT, signal.SIGTERM)
_DEFAULTS: Final = (signal.SIG_DFL, signal.default_int_handler)


class StopOnSignals(Callback):
    """Turns a signal into ``trainer.request_stop``; every trainer has one.

    The step under way is finished, all ranks stop after the same one, also when only one of them
    got the signal, whoever saves checkpoints saves one, and ``fit`` returns, with the signal in
    ``report.stopped``. So the script goes on behind ``fit`` and ends with exit code 0. A second
    signal raises ``KeyboardInterrupt`` at once. The handlers of before come back after ``fit``.

    Outside of the main thread, where Python allows no handlers, it does nothing.

    Args:
        save_to: Saves ``save_to/step-…`` when stopped; for runs without ``SaveEvery``.
        signals: Which; SIGINT and SIGTERM when not given, as far as the script has not set
            handlers of its own. Empty: none.
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
        self._trainer: Trainer | None = None
        self._process = 0

    def on_fit_start(self, trainer: Trainer, *, steps: int | None) -> None:  # noqa: ARG002
        """Take over the signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._trainer, self._process, self._received = trainer, os.getpid(), None
        for number in self._wanted():
            self._former[number] = signal.signal(number, self._handle)

    def on_stop(self, trainer: Trainer, reason: str) -> None:  # noqa: ARG002
        """Save, unless somebody has."""
        self._received = None
        if self._save_to is None:
            return
        path = absolute(step_folder(self._save_to, trainer.step))
        if trainer.last_saved != (trainer.step, path):
            trainer.save(path)

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Give the signals back; one that came too late for ``fit`` is sent again."""
        while self._former:
            signal.signal(*self._former.popitem())
        self._trainer = None
        late, self._received = self._received, None
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
        # Workers that read data inherit the handler when they are forked. A terminal sends
        # SIGINT to them too, and they must live until the step is finished; anything else must
        # end them, as their parent expects.
        if number == signal.SIGINT:
            return
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def with_signals(callbacks: tuple[Callback, ...]) -> tuple[Callback, ...]:
    """These and, unless one is among them, a ``StopOnSignals`` behind them.

    Behind, so that a signal during the others' ``on_fit_end`` still waits for their work.
    """
    if any(isinstance(callback, StopOnSignals) for callback in callbacks):
        return callbacks
    return (*callbacks, StopOnSignals())
