"""Ends a run whose ranks deadlock, and reports what each rank is executing.

If ranks run different modules, or different numbers of forward passes, a collective never
completes. Without a watchdog the job occupies its GPUs until the collective times out with a
message that names no module. On each rank a thread periodically reads the training thread's stack
and writes the current module and line to the process group's store. Writing to the store needs no
collective.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final

import attrs
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


logger = logging.getLogger("zerotune")

EXIT_CODE: Final = 75
"""Exit code of a process that the watchdog ends: ``EX_TEMPFAIL``, which schedulers may retry."""
_SLOWEST_S: Final = 5.0
_GRACE_S: Final = 10.0
"""Seconds the other ranks may continue after a rank has failed, because its error may yet be
handled."""
_STORE_ANSWER_S: Final = 3.0
"""Timeout of store requests; a store whose host process is stopped never answers."""
_SILENT_BEATS: Final = 3
"""Heartbeats that may be missed before a rank counts as silent."""
_watch_numbers = itertools.count()
_HOLDERS: Final = ("self", "module", "sub_module", "param")
"""Names of local variables in which torch and DeepSpeed hold the current module or parameter."""


# -- Where a process is in its work.


@attrs.frozen(kw_only=True)
class Position:
    """Step, phase and module of one rank."""

    step: int
    """The current optimizer step, counted from 1."""
    phase: str | None
    """``"data"``, ``"forward"``, ``"backward"``, ``"optimizer"``, ``"ema"``; ``None`` between
    phases."""
    module: str | None
    """Dotted name of the innermost running module; ``None`` if no module is running."""
    line: str = ""
    """File, line and function that the training thread is executing."""

    def __str__(self) -> str:
        if self.phase is None:
            words = f"is between the phases of step {self.step}"
        elif self.module is None:
            words = f"is in {self.phase} at step {self.step}"
        else:
            words = f"is in {self.phase} of {self.module} at step {self.step}"
        return f"{words} ({self.line})" if self.line else words

    def _was(self) -> str:
        return str(self).replace("is ", "was ", 1)


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


def look(
    names: Mapping[int, str], *, step: int, phase: str | None, thread: int
) -> tuple[Position, int]:
    """Return what a thread is executing, and a number that changes as the thread makes progress.

    If the thread runs no module, the stacks of other threads are searched, because autograd runs
    GPU backward passes in separate threads.

    Args:
        names: Result of ``names_of``.
        step: The current optimizer step.
        phase: The current phase.
        thread: Identifier of the training thread.
    """
    frames = sys._current_frames()
    watcher = threading.get_ident()
    stack = list(_outwards(frames.get(thread)))
    module = _module_at_work(stack, names)
    for ident, frame in frames.items():
        if module is None and ident not in (thread, watcher):
            module = _module_at_work(list(_outwards(frame)), names)
    position = Position(step=step, phase=phase, module=module, line=_line(stack))
    return position, hash(tuple((frame.f_code, frame.f_lasti) for frame in stack))


def look_back(
    error: BaseException, names: Mapping[int, str], *, step: int, phase: str | None
) -> Position:
    """Return the position where an exception was raised.

    Args:
        error: The exception.
        names: Result of ``names_of``.
        step: The current optimizer step.
        phase: The current phase.
    """
    trace: TracebackType | None = error.__traceback__
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    inwards = frames[::-1]
    return Position(
        step=step, phase=phase, module=_module_at_work(inwards, names), line=_line(inwards)
    )


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


def _line(stack: list[FrameType]) -> str:
    if not stack:
        return ""
    frame = stack[0]
    file = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"


# -- Heartbeats between ranks, and how the watchdog reacts to them.


@attrs.frozen(kw_only=True)
class Beat:
    """The last heartbeat of one rank."""

    rank: int
    position: Position
    still_s: float
    """Seconds since the rank last made progress."""
    failed: str | None = None
    """Exception that ended ``fit`` on the rank."""
    let_down: bool = False
    """Whether the exception in ``failed`` only reports another rank's failure."""
    done: bool = False
    """Whether ``fit`` has ended on the rank."""
    pulse: int = 0
    """Number of heartbeats sent; it stops growing if the process is stopped or killed."""
    gone: str | None = None
    """Why a rank is considered lost; ``None`` while the rank sends heartbeats."""

    def __str__(self) -> str:
        if self.gone is not None:
            return f"rank {self.rank} {self.gone}; it {self.position._was()}"
        if self.failed is not None:
            verb = "gave up" if self.let_down else "failed"
            return f"rank {self.rank} {verb}: {self.failed}; it {self.position._was()}"
        if self.done:
            return f"rank {self.rank} left fit after step {self.position.step - 1}"
        return f"rank {self.rank} {self.position}, for {self.still_s:.0f} s"

    def _aged(self, *, silent_s: float, ended: str | None, interval_s: float) -> Beat:
        """Return the beat, marked as lost if the process ended or its heartbeats stopped."""
        if self.done or (ended is None and silent_s < _SILENT_BEATS * interval_s + _STORE_ANSWER_S):
            return self
        return attrs.evolve(
            self,
            still_s=self.still_s + silent_s,
            gone=ended or f"sent its last heartbeat {silent_s:.0f} s ago",
        )


