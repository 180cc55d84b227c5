"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

PHASES: Final = ("data", "forward", "backward", "optimizer", "ema")


class StepClock:
    """Splits a step into phases.

    On a GPU the host runs ahead of the device, so events on the device's stream are timed; they
    cost no synchronisation until ``finish``.

    Args:
        device: Where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._host: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._started = time.perf_counter()
        self.current: str | None = None
        """The phase under way; stays where it is when that raises. ``None``: none, or between."""

    def start(self) -> None:
        """A step begins."""
        self._host = dict.fromkeys(PHASES, 0.0)
        self._events = []
        self.current = None
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside; may be entered many times per step."""
        self.current = name
        # Reading data is the host's work; on the device's stream it would look like waiting.
        if self._on_cuda and name != "data":
            begin, end = _event(), _event()
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            self.current = None
            return
        begun = time.perf_counter()
        yield
        self._host[name] += time.perf_counter() - begun
        self.current = None

    def finish(self) -> tuple[float, dict[str, float]]:
        """Seconds of the whole step, and of each phase."""
        if self._events:
            self._events[-1][2].synchronize()
        for name, begin, end in self._events:
            self._host[name] += begin.elapsed_time(end) / 1000
        return time.perf_counter() - self._started, dict(self._host)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
