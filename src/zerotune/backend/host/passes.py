"""``Passes``: one thread that updates units in host memory.

Among units whose gradients are on the host, the unit that is needed soonest is updated first. An
EMA update that is added during a step runs together with each pending unit. For units that are
already updated, it runs afterwards.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from zerotune.backend.ema_update import EMAUpdate
from zerotune.backend.host.lanes import Copy, check_process
from zerotune.backend.host.units import Unit, UnitPart
from zerotune.backend.host.updates import Run, average
from zerotune.backend.step.kernel import HostStepOp


class UnitPass:
    """The update of one unit in one optimizer step.

    Args:
        unit: The unit.
        run: Function that updates the unit.
        ema_updates: EMA updates of this step; more may be appended later.
        landed: Copy of the gradients to the host; ``None`` if they are already there.
        check: Function that is called once the gradients are on the host; returns the parameters
            that got no gradient and stay as they are, or ``None`` if the whole unit must.
        written: Future that is done once the unit is updated.
        views: Number of views of the unit's weights in ``run``.
        rank: Priority; updates with a lower rank run first.
    """

    def __init__(
        self,
        *,
        unit: Unit,
        run: Run,
        ema_updates: list[EMAUpdate],
        landed: Copy | None,
        check: Callable[[], Collection[UnitPart] | None],
        written: Future[None],
        views: int,
        rank: int,
    ) -> None:
        self.unit, self.rank, self._landed, self._check = unit, rank, landed, check
        self.views = views
        self._run, self._ema_updates = run, ema_updates
        self._emas_updated = 0
        # A copy of the previous step's weights may still be running.
        self._reading = unit.loading
        self.written = unit.written = written
        unit.version += 1

    @property
    def is_ready(self) -> bool:
        """Whether the gradients are on the host and no copy of the previous weights is running.

        ``Passes`` runs only ready updates, so its thread never waits for a lane that is itself
        waiting for an update.
        """
        return all(copy is None or copy.is_done for copy in (self._landed, self._reading))

    @property
    def is_complete(self) -> bool:
        """Whether the unit and all EMAs of its weights are updated."""
        return self.written.done() and self._emas_updated == len(self._ema_updates)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Run ``call`` whenever a copy that the update waits for has completed."""
        for copy in (self._landed, self._reading):
            if copy is not None:
                copy.when_done(call)

    @torch.no_grad()
    def take(self) -> None:
        """Update the unit; if it is already updated, update only EMAs that were added afterwards.

        Raises:
            BaseException: The copy of the gradients has failed.
        """
        updates = self._ema_updates[self._emas_updated :]
        if self.written.done():
            self._update_emas(updates)
        else:
            for copy in (self._landed, self._reading):
                if copy is not None:
                    copy.finish()
            still = self._check()
            if still is not None:
                self._run(updates, still)
            if self.unit.in_place:
                self.unit.know_bits()
        self._emas_updated += len(updates)
        if not self.written.done():
            self.written.set_result(None)

    def _update_emas(self, updates: Sequence[EMAUpdate]) -> None:
        for slab in self.unit.slabs:
            for part in slab.parts:
                average(slab, part, updates)


class Passes:
    """Run updates of units in a separate thread.

    Args:
        op: The compiled kernels.
        spare: Whether the kernels leave one core free for concurrent work.
    """

    def __init__(self, *, op: HostStepOp, spare: bool) -> None:
        self._op, self._spare, self._pid = op, spare, os.getpid()
        self._lock = threading.RLock()
        self._updating = threading.Lock()
        self._waiting: list[UnitPass] = []
        self._newest: list[UnitPass] = []
        self._signals: SimpleQueue[None] = SimpleQueue()
        self._idle: list[SimpleQueue[None]] = []
        self._is_closing = False
        self._error: BaseException | None = None
        self.ema_updates: list[EMAUpdate] = []
        """EMA updates of the newest step."""
        self._thread = threading.Thread(target=self._work, name="zerotune-passes", daemon=True)
        self._thread.start()

    def begin_step(self) -> None:
        """Begin a new optimizer step; later submissions belong to this step.

        Raises:
            BaseException: An earlier update has failed.
        """
        self._raise()
        with self._lock:
            self._newest, self.ema_updates = [], []

    def submit(self, unit_pass: UnitPass) -> None:
        """Queue an update, which runs once its gradients are on the host.

        Args:
            unit_pass: The update.
        """
        with self._lock:
            self._waiting.append(unit_pass)
            self._newest.append(unit_pass)
            if self._error is not None:
                unit_pass.written.set_exception(self._error)
        if unit_pass.is_ready:
            self._signal()
        else:
            unit_pass.when_ready(self._signal)

    def hurry(self, unit: Unit) -> None:
        """Run the update of ``unit`` before all others."""
        with self._lock:
            for unit_pass in self._waiting:
                if unit_pass.unit is unit:
                    unit_pass.rank = -1

    def views(self) -> Counter[Unit]:
        """Return the number of views of each unit's weights in pending and finished updates."""
        with self._lock:
            passes = {id(each): each for each in (*self._newest, *self._waiting)}
            counts: Counter[Unit] = Counter()
            for each in passes.values():
                counts[each.unit] += each.views
            return counts

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the update that is running, and begin none inside the block.

        The caller waits for at most one unit. No update waits for a caller: an update runs only
        when its copies are done, and needs neither this object's lock nor another rank.
        """
        # If the lock were not held while waiting, the thread could begin the next update first.
        with self._lock, self._updating:
            yield

    def update_emas(self, updates: Sequence[EMAUpdate]) -> bool:
        """Add EMA updates to the newest step, if it is still pending.

        Args:
            updates: The updates.

        Returns:
            Whether a pending step will update the EMAs.
        """
        with self._lock:
            if self._error is not None or all(each.is_complete for each in self._newest):
                return False
            self.ema_updates.extend(updates)
            late = [each for each in self._newest if each not in self._waiting]
            self._waiting.extend(late)
        self._signal()
        return True

    def settle(self) -> None:
        """Wait until all updates are complete.

        Raises:
            BaseException: An update has failed.
        """
        check_process(self._pid)
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
        """Run all queued updates, and end the thread."""
        self._is_closing = True
        self._signal()
        self._thread.join()
        self._newest, self.ema_updates = [], []

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
                # Releases the update's views of the weights.
                del unit_pass

    def _next(self) -> UnitPass | None:
        """The ready update with the lowest rank; for each unit only its oldest update."""
        if self._error is not None:
            return None
        first: dict[Unit, UnitPass] = {}
        for unit_pass in self._waiting:
            first.setdefault(unit_pass.unit, unit_pass)
        ready = [each for each in first.values() if each.is_ready]
        return min(ready, key=lambda each: each.rank, default=None)

    def _take(self, unit_pass: UnitPass) -> None:
        try:
            with self._updating:
                unit_pass.take()
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits
            self.fail(error)
            return
        with self._lock:
            if unit_pass.is_complete:
                self._waiting.remove(unit_pass)

    def fail(self, error: BaseException) -> None:
        """Make all current and later waits raise ``error``."""
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