class Watchdog(Callback):
    """Ends all ranks if no rank makes progress, and logs each rank's step, phase and module.

    The watchdog adds no hooks to the model and no work to the training thread. A separate thread
    reads the stacks of the other threads a few times per timeout period. If a rank fails, the
    watchdog ends the other ranks about ten seconds later. A killed or stopped rank is detected by
    its missing heartbeats and, on the same machine, by the state of its process.

    Args:
        timeout_s: The run ends if no rank makes progress for this many seconds while at least one
            rank is in a step. ``None`` uses four fifths of the trainer's ``timeout_s``, so that the
            watchdog reports before a collective times out.
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
        self._rank = trainer.engine.group.rank
        self._world = trainer.engine.group.world_size
        self._names = names_of(trainer.engine.module)
        self._thread = threading.get_ident()
        self._group = trainer.engine.group
        self._store, self._asking = own_store(), Asking()
        self._heard: dict[int, tuple[Beat, float]] = {}
        self._pulse = 0
        # All ranks create their watches in the same order, so their keys match.
        self._prefix = f"zerotune/watchdog/{next(_watch_numbers)}"
        self._mark = 0
        self._moved_at = time.monotonic()
        self._over = threading.Event()
        self._ending = False
        self._meet()
        self._watcher = threading.Thread(target=self._run, name="zerotune-watchdog", daemon=True)
        self._watcher.start()

    def stop(self, error: BaseException | None) -> None:
        self._over.set()
        # Let a watcher that is ending the process finish: this error only follows another's end.
        self._watcher.join(timeout=_GRACE_S if self._ending else 2 * self._interval_s)
        from torch.distributed.elastic.multiprocessing.api import SignalException

        position = self._look()
        if error is not None:
            position = look_back(error, self._names, step=position.step, phase=position.phase)
        beat = Beat(
            rank=self._rank,
            position=position,
            still_s=0,
            failed=None if error is None else f"{type(error).__name__}: {str(error)[:300]}",
            # torchrun terminates the remaining ranks once one has failed.
            let_down=isinstance(error, CollectiveError | SignalException)
            or getattr(error, "rank", None) is not None,
            done=True,
        )
        if not self._asking.waits:
            self._exchange(beat)
        if error is not None:
            others = [other for other in self._beats() if other.rank != self._rank]
            logger.error("%s", "; ".join(str(one) for one in (beat, *others)))

    def _meet(self) -> None:
        """Wait for the first heartbeat of every rank before any rank takes a step.

        If rank 0 hosts the store and is lost in its first steps, heartbeats can no longer be read.
        """
        deadline = time.monotonic() + _GRACE_S
        while True:
            self._exchange(Beat(rank=self._rank, position=self._look(), still_s=0))
            if len(self._heard) == self._world or time.monotonic() >= deadline:
                return
            time.sleep(min(0.02, self._interval_s))

    def _run(self) -> None:
        failed_since: float | None = None
        while not self._over.wait(self._interval_s):
            position = self._look()
            still = time.monotonic() - self._moved_at
            called = self._exchange(Beat(rank=self._rank, position=position, still_s=still))
            beats = self._beats()
            lost = any(beat.failed or (beat.gone or "").startswith(ENDED) for beat in beats)
            failed_since = (failed_since or time.monotonic()) if lost else None
            waited = time.monotonic() - failed_since if failed_since else 0.0
            patience = min(_GRACE_S, self._timeout_s)
            if called or _stuck(beats, self._timeout_s, self._world) or waited > patience:
                self._finish(beats)
                return

    def _finish(self, beats: list[Beat]) -> None:
        if self._over.is_set():
            return
        self._ending = True
        message = _message(beats, self._world, self._timeout_s)
        # The first rank to exit would break the others' connections, and rank 0 may host the store.
        # So all ranks must know about the end before any rank exits.
        waiting = 4 * self._interval_s
        ready = [f"{self._prefix}/end/{b.rank}" for b in beats if not b.done and b.gone is None]

        def meet() -> None:
            self._store.set(f"{self._prefix}/end", "now")
            self._store.set(f"{self._prefix}/end/{self._rank}", "ready")
            deadline = time.monotonic() + waiting
            while time.monotonic() < deadline and not self._store.check(ready):
                time.sleep(self._interval_s / 8)

        self._asking.ask(meet, seconds=waiting + 1)
        self._end(message)

    def _exchange(self, mine: Beat) -> bool:
        """Exchange heartbeats with the other ranks; return whether a rank ends the run."""
        self._pulse += 1
        mine = attrs.evolve(mine, pulse=self._pulse)
        keys = {rank: f"{self._prefix}/{rank}" for rank in range(self._world)}

        def exchange() -> tuple[dict[int, Beat], bool]:
            self._store.set(keys[self._rank], json.dumps(attrs.asdict(mine)))
            answered = {rank: key for rank, key in keys.items() if self._store.check([key])}
            fields = {rank: json.loads(self._store.get(key)) for rank, key in answered.items()}
            beats = {
                rank: Beat(**each | {"position": Position(**each["position"])})
                for rank, each in fields.items()
            }
            return beats, bool(self._store.check([f"{self._prefix}/end"]))

        heard, called = self._asking.ask(exchange, seconds=_STORE_ANSWER_S) or ({}, False)
        for rank, beat in (heard | {self._rank: mine}).items():
            if rank not in self._heard or self._heard[rank][0].pulse != beat.pulse:
                self._heard[rank] = beat, time.monotonic()
        return called

    def _beats(self) -> list[Beat]:
        """Return the last heartbeat of every rank, with lost ranks marked."""
        now, ended = time.monotonic(), self._group.ended()
        return [
            beat._aged(silent_s=now - heard, ended=ended.get(rank), interval_s=self._interval_s)
            for rank, (beat, heard) in sorted(self._heard.items())
        ]

    def _look(self) -> Position:
        trainer = self._trainer
        position, mark = look(
            self._names, step=trainer.step + 1, phase=trainer.phase, thread=self._thread
        )
        mark = hash((mark, position.step, position.phase))
        if mark != self._mark:
            self._mark, self._moved_at = mark, time.monotonic()
        return position


def _stuck(beats: list[Beat], timeout_s: float, world: int) -> bool:
    """Return whether no rank makes progress although a rank is in a step.

    A rank that writes a checkpoint or samples images is in no step; while the others wait for it in
    a step, it makes progress.
    """
    stepping = any(beat.position.phase and not beat.done for beat in beats)
    return (
        len(beats) == world
        and stepping
        and all(beat.done or beat.still_s >= timeout_s for beat in beats)
    )


def _message(beats: list[Beat], world: int, timeout_s: float) -> str:
    failed = [beat for beat in beats if beat.failed and not beat.let_down]
    gone = [beat for beat in beats if beat.gone]
    where = "; ".join(str(beat) for beat in beats)
    if failed:
        return f"{_rank_names(failed)} failed, and the other ranks are waiting: {where}"
    if gone:
        return (
            f"{_rank_names(gone)} stopped or exited without an error, and the other ranks "
            f"are waiting: {where}. Check the kernel log for an out-of-memory kill; "
            "`kill -CONT` continues a stopped process."
        )
    if any(beat.let_down for beat in beats):
        return f"a rank failed, and the other ranks are waiting: {where}"
    places = {(beat.position.step, beat.position.phase, beat.position.module) for beat in beats}
    why = (
        "The ranks are at different points: all ranks must run the same modules in the same order. "
        "Check for branches that depend on the rank or the data, and for unequal numbers of "
        "batches."
        if len(places) > 1 or any(beat.done for beat in beats)
        else "All ranks are at the same point, and the work there takes longer than the timeout. "
        "Check the network and the disks, or raise Watchdog(timeout_s=...)."
    )
    return f"no rank has made progress for {timeout_s:g} s (world size {world}): {where}. {why}"


def _rank_names(beats: list[Beat]) -> str:
    return " and ".join(f"rank {beat.rank}" for beat in beats)
