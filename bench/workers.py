"""Contestants in their own processes, and the memory they use."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import Self


class WorkerError(RuntimeError):
    """A worker raised or died; holds its traceback."""


class Worker:
    """Proxy of an object in a fresh process.

    Two engines cannot share a process, and only a separate process shows the memory of one. Several
    workers live at once and are called in turns.

    Args:
        make: A class or function at module level; called in the process with ``arguments``. The
            object's ``close`` method, if any, is called at the end.
        arguments: Picklable.
        environment: Set in the process before ``make`` is called.
        fresh: Import everything in the process, as a script does, so that its heap starts unused.
        patience_s: Seconds to wait for an answer.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
        patience_s: float = 600.0,
    ) -> None:
        self._patience_s = patience_s
        context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
        if not fresh:
            # The fork server imports libraries once for all workers.
            context.set_forkserver_preload(["bench.preload"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, make, arguments, dict(environment or {})), daemon=True
        )
        self._process.start()
        theirs.close()
        self._answer("starting")

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the object and return its result.

        Raises:
            WorkerError: The method raised, the process died, or there was no answer in time.
        """
        self._pipe.send((method, arguments, named))
        return self._answer(method)

    @staticmethod
    def call_all(workers: Sequence[Worker], method: str, *arguments: Any) -> list[Any]:
        """Call a method of several objects at once, and return their results."""
        for each in workers:
            each._pipe.send((method, arguments, {}))
        return [each._answer(method) for each in workers]

    def peak(self, method: str, *arguments: Any, **named: Any) -> tuple[Any, int]:
        """Call a method; return its result and the process's peak of anonymous memory, in bytes."""
        with AnonPeak(self.pid) as memory:
            answer = self.call(method, *arguments, **named)
        return answer, memory.peak

    def close(self) -> None:
        """End the process; may be called repeatedly."""
        if self._process.is_alive():
            try:
                self._pipe.send(None)
                self._process.join(30)
            except OSError:  # The process died.
                pass
            self._process.kill()
            self._process.join(10)
        self._pipe.close()

    def _answer(self, what: str) -> Any:
        try:
            if not self._pipe.poll(self._patience_s):
                raise WorkerError(f"{what}: no answer within {self._patience_s:g} s")
            well, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(10)
            code = self._process.exitcode
            raise WorkerError(f"{what}: the process died with exit code {code}") from error
        if not well:
            raise WorkerError(f"{what}:\n{value}")
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def together(made: Mapping[str, tuple[Any, Mapping[str, Any]]]) -> Iterator[dict[str, Worker]]:
    """Start a worker of each class with its settings, all at once."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Worker(make, dict(settings)))
            for name, (make, settings) in made.items()
        }


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
    except EOFError:  # The parent process is gone.
        pass
    except BaseException:  # noqa: BLE001 - reported to the parent, whatever it is
        pipe.send((False, traceback.format_exc()))
    close = getattr(made, "close", None)
    if close is not None:
        close()
    pipe.close()
    # ``os._exit`` skips atexit handlers of libraries that expect their own launcher.
    os._exit(0)


def alone() -> dict[str, str]:
    """Return a launcher's variables for a single process, without which DeepSpeed asks for MPI."""
    return launched(1)[0]


def launched(count: int) -> list[dict[str, str]]:
    """Return a launcher's variables for the processes of ``count`` ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    here = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **here} for rank in range(count)]


def resolved(model: Any, plan: Mapping[str, Any], *, batch: int, **how: Any) -> Any:
    """Resolve a plan with AdamW for a model on this machine; ``how`` is passed to ``resolve``."""
    from zerotune import DeepSpeedPlan, OptimizerResolver, detect_platform
    from zerotune.plan.facts import ModelFacts

    adam = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}
    built = DeepSpeedPlan.build(micro_batch_size=batch, optimizer=adam, **plan)
    facts = ModelFacts.from_module(model)
    found = built.resolve(platform=detect_platform(log=False), model=facts, **how)
    return OptimizerResolver().resolve(found)


def load_libraries() -> int:
    """Import what a training script imports; return the anonymous memory in use."""
    import accelerate
    import diffusers
    import diffusers.training_utils

    import zerotune.training

    # Both load their submodules on first access.
    _ = accelerate.Accelerator, zerotune.training.Trainer
    _ = diffusers.UNet2DModel, diffusers.UNet2DConditionModel
    gc.collect()
    return anon_bytes()


def anon_bytes(pid: int | None = None) -> int:
    """Return a process's anonymous memory: without files and shared memory."""
    _, resident, shared, *_ = Path("/proc", str(pid or os.getpid()), "statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")


class AnonPeak:
    """Polls a process's anonymous memory from a thread of this process.

    The kernel's own peak also counts mapped files. A peak shorter than the interval may be missed.

    Args:
        pid: The process.
        interval: Seconds between samples.
    """

    def __init__(self, pid: int, *, interval: float = 0.002) -> None:
        self._pid, self._interval = pid, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before = self.peak = anon_bytes(pid)
        """Bytes at the start, and the largest sample."""

    def __enter__(self) -> Self:
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
        except (OSError, ValueError):  # The process is gone.
            self._stop.set()
