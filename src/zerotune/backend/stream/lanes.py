"""``Lane``: copies in one direction between host and device, in order, beside what computes.

A lane is a thread, since a copy may have to wait for a pass in host memory; on a device with
streams the thread only queues the copy on a stream of its own. Device memory belongs to the
computation's stream throughout: a copy begins after what that stream had queued when it was asked
for, and the computation waits for the copy before it uses the memory or gives it back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class Copy:
    """A copy that was asked for."""

    def __init__(self, lane: Lane, queued: Future[Any]) -> None:
        self._lane, self._queued = lane, queued

    def receive(self) -> None:
        """Have what is computed from here on see it.

        Raises:
            BaseException: What the copy, or what it waited for, failed with.
        """
        event = self._queued.result()
        if event is not None:
            self._lane.computation.wait_event(event)

    def finish(self) -> None:
        """Return once it is complete; for threads of the host.

        Raises:
            BaseException: As ``receive``.
        """
        event = self._queued.result()
        if event is not None:
            event.synchronize()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call once the lane is through with it, failed or not; at once where it is already."""
        self._queued.add_done_callback(lambda _: call())

    @property
    def is_done(self) -> bool:
        """Whether the lane is through with it."""
        return self._queued.done()


class Lane:
    """Copies in one direction, in the order they are asked for.

    Args:
        name: Of the thread.
        device: Where the model computes.
        streams: Has the device's streams; ``None``: the device is the host.
    """

    def __init__(self, name: str, *, device: torch.device, streams: Any = None) -> None:
        self._device, self._streams = device, streams
        self._stream = None if streams is None else streams.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"zerotune-{name}")
        self._lock = threading.Lock()

    @property
    def computation(self) -> Any:
        """The stream that what is computed in this thread is queued on."""
        return self._streams.current_stream(self._device)

    def submit(
        self,
        copy: Callable[[], object],
        *,
        wait: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
    ) -> Copy:
        """Ask for a copy.

        Args:
            copy: Makes it.
            wait: Called first; returns once the source may be read.
            then: Called in the lane's thread once the copy is complete.
        """
        ready = None if self._stream is None else self.computation.record_event()
        with self._lock:
            return Copy(self, self._thread.submit(self._run, copy, wait, then, ready))

    def _run(
        self,
        copy: Callable[[], object],
        wait: Callable[[], None] | None,
        then: Callable[[], None] | None,
        ready: Any,
    ) -> Any:
        if wait is not None:
            wait()
        event = self._queue(copy, ready)
        if then is not None:
            if event is not None:
                event.synchronize()
            then()
        return event

    def _queue(self, copy: Callable[[], object], ready: Any) -> Any:
        """Make the copy, or queue it; the event that is reached when it is complete."""
        with torch.no_grad():
            if self._stream is None:
                copy()
                return None
            with self._streams.stream(self._stream):
                self._stream.wait_event(ready)
                copy()
                return self._stream.record_event()

    def close(self) -> None:
        """End the thread once its copies are made."""
        self._thread.shutdown()
