"""Collectives between the training processes, with errors that name the missing rank."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from zerotune._util.files import fix_of
from zerotune._util.proc import ProcessIdentity
from zerotune._util.text import differences
from zerotune.backend.launch import Launch
from zerotune.backend.process_groups import end_groups, start_default_group, started
from zerotune.backend.roll_call import (
    ANSWER_S,
    LOOK_S,
    NO_START,
    SETTLING_S,
    RollCall,
    is_collective,
)
from zerotune.errors import CheckpointError, CollectiveError, EngineError, ZeroTuneError

T = TypeVar("T")

_DEFAULT_TIMEOUT_S = 600.0

_NOBODY_SENDS: Final = 1 << 30
"""A tag that no message has."""


class ProcessGroup:
    """torch's default process group, with errors that name the missing rank.

    Args:
        backend: Backend such as ``"gloo"`` or ``"nccl"``, used if no group exists yet.
        launch: This process's rank and world size; default: read from the environment.
        timeout_s: Seconds after which a collective raises an error.

    If torch already has a default group (the user's, or accelerate's), it is used and never
    destroyed. If zerotune creates the group, all ``ProcessGroup`` objects share it, and closing the
    last of them destroys it. Under a launcher the group lasts until the process exits, because a
    second rendezvous in the launcher's store is unreliable.
    """

    def __init__(
        self,
        *,
        backend: str,
        launch: Launch | None = None,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
    ) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        launch = launch or Launch.from_environment()
        if not dist.is_initialized():
            start_default_group(backend, launch, self._timeout)
        self._owned = started.join()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = launch.local_rank if launch.launched else 0
        self.explain: Callable[[float], CollectiveError | None] | None = None
        """Function that may know why a collective has failed, after some seconds at most."""
        self._control: Any = None
        if self.world_size > 1:
            self._connect()

    @classmethod
    def alone(cls) -> ProcessGroup:
        """Return a group of only this process, without creating a torch process group."""
        group = cls.__new__(cls)
        group._timeout = timedelta(seconds=_DEFAULT_TIMEOUT_S)
        group._owned = False
        group.rank, group.world_size, group.local_rank = 0, 1, 0
        group._control = group.explain = None
        return group

    def _connect(self) -> None:
        """Create the gloo group for control messages, and wait for all ranks."""
        before = started.roll
        try:
            # NCCL can neither name a missing rank nor move objects without a GPU.
            self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        except RuntimeError as error:
            if before is None or not is_collective(error):
                raise
            raise before.lost(NO_START, error) from error
        self._roll = RollCall(self._control.group_name, rank=self.rank, before=before)
        self._roll.members = self.gather(ProcessIdentity.current(), purpose="meet")

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    def barrier(self, purpose: str, *, timeout_s: float | None = None) -> None:
        """Wait for all ranks.

        Args:
            purpose: Name of the operation that follows, for the error message.
            timeout_s: Seconds to wait; default: the group's timeout.
        """
        if self.world_size == 1:
            return
        with self._meeting(purpose, timeout_s=timeout_s) as deadline, self._looking():
            # torch's ``monitored_barrier`` waits for the group's timeout on all ranks but rank 0.
            options = dist.AllreduceOptions()
            options.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                self._control.allreduce([torch.zeros(1, dtype=torch.uint8)], options).wait()
            except RuntimeError:
                # Ranks that come later must not pass.
                self._wake()
                raise

    def broadcast(self, value: Any, *, source: int = 0, purpose: str = "share a value") -> Any:
        """Return rank ``source``'s value on every rank.

        Args:
            value: Picklable value; ignored on all ranks except ``source``.
            source: Rank whose value is sent.
            purpose: Name of the operation, for the error message.
        """
        if self.world_size == 1:
            return value
        box = [value]
        with self._meeting(purpose):
            dist.broadcast_object_list(box, src=source, group=self._control)
        return box[0]

    def gather(self, value: Any, *, purpose: str = "exchange values") -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank.

        Args:
            value: This rank's picklable value.
            purpose: Name of the operation, for the error message.
        """
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._meeting(purpose):
            dist.all_gather_object(values, value, group=self._control)
        return values

    def exchange(self, value: str) -> list[str]:
        """Return the strings of all ranks, in rank order, without using a collective.

        Collective, but a rank that waits here notices a rank that ends. It does not count as a
        meeting, since ranks whose data have ended do not come.

        Args:
            value: This rank's string.
        """
        if self.world_size == 1:
            return [value]
        return self._roll.exchange(value, time.monotonic() + self._timeout.total_seconds())

    def show(self, what: str, value: str) -> list[str]:
        """Record a string in the store, and return those of all ranks. Not collective.

        Args:
            what: Name of the record.
            value: This rank's string.

        Returns:
            The strings in rank order, empty for ranks that have recorded none.
        """
        return self._roll.show(what, value)

    def abort(self) -> None:
        """End all pending collectives of this process with errors, also those of other groups."""
        for group in list(dist.distributed_c10d._world.pg_map):
            if dist.get_backend(group) == "gloo":
                self._wake(group)

    def agree(self, value: Any, what: str, *, fix: str = "give every rank the same value") -> None:
        """Check that all ranks have the same value; otherwise raise an error with all values.

        Args:
            value: This rank's picklable value.
            what: Name of the value, for the error message.
            fix: Fix that the error message suggests.
        """
        values = self.gather(value, purpose=f"compare {what}")
        if any(other != values[0] for other in values):
            by_rank = differences(dict(enumerate(values)))
            raise CollectiveError(f"the ranks disagree ({by_rank})", fix, what)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place, and return it.

        Args:
            tensor: Tensor of the same shape on every rank.
        """
        if self.world_size > 1:
            with self.naming("a sum over the ranks"):
                dist.all_reduce(tensor)
        return tensor

    def mean(self, value: float, *, device: torch.device) -> float:
        """Return the mean of a number over all ranks.

        Args:
            value: This rank's number.
            device: Device on which the ranks exchange the number.
        """
        if self.world_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64 if device.type != "mps" else torch.float32)
        return float(self.sum_(total.to(device))) / self.world_size

    def any(self, flag: bool, *, purpose: str = "ask each other") -> bool:
        """Return whether ``flag`` is true on any rank, without using the accelerator.

        Args:
            flag: This rank's flag.
            purpose: Name of the operation, for the error message.
        """
        if self.world_size == 1:
            return flag
        largest = torch.tensor(int(flag), dtype=torch.uint8)
        with self._meeting(purpose):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._control)
        return bool(largest)

    def begin_pass(self) -> None:
        """Record that a backward pass begins, in which the ranks wait for each other."""
        if self.world_size > 1:
            self._roll.passes += 1
            self.note_pass(0)

    def note_pass(self, ahead: int) -> None:
        """Record which backward pass this rank has reached.

        Args:
            ahead: 1 in the forward pass before the next one; otherwise 0.
        """
        if self.world_size > 1:
            self._roll.note("/passes", str(self._roll.passes + ahead))

    def ended(self) -> dict[int, str]:
        """Return the state of each rank on this machine whose process has ended or is stopped."""
        return {} if self.world_size == 1 else self._roll.ended()

    @contextlib.contextmanager
    def naming(self, doing: str) -> Iterator[None]:
        """If a rank is lost inside the block, raise an error that names the rank and the operation.

        Args:
            doing: Name of the operation, for the error message.
        """
        try:
            yield
        except RuntimeError as error:
            if self.world_size == 1 or not is_collective(error):
                raise
            raise self._lost(f"a rank was lost during {doing}", error) from error

    def _lost(
        self, what: str, error: RuntimeError, patience: float = SETTLING_S
    ) -> CollectiveError:
        why = None if self.explain is None else self.explain(patience)
        return why or self._roll.lost(what, error, patience=patience)

    @contextlib.contextmanager
    def _meeting(self, purpose: str, *, timeout_s: float | None = None) -> Iterator[float]:
        """Record which collective this rank has reached; an error inside names the missing ranks.

        Yields the time at which to stop waiting.
        """
        if self._control is None:
            raise EngineError(
                f"this rank has closed its process group and cannot take part in {purpose!r}",
                "make this call before closing the engine",
                "group",
            )
        timeout = self._timeout.total_seconds() if timeout_s is None else timeout_s
        began = time.monotonic()
        self._roll.here(purpose)
        try:
            yield began + timeout
        except RuntimeError as error:
            if isinstance(error, CollectiveError):
                raise
            waited = time.monotonic() - began
            late = waited >= 0.95 * timeout
            when = f" within {timeout:g} s" if late else f"; detected after {waited:.1f} s"
            what = f"not every rank reached {purpose!r}{when}"
            raise self._lost(what, error, 0 if late else SETTLING_S) from error

    def _wake(self, group: Any = None) -> None:
        """Abort this rank's pending collectives; the group cannot be used afterwards.

        gloo closes all connections of a group when one receive times out.
        """
        neighbour = (self.rank + 1) % self.world_size
        with contextlib.suppress(RuntimeError, ValueError):
            group = self._control if group is None else group
            token = torch.zeros(1, dtype=torch.uint8)
            nothing: Any = dist.irecv(token, neighbour, group=group, tag=_NOBODY_SENDS)
            nothing.wait(timedelta(milliseconds=1))

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Stop waiting for a late rank that cannot come: it has ended, or is in a later pass."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                if self._roll.dead() or self._roll.ahead():
                    self._wake()
                    return

        looking = threading.Thread(target=look, name="zerotune-looking", daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join(ANSWER_S)

    def close(self) -> None:
        """Leave the group; the last user destroys one that zerotune created. Repeatable."""
        if self._control is not None:
            control, self._control = self._control, None
            self._roll.leave()
            end_groups([control])
        if self._owned:
            self._owned = False
            started.leave()


def together(group: ProcessGroup, purpose: str, work: Callable[[], T]) -> list[T]:
    """Run a function on every rank, and return the results of all ranks, in rank order.

    Collective: every rank must call it. If the function fails on one rank, all ranks raise an
    error.

    Args:
        group: The processes.
        purpose: Name of the operation, for error messages.
        work: Function that this rank runs. The function must not use collectives, because ranks
            would wait forever for a rank on which the function fails.
    """
    result: T | None = None
    failure: ZeroTuneError | None = None
    try:
        result = work()
    except ZeroTuneError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - the others wait for what became of this rank
        fix = fix_of(error) if isinstance(error, OSError) else None
        failure = CheckpointError(f"{type(error).__name__}: {error}", fix, purpose)
        failure.__cause__ = error
    group.barrier(purpose)
    outcomes = group.gather((result, failure))
    if failure is not None:
        raise failure
    for rank, (_, other) in enumerate(outcomes):
        if other is not None:
            raise other.passed_on(rank)
    return [outcome for outcome, _ in outcomes]
