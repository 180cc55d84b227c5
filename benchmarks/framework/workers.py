"""Contestants that need a process of their own, and the memory they take."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import override

_PRELOAD = "benchmarks.framework.preload"


class WorkerError(RuntimeError):
    """A worker raised or died; holds its traceback."""


class Worker:
    """An object that lives in a fresh process and is called from this one.

    Two engines cannot share a process, and the memory of one is only its own in its own process.
    Several workers live at once and are called in turns, so that rounds alternate::

        with Worker(ZerotuneLoop, settings) as ours, Worker(DeepSpeedLoop, settings) as theirs:
            samples = alternate(
                {"zerotune": lambda: ours.call("steps", 4),
                 "DeepSpeed": lambda: theirs.call("steps", 4)},
                rounds=20,
            )

    Args:
        make: A class or function at module level; called in the process with ``arguments``. A
            ``close`` method of what it gives is called at the end.
        arguments: Picklable.
        environment: Set in the process before ``make`` is called.
        timeout_s: Seconds after which a call has failed.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        context = self._context()
        self._timeout = timeout_s
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, make, arguments, dict(environment or {})), daemon=True
        )
        self._process.start()
        theirs.close()
        self._waiting = True

    @staticmethod
    def _context() -> Any:
        if "forkserver" not in multiprocessing.get_all_start_methods():
            return multiprocessing.get_context("spawn")
        # Libraries are imported once, not once per worker.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PRELOAD])
        return context

    @property
    def pid(self) -> int:
        """The process."""
        return int(self._process.pid or 0)

    def ready(self) -> None:
        """Wait until the object is made.

        Raises:
            WorkerError: It could not be made.
        """
        if self._waiting:
            self._waiting = False
            self._answer("starting")

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the object and wait for what it returns.

        Raises:
            WorkerError: It raised, the process died, or the time is up.
        """
        self.ready()
        self._pipe.send((method, arguments, named))
        return self._answer(method)

    def peak(self, method: str, *arguments: Any, **named: Any) -> tuple[Any, int]:
        """As ``call``, with the most anonymous memory of the process meanwhile, bytes."""
        self.ready()
        with AnonPeak(self.pid) as memory:
            answer = self.call(method, *arguments, **named)
        return answer, memory.peak

    def close(self) -> None:
        """End the process. May be repeated."""
        if self._process.is_alive():
            try:
                self._pipe.send(None)
                self._process.join(30)
            except OSError:  # It died.
                pass
            if self._process.is_alive():
                self._process.kill()
            self._process.join(10)
        self._pipe.close()

    def _answer(self, what: str) -> Any:
        try:
            if not self._pipe.poll(self._timeout):
                raise WorkerError(f"{what}: no answer within {self._timeout:g} s")
            well, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(10)
            code = self._process.exitcode
            raise WorkerError(f"{what}: the process died with exit code {code}") from error
        if not well:
            raise WorkerError(f"{what}:\n{value}")
        return value

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class FreshWorker(Worker):
    """A worker that imports everything itself, as a script does: nobody else has used its heap."""

    @staticmethod
    @override
    def _context() -> Any:
        return multiprocessing.get_context("spawn")


def _serve(
    pipe: Any, make: Callable[..., Any], arguments: tuple[Any, ...], variables: dict[str, str]
) -> None:
    os.environ.update(variables)
    made: Any = None
    try:
        made = make(*arguments)
        pipe.send((True, None))
        while (asked := pipe.recv()) is not None:
            method, positional, named = asked
            pipe.send((True, getattr(made, method)(*positional, **named)))
    except EOFError:  # The parent has gone.
        pass
    except BaseException:  # noqa: BLE001 - reported to the parent, whatever it is
        pipe.send((False, traceback.format_exc()))
    close = getattr(made, "close", None)
    if close is not None:
        close()
    pipe.close()
    # Skips atexit handlers of libraries that expect their own launcher.
    os._exit(0)


def anon_bytes(pid: int | None = None) -> int:
    """Anonymous memory a process holds: its own data, no files and no shared memory."""
    path = Path("/proc", str(pid or os.getpid()), "statm")
    if path.exists():
        _, resident, shared, *_ = path.read_text().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
    import psutil

    return int(psutil.Process(pid).memory_info().rss)


class AnonPeak:
    """Watches the anonymous memory of a process from a thread of this one.

    The kernel keeps no peak of it, and the peak it keeps counts every file that was mapped. A
    peak shorter than the interval may be missed.

    Args:
        pid: The process.
        interval: Seconds between looks.
    """

    def __init__(self, pid: int, *, interval: float = 0.002) -> None:
        self._pid, self._interval = pid, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before = anon_bytes(pid)
        """Bytes at the start."""
        self.peak = self.before
        """Most bytes seen."""

    @property
    def growth(self) -> int:
        """Bytes of the peak above the start."""
        return self.peak - self.before

    def __enter__(self) -> AnonPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self._look()

    def _look(self) -> None:
        try:
            self.peak = max(self.peak, anon_bytes(self._pid))
        except (OSError, ValueError):  # The process has gone.
            self._stop.set()


def device_bytes() -> dict[str, float]:
    """Peaks of this process's GPU memory as torch knows them; empty without a GPU.

    ``allocated_bytes`` is what tensors took, ``reserved_bytes`` what other processes could not
    have, without the CUDA context.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    return {
        "allocated_bytes": float(torch.cuda.max_memory_allocated()),
        "reserved_bytes": float(torch.cuda.max_memory_reserved()),
    }
