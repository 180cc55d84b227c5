"""Threads of the host in virtual time.

The simulated accelerator (``tests/device``) has a clock for its own work. Here are the threads of
the host, which wait for each other in virtual time too. They run one at a time, the earliest first,
so that each decision sees exactly what other threads have done until then.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import attrs
from typing_extensions import override

ALWAYS: Final = float("-inf")


# -- Threads of the host, in virtual time.


@attrs.define(eq=False)
class _Turn:
    """A thread's place in the order of turns."""

    now: float
    ready: Callable[[], float | None] = lambda: ALWAYS
    """Returns when that happened, or will happen, for which the thread waits; ``None`` if that is
    unknown."""
    ended: float | None = None


class HostThreads:
    """Let one thread run at a time: that whose virtual time is the earliest.

    Args:
        clock: Clock of the simulated accelerator.
    """

    def __init__(self, clock: Any) -> None:
        self._clock, self._changed = clock, threading.Condition()
        self._main = self._running = _Turn(clock.now())
        self._turns = [self._main]
        self._own = threading.local()

    @property
    def mine(self) -> _Turn:
        """The turn of the calling thread."""
        # Backward runs in a thread of torch, on behalf of the main thread.
        turn: _Turn = getattr(self._own, "turn", self._main)
        return turn

    def now(self) -> float:
        """Return the time of the calling thread, or of that on whose behalf it calls."""
        at: float | None = getattr(self._own, "at", None)
        return self._clock.now() if at is None else at

    @contextlib.contextmanager
    def acting_at(self, time: float) -> Iterator[None]:
        """Let what the calling thread does happen at another time."""
        self._own.at = time
        try:
            yield
        finally:
            self._own.at = None

    def advance(self, seconds: float, name: str) -> None:
        """Let the calling thread work for some time."""
        self._clock.advance(seconds, name)
        self.wait(lambda: ALWAYS)

    def wait(self, ready: Callable[[], float | None]) -> None:
        """Wait until the calling thread is the earliest of those that can go on.

        Args:
            ready: Returns the time at which the thread can go on; ``None`` if it must wait.

        Raises:
            RuntimeError: All threads wait for each other.
        """
        turn = self.mine
        turn.now, turn.ready = self._clock.now(), ready
        with self._changed:
            self._pass_on()
            self._await(turn)

    def _await(self, turn: _Turn) -> None:
        self._changed.wait_for(lambda: self._running is turn)
        at, turn.ready = turn.ready(), lambda: ALWAYS
        self._clock.join(at if at is not None else turn.now, "thread")

    def _pass_on(self) -> None:
        times = [(at, turn) for turn in self._turns if (at := turn.ready()) is not None]
        if not times:
            raise RuntimeError("all threads of the host wait for each other")
        self._running = min(times, key=lambda each: max(each[0], each[1].now))[1]
        self._changed.notify_all()

    def begin(self) -> _Turn:
        """Return the turn of a thread that begins now."""
        turn = _Turn(self.now())
        self._turns.append(turn)
        return turn

    def run(self, turn: _Turn, target: Callable[[], None]) -> None:
        """Call a function in a new thread, when it is its turn."""
        self._own.turn = turn
        with self._changed:
            self._clock.join(turn.now, "thread")
            self._await(turn)
        try:
            target()
        finally:
            with self._changed:
                turn.ended = self._clock.now()
                self._turns.remove(turn)
                self._pass_on()


class _Virtual:
    """Base of the stand-ins for the classes with which threads wait for each other."""

    hosts: HostThreads


class _Thread(_Virtual, threading.Thread):
    @override
    def start(self) -> None:
        self._turn = self.hosts.begin()
        super().start()

    @override
    def run(self) -> None:
        self.hosts.run(self._turn, super().run)

    @override
    def join(self, timeout: float | None = None) -> None:
        self.hosts.wait(lambda: self._turn.ended)
        super().join(timeout)


class _Lock(_Virtual):
    """A lock that a thread may hold while it works or waits."""

    def __init__(self) -> None:
        self._owner: object = None
        self._depth, self._free_from = 0, ALWAYS

    def __enter__(self) -> None:
        mine = self.hosts.mine
        if self._owner is not mine:
            self.hosts.wait(lambda: None if self._owner else self._free_from)
        self._owner = mine
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner, self._free_from = None, self.hosts.now()


class _Queue(_Virtual):
    def __init__(self) -> None:
        self._items: deque[tuple[float, Any]] = deque()

    def put(self, item: Any) -> None:
        self._items.append((self.hosts.now(), item))

    def get(self) -> Any:
        self.hosts.wait(lambda: self._items[0][0] if self._items else None)
        return self._items.popleft()[1]


class _Future(_Virtual, Future[Any]):
    _at = ALWAYS

    @override
    def set_result(self, result: Any) -> None:
        self._at = self.hosts.now()
        super().set_result(result)

    @override
    def set_exception(self, exception: BaseException | None) -> None:
        self._at = self.hosts.now()
        super().set_exception(exception)

    @override
    def done(self) -> bool:
        return super().done() and self._at <= self.hosts.now()

    @override
    def result(self, timeout: float | None = None) -> Any:
        self.hosts.wait(lambda: self._at if Future.done(self) else None)
        return super().result(timeout)

    @override
    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        with self.hosts.acting_at(max(self._at, self.hosts.now())):
            super().add_done_callback(call)


class _Executor:
    """An executor with one thread."""

    def __init__(self, *_: Any, initializer: Any = None, initargs: Any = (), **__: Any) -> None:
        self._queue, self._prepare = _Queue(), partial(initializer or int, *initargs)
        self._thread = _Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> _Future:
        self._queue.put((found := _Future(), call, args))
        return found

    def _work(self) -> None:
        self._prepare()
        while (item := self._queue.get()) is not None:
            found, call, args = item
            try:
                found.set_result(call(*args))
            except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
                found.set_exception(error)
            # The call may refer to weights, and a view of them keeps steps from being hidden.
            del item, found, call, args

    def shutdown(self) -> None:
        self._queue.put(None)
        self._thread.join()


@contextlib.contextmanager
def in_virtual_time(hosts: HostThreads) -> Iterator[None]:
    """Let the engines' threads wait for each other in virtual time."""
    from zerotune.backend.host import gradients, lanes, passes, steps

    threads = SimpleNamespace(
        **{**vars(threading), "Thread": _Thread, "Lock": _Lock, "RLock": _Lock}
    )
    replaced = (
        (lanes, "ThreadPoolExecutor", _Executor),
        (passes, "SimpleQueue", _Queue), (gradients, "SimpleQueue", _Queue),
        (steps, "Future", _Future),
        (passes, "threading", threads),
    )  # fmt: skip
    _Virtual.hosts = hosts
    with contextlib.ExitStack() as stack:
        for module, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield
