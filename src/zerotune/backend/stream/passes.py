"""``Passes``: the optimizer's passes over units in host memory, taken in one thread.

The unit that is wanted soonest comes first, of those whose gradients are on the host. Averages move
with the passes that are still to be taken, and catch up with those that are.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import attrs
import torch

from zerotune.backend.master_weights import Follower
from zerotune.backend.step.adams import SlabStep
from zerotune.backend.step.kernel import Average, HostStepOp
from zerotune.backend.stream.lanes import Copy
from zerotune.backend.stream.units import Unit, UnitSlab

Averages = list[Follower]


class UnitPass:
    """One step of one unit.

    Args:
        unit: The unit.
        steps: Its slabs with their steps, begun.
        averages: Those that follow this step, as they come.
        landed: Gradients on their way to the host; ``None``: they are there.
        check: Called once they are there; whether to step.
        written: Done once the pass is taken.
        views: How many views of the unit's weights its steps have.
        rank: When it is taken: the lower, the sooner.
    """

    def __init__(
        self,
        *,
        unit: Unit,
        steps: Sequence[tuple[UnitSlab, SlabStep]],
        averages: Averages,
        landed: Copy | None,
        check: Callable[[], bool],
        written: Future[None],
        views: int,
        rank: int,
    ) -> None:
        self.unit, self.rank, self._landed, self._check = unit, rank, landed, check
        self.views = views
        self._steps, self.averages = steps, averages
        self._followed = 0
        # Somebody may still be copying what the step before has written.
        self._reading = unit.loading
        self.written = unit.written = written
        unit.version += 1

    @property
    def is_ready(self) -> bool:
        """Whether its gradients are on the host, and what it writes has been read.

        So the thread that takes passes waits for no other lane, which might wait for a pass.
        """
        return all(copy is None or copy.is_done for copy in (self._landed, self._reading))

    @property
    def is_complete(self) -> bool:
        """Whether it is written, and every average has it."""
        return self.written.done() and self._followed == len(self.averages)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call whenever something that it waits for has come."""
        for copy in (self._landed, self._reading):
            if copy is not None:
                copy.when_done(call)

    @torch.no_grad()
    def take(self) -> None:
        """Write the unit, or give averages that came after that what they missed.

        Raises:
            BaseException: What the gradients' copy failed with.
        """
        coming = self.averages[self._followed :]
        if self.written.done():
            self._catch_up(coming)
        else:
            for copy in (self._landed, self._reading):
                if copy is not None:
                    copy.finish()
            for slab, step in self._steps if self._check() else ():
                _run(slab, step, coming)
        self._followed += len(coming)
        if not self.written.done():
            self.written.set_result(None)

    def _catch_up(self, coming: Averages) -> None:
        for slab, step in self._steps:
            for part in slab.parts:
                weight = step.masters.read(part.place)
                for average in coming:
                    average.tensors[part.key].lerp_(weight, average.weight)


def _run(slab: UnitSlab, step: SlabStep, coming: Averages) -> None:
    has_singles = step.whole is None and any(part.singles for part in slab.parts)
    if not coming and not has_singles:
        step.run(0, step.masters.numel)
        return
    # What lies between the parameters is zero, and stays so; among the last elements it would make
    # whole vectors of them.
    one_by_one = attrs.evolve(step, whole=0)
    for part in slab.parts:
        for run, is_single in part.runs() if has_singles else [(part.place, False)]:
            inside = slice(run.start - part.offset, run.stop - part.offset)
            averages = [
                Average(shadow=each.tensors[part.key][inside], weight=each.weight)
                for each in coming
            ]
            (one_by_one if is_single else step).run(run.start, run.stop, averages)


