"""``Lane``: ordered copies between host and device in one direction, concurrent with computation.

A lane is a thread, because a copy may have to wait until weights are updated in host memory. On a
device with streams, the thread only queues the copy on a separate stream. A copy starts after all
work that was on the computation stream when the copy was requested. Computation waits for the copy
before using or freeing the copied memory. If the model computes in host memory, nothing is gained
by a thread, so gradients are copied in the calling one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch

from zerotune.errors import EngineError

_DONE: Final[Future[None]] = Future()
_DONE.set_result(None)


class Copy:
    """A requested copy.

    Args:
        lane: The lane.
        queued: Future whose result is an event that completes with the copy, or ``None``.
    """

    def __init__(self, lane: Lane, queued: Future[Any]) -> None:
        self._lane, self._queued = lane, queued

    def receive(self) -> None:
        """Make later computation wait for the copy.

        Raises:
            BaseException: The copy, or the update that it waited for, has failed.
        """
        event = self._result()
        if event is not None:
            self._lane.computation.wait_event(event)

    def finish(self) -> None:
        """Block the calling thread until the copy is complete.

        Raises:
            BaseException: The copy, or the update that it waited for, has failed.
        """
        event = self._result()
        if event is not None:
            event.synchronize()

    def _result(self) -> Any:
        if not self.is_done:
            check_process(self._lane.pid)
        return self._queued.result()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call a function once the lane has processed the copy, successfully or not.

        Args:
            call: The function; called at once if the copy has been processed already.
        """
        self._queued.add_done_callback(lambda _: call())

    @property
    def is_done(self) -> bool:
        """Whether the lane has processed the copy."""
        return self._queued.done()


class Lane:
    """A thread that copies in one direction, in the order of the requests.

    Args:
        name: Name of the thread.
        device: Device that the model computes on.
        streams: torch module with the device's streams; ``None`` if the device is the CPU.
        in_caller: Whether copies run in the calling thread, before ``submit`` returns.
    """

    def __init__(
        self, name: str, *, device: torch.device, streams: Any = None, in_caller: bool = False
    ) -> None:
        self._device, self._streams = device, streams
        self.pid = os.getpid()
        self._stream = None if streams is None else streams.Stream(device)
        self._in_caller = in_caller
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"zerotune-{name}")
        self._lock = threading.Lock()

    @property
    def is_on_host(self) -> bool:
        """Whether both ends of a copy are in host memory."""
        return self._streams is None

    @property
    def computation(self) -> Any:
        """The current stream of the calling thread, on which computation is queued."""
        return self._streams.current_stream(self._device)

    def submit(
        self,
        copy: Callable[[], object],
        *,
        wait: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
    ) -> Copy:
        """Request a copy.

        Args:
            copy: Function that performs the copy.
            wait: Function that is called before the copy; returns once the source may be read.
            then: Function that is called in the lane's thread once the copy is complete.
        """
        if self._in_caller:
            self._run(copy, wait, then, None)
            return Copy(self, _DONE)
        check_process(self.pid)
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
        """Perform or queue the copy; return an event that completes with it, or ``None``."""
        with torch.no_grad():
            if self._stream is None:
                copy()
                return None
            with self._streams.stream(self._stream):
                self._stream.wait_event(ready)
                copy()
                return self._stream.record_event()

    def wait_for_device(self) -> None:
        """Wait until the device has finished all queued work, of this and of other lanes."""
        if self._streams is not None:
            self._streams.synchronize(self._device)

    def close(self) -> None:
        """End the thread once all requested copies are done."""
        self._thread.shutdown()


def check_process(pid: int) -> None:
    """Check that this process has the threads that move and update an engine's weights.

    Args:
        pid: The process that started the engine; a fork of it has no threads.

    Raises:
        EngineError: This is a fork, which would wait for ever.
    """
    if os.getpid() != pid:
        raise EngineError(
            "a forked process, such as a worker of a DataLoader, cannot use weights that threads "
            "of the training process move and update",
            "use the model in the training process, for example with encode_dataset before "
            "training, or load a model of its own in the worker",
            "model",
            f"process {os.getpid()}, forked from {pid}",
        )
