"""Ends a run whose ranks deadlock, and reports what each rank is executing.

If ranks run different modules, or different numbers of forward passes, a collective never
completes. Without a watchdog the job occupies its GPUs until the collective times out with a
message that names no module. On each rank a thread periodically reads the training thread's stack.
A rank that makes no progress writes its position to the process group's store, where the others
read it, and ends. Writing to the store needs no collective.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from zerotune._util.proc import ENDED
from zerotune._util.text import positive
from zerotune.backend.roll_call import Asking, own_store
from zerotune.errors import CollectiveError
from zerotune.offload.lease import abandon_held
from zerotune.training.events import Callback

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerotune.training.view import RunView


T = TypeVar("T")

logger = logging.getLogger("zerotune")

EXIT_CODE: Final = 75
"""Exit code of a process that the watchdog ends: ``EX_TEMPFAIL``, which schedulers may retry."""
_SLOWEST_S: Final = 5.0
_GRACE_S: Final = 10.0
"""Seconds the other ranks may continue after a rank has failed, because its error may yet be
handled."""
_STORE_ANSWER_S: Final = 3.0
"""Timeout of store requests; a store whose host process is stopped never answers."""
_watch_numbers = itertools.count()
_HOLDERS: Final = ("self", "module", "sub_module", "param")
"""Names of local variables in which torch and DeepSpeed hold the current module or parameter."""


# -- Where a process is in its work.


def names_of(model: torch.nn.Module) -> dict[int, str]:
    """Map the ``id`` of each module and of each parameter to the module's dotted name.

    The root module's name is the name of its class.
    """
    names = {}
    for name, module in model.named_modules():
        names[id(module)] = name or type(model).__name__
        for parameter in module.parameters(recurse=False):
            names[id(parameter)] = names[id(module)]
    return names


def look(names: Mapping[int, str], *, step: int, phase: str | None, thread: int) -> tuple[str, int]:
    """Return what a thread is executing, and a number that changes as the thread makes progress.

    If the thread runs no module, the stacks of other threads are searched, because autograd runs
    GPU backward passes in separate threads.

    Args:
        names: Result of ``names_of``.
        step: The current optimizer step, counted from 1.
        phase: The current phase; ``None`` between phases.
        thread: Identifier of the training thread.
    """
    frames = sys._current_frames()
    watcher = threading.get_ident()
    stack = list(_outwards(frames.get(thread)))
    module = _module_at_work(stack, names)
    for ident, frame in frames.items():
        if module is None and ident not in (thread, watcher):
            module = _module_at_work(list(_outwards(frame)), names)
    mark = hash((step, phase, *((frame.f_code, frame.f_lasti) for frame in stack)))
    return _place(stack, module, step=step, phase=phase), mark


def look_back(
    error: BaseException, names: Mapping[int, str], *, step: int, phase: str | None
) -> str:
    """Return where an exception was raised.

    Args:
        error: The exception.
        names: Result of ``names_of``.
        step: The current optimizer step, counted from 1.
        phase: The current phase; ``None`` between phases.
    """
    stack = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    return _place(stack, _module_at_work(stack, names), step=step, phase=phase)


def _place(stack: list[FrameType], module: str | None, *, step: int, phase: str | None) -> str:
    """Return step, phase, module, and the file and line of a stack, innermost frame first."""
    words = f"between the phases of step {step}"
    if phase is not None:
        words = f"in {phase}{'' if module is None else f' of {module}'} at step {step}"
    if not stack:
        return words
    code = stack[0].f_code
    file = "/".join(code.co_filename.split("/")[-2:])
    return f"{words} ({file}:{stack[0].f_lineno} in {code.co_name})"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_at_work(stack: list[FrameType], names: Mapping[int, str]) -> str | None:
    for frame in stack:
        held: Mapping[str, Any] = frame.f_locals
        for name in _HOLDERS:
            if (module := names.get(id(held.get(name)))) is not None:
                return module
    return None


# -- What the watchdog does.


class Watchdog(Callback):
    """Ends a rank that makes no progress in a step, and logs each rank's step, phase and module.

    The watchdog adds no hooks to the model and no work to the training thread. A separate thread
    reads the stacks of the other threads a few times per timeout period. If a rank fails, or its
    process on the same machine is killed, the watchdog ends the other ranks about ten seconds
    later. A rank that says nothing by then, such as a stopped one, is named.

    Args:
        timeout_s: A rank ends if it makes no progress for this many seconds while it is in a step.
            ``None`` uses four fifths of the trainer's ``timeout_s``, so that the watchdog reports
            before a collective times out.
        end: Function that is called on each rank with the watchdog's message. By default the
            message is logged and the process ends, because Python cannot interrupt a thread that
            waits in a collective.
    """

    def __init__(
        self, *, timeout_s: float | None = None, end: Callable[[str], None] | None = None
    ) -> None:
        if timeout_s is not None:
            positive(timeout_s, key="watchdog.timeout_s", fix="write seconds")
        self._timeout_s = timeout_s
        self._end = end or end_process
        self._watch: _Watch | None = None

    def on_fit_start(self, trainer: RunView, *, steps: int | None) -> None:  # noqa: ARG002
        """Start watching if there are several ranks."""
        if trainer.engine.group.world_size > 1:
            timeout = self._timeout_s or 0.8 * trainer.timeout_s
            self._watch = _Watch(trainer, timeout_s=timeout, end=self._end)

    def on_fit_end(self, trainer: RunView) -> None:  # noqa: ARG002
        """Report the outcome to the other ranks, and stop watching."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop(sys.exc_info()[1])