class Passes:
    """Takes passes in a thread of its own.

    Args:
        op: The compiled functions, which leave a core to what runs beside them.
        spare: Whether they should.
    """

    def __init__(self, *, op: HostStepOp, spare: bool) -> None:
        self._op, self._spare = op, spare
        self._lock = threading.RLock()
        self._waiting: list[UnitPass] = []
        self._newest: list[UnitPass] = []
        self._signals: SimpleQueue[None] = SimpleQueue()
        self._idle: list[SimpleQueue[None]] = []
        self._is_closing = False
        self._error: BaseException | None = None
        self.averages: Averages = []
        """Those that follow the newest step."""
        self._thread = threading.Thread(target=self._work, name="zerotune-passes", daemon=True)
        self._thread.start()

    def begin_step(self) -> None:
        """The passes that come now are of another step.

        Raises:
            BaseException: What an earlier pass failed with.
        """
        self._raise()
        with self._lock:
            self._newest, self.averages = [], []

    def submit(self, unit_pass: UnitPass) -> None:
        """Have a pass taken once its gradients are on the host."""
        with self._lock:
            self._waiting.append(unit_pass)
            self._newest.append(unit_pass)
            if self._error is not None:
                unit_pass.written.set_exception(self._error)
        unit_pass.when_ready(self._signal)
        self._signal()

    def hurry(self, unit: Unit) -> None:
        """Have the pass that writes a unit taken before all others."""
        with self._lock:
            for unit_pass in self._waiting:
                if unit_pass.unit is unit:
                    unit_pass.rank = -1

    def views(self) -> Counter[Unit]:
        """How many views of each unit's weights passes have, also of those that are taken."""
        with self._lock:
            passes = {id(each): each for each in (*self._newest, *self._waiting)}
            counts: Counter[Unit] = Counter()
            for each in passes.values():
                counts[each.unit] += each.views
            return counts

    def follow(self, followers: Sequence[Follower]) -> bool:
        """Have averages move with the newest step; whether there is one under way."""
        with self._lock:
            if self._error is not None or all(each.is_complete for each in self._newest):
                return False
            self.averages.extend(followers)
            late = [each for each in self._newest if each not in self._waiting]
            self._waiting.extend(late)
        self._signal()
        return True

    def settle(self) -> None:
        """Return once every pass is taken.

        Raises:
            BaseException: What a pass failed with.
        """
        while True:
            ticket: SimpleQueue[None] = SimpleQueue()
            with self._lock:
                if self._error is not None or not self._waiting:
                    break
                self._idle.append(ticket)
            self._signal()
            ticket.get()
        self._raise()

    def close(self) -> None:
        """Take what is left, and end the thread."""
        self._is_closing = True
        self._signal()
        self._thread.join()
        self._newest, self.averages = [], []

    def _signal(self) -> None:
        self._signals.put(None)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        if self._spare:
            self._op.spare_a_core()
        while True:
            with self._lock:
                unit_pass = self._next()
                if not self._waiting or self._error is not None:
                    self._wake_idle()
                    if self._is_closing:
                        return
            if unit_pass is None:
                self._signals.get()
            else:
                self._take(unit_pass)
                # Its views of the weights are nobody's any more.
                del unit_pass

    def _next(self) -> UnitPass | None:
        """The pass that is wanted first; of one unit the older."""
        if self._error is not None:
            return None
        first: dict[Unit, UnitPass] = {}
        for unit_pass in self._waiting:
            first.setdefault(unit_pass.unit, unit_pass)
        ready = [each for each in first.values() if each.is_ready]
        return min(ready, key=lambda each: each.rank, default=None)

    def _take(self, unit_pass: UnitPass) -> None:
        try:
            unit_pass.take()
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            self.fail(error)
            return
        with self._lock:
            if unit_pass.is_complete:
                self._waiting.remove(unit_pass)

    def fail(self, error: BaseException) -> None:
        """Have everybody who waits raise an error, now and later."""
        with self._lock:
            self._error = self._error or error
            for unit_pass in self._waiting:
                if not unit_pass.written.done():
                    unit_pass.written.set_exception(self._error)
            self._wake_idle()

    def _wake_idle(self) -> None:
        idle, self._idle = self._idle, []
        for ticket in idle:
            ticket.put(None)