def end_process(message: str) -> None:
    """Log ``message`` as critical and end this process at once, without waiting for its threads.

    The process first deletes the swap folders that no other process uses.
    """
    logger.critical("%s", message)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"zerotune: {message}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        abandon_held()
    logging.shutdown()
    os._exit(EXIT_CODE)


class _Watch:
    """The watchdog of one ``fit`` call."""

    def __init__(self, trainer: RunView, *, timeout_s: float, end: Callable[[str], None]) -> None:
        self._trainer, self._end, self._timeout_s = trainer, end, timeout_s
        self._interval_s = min(_SLOWEST_S, timeout_s / 8)
        self._group = trainer.engine.group
        self._rank, self._world = self._group.rank, self._group.world_size
        self._own = ""
        self._names = names_of(trainer.engine.module)
        self._thread = threading.get_ident()
        self._store, self._asking = own_store(), Asking()
        # All ranks create their watches in the same order, so their keys match.
        self._prefix = f"zerotune/watchdog/{next(_watch_numbers)}"
        self._over = threading.Event()
        self._ending = False
        self._watcher = threading.Thread(target=self._run, name="zerotune-watchdog", daemon=True)
        self._watcher.start()

    def stop(self, error: BaseException | None) -> None:
        self._over.set()
        # Let a watcher that is ending the process finish: this error only follows another's end.
        self._watcher.join(timeout=4 * _GRACE_S if self._ending else 2 * self._interval_s)
        step, phase = self._trainer.step + 1, self._trainer.phase
        if error is None:
            self._say(f"left fit after step {step - 1}")
            return
        verb = "gave up" if _is_let_down(error) else "failed"
        place = look_back(error, self._names, step=step, phase=phase)
        self._say(f"{verb}: {type(error).__name__}: {str(error)[:300]}; it was {place}", ends=True)
        words, _ = self._words()
        own = words.pop(self._rank)
        logger.error("%s", "; ".join((own, *words.values())))

    def _run(self) -> None:
        failed_at, mark, moved_at = None, 0, time.monotonic()
        while not self._over.wait(self._interval_s):
            step, phase = self._trainer.step + 1, self._trainer.phase
            place, now = look(self._names, step=step, phase=phase, thread=self._thread)
            if now != mark:
                mark, moved_at = now, time.monotonic()
            still = time.monotonic() - moved_at
            stuck = phase is not None and still >= self._timeout_s
            if failed_at is None and self._is_ending():
                failed_at = time.monotonic()
            waited = 0.0 if failed_at is None else time.monotonic() - failed_at
            if stuck or waited > min(_GRACE_S, self._timeout_s):
                self._finish(f"is {place}, for {still:.0f} s", stuck=stuck)
                return

    def _is_ending(self) -> bool:
        """Return whether a rank has failed or ends the run, or its process has ended."""
        if any(state.startswith(ENDED) for state in self._group.ended().values()):
            return True
        return bool(self._ask(lambda: self._store.check([f"{self._prefix}/end"])))

    def _finish(self, word: str, *, stuck: bool) -> None:
        if self._over.is_set():
            return
        self._ending = True
        self._say(word, ends=True)
        # The others find the end at their next look, and have their own patience.
        deadline = time.monotonic() + min(_GRACE_S, self._timeout_s) + 4 * self._interval_s
        words, lost = self._words()
        while len(words) < self._world and time.monotonic() < deadline:
            time.sleep(self._interval_s / 8)
            words, lost = self._words()
        # The first rank to exit breaks the others' connections, and rank 0 may host the store.
        time.sleep(self._interval_s)
        words |= {rank: f"rank {rank} does not answer" for rank in lost if rank not in words}
        where = "; ".join(words[rank] for rank in sorted(words))
        self._end(_message(where, lost=lost, timeout_s=self._timeout_s if stuck else None))

    def _say(self, word: str, *, ends: bool = False) -> None:
        """Write to the store what this rank does, and whether the others are to end too."""
        self._own = f"rank {self._rank} {word}"
        notes = {f"{self._prefix}/{self._rank}": self._own}
        if ends:
            notes[f"{self._prefix}/end"] = "now"
        self._ask(lambda: [self._store.set(key, note) for key, note in notes.items()])

    def _words(self) -> tuple[dict[int, str], list[int]]:
        """Return what is known of each rank, and the ranks that say nothing themselves."""
        keys = {rank: f"{self._prefix}/{rank}" for rank in range(self._world)}

        def read() -> dict[int, str]:
            there = {rank: key for rank, key in keys.items() if self._store.check([key])}
            return {rank: self._store.get(key).decode() for rank, key in there.items()}

        said = (self._ask(read) or {}) | {self._rank: self._own}
        states = {rank: f"rank {rank} {state}" for rank, state in self._group.ended().items()}
        return states | said, [rank for rank in keys if rank not in said]

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Ask the store; return ``None`` at once if it has not answered an earlier question."""
        if self._asking.waits:
            return None
        return self._asking.ask(question, seconds=_STORE_ANSWER_S)


def _is_let_down(error: BaseException) -> bool:
    """Return whether an error only reports another rank's failure."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    # torchrun terminates the remaining ranks once one has failed.
    ended = isinstance(error, CollectiveError | SignalException)
    return ended or getattr(error, "rank", None) is not None


def _message(where: str, *, lost: Sequence[int], timeout_s: float | None) -> str:
    """Return the watchdog's message.

    Args:
        where: What each rank does.
        lost: Ranks that say nothing.
        timeout_s: Seconds without progress; ``None`` if another rank ends the run.
    """
    if lost:
        names = " and ".join(f"rank {rank}" for rank in lost)
        return (
            f"{names} stopped or exited without an error, and the other ranks are waiting: "
            f"{where}. Check the kernel log for an out-of-memory kill; `kill -CONT` continues a "
            "stopped process."
        )
    if timeout_s is None:
        return f"a rank failed or makes no progress, and the other ranks are waiting: {where}"
    return (
        f"no progress for {timeout_s:g} s: {where}. If the ranks are at different points, check "
        "for branches that depend on the rank or the data, and for unequal numbers of batches; "
        "otherwise check the network and the disks, or raise Watchdog(timeout_s=...)."
    )
