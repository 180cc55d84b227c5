"""Anonymous memory that ranks on one machine share, and through which they synchronise.

The memory is an unnamed file, so it is freed when the processes that share it end, even if they are
killed. Ranks synchronise with counters in shared memory. A waiting rank checks whether the
processes of the missing ranks are alive, and raises an error that names the missing ranks and their
states.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from typing import Any, Final

import attrs
import torch
from typing_extensions import override

from zerotune._util.closing import Closable
from zerotune._util.proc import ENDED
from zerotune.backend.accelerator import current_accelerator
from zerotune.backend.distributed import ProcessGroup, together
from zerotune.backend.host.units import HostMemory, Unit, tensors_of
from zerotune.backend.roll_call import LOOK_S
from zerotune.errors import CollectiveError, EngineError
from zerotune.plan.facts import UNIT_ALIGNED

_PAUSE_S: Final = 20e-6, 1e-3
"""Shortest and longest pause in seconds between two reads of a counter."""
_LONGEST_REASON: Final = 600
_STAGED, _ADDED, _PASSED, _STATE = range(4)
_LEFT, _FAILED = 1, 2
END, STEP, DROPPED = -1, -2, -3
_MARKS: Final = {
    END: "the end of its backward pass",
    STEP: "its step",
    DROPPED: "dropping its gradients",
}
"""Events that a rank may report instead of a unit's gradients."""


class SharedMemory(Closable):
    """Memory shared by all ranks of a machine. Collective: every rank must create it.

    Args:
        group: The ranks.
        nbytes: Size in bytes; only pages that are written occupy memory.
    """

    def __init__(self, group: ProcessGroup, *, nbytes: int) -> None:
        self._fd, self._nbytes = -1, nbytes
        self._locked: list[torch.Tensor] = []
        (pid, number), *_ = together(group, "share memory", lambda: self._make(group))
        together(group, "map shared memory", lambda: self._map_it(group, pid, number))

    def _make(self, group: ProcessGroup) -> tuple[int, int]:
        if group.is_main:
            self._fd = os.memfd_create("zerotune")
            os.ftruncate(self._fd, self._nbytes)
        return os.getpid(), self._fd

    def _map_it(self, group: ProcessGroup, pid: int, number: int) -> None:
        try:
            if not group.is_main:
                self._fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
            self._map = self._mapped(shared=True)
        except (OSError, RuntimeError) as error:
            raise EngineError(
                "this rank cannot share memory with rank 0",
                "run all ranks of a machine as the same user in the same container, or resolve "
                'the plan with engine="deepspeed"',
                "engine",
                error,
            ) from error

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor in the shared memory; the memory lasts as long as the tensor.

        Args:
            start: Offset of the first byte.
            numel: Number of elements of the new tensor.
            dtype: Dtype of the new tensor.
        """
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=start)

    def reserve(self, start: int, nbytes: int) -> None:
        """Allocate memory now, so that a shortage raises an error here instead of at first use.

        Args:
            start: Offset of the first byte.
            nbytes: Number of bytes to allocate.

        Raises:
            OSError: Not enough memory is free.
        """
        os.posix_fallocate(self._fd, start, nbytes)

    def lock(self, tensor: torch.Tensor) -> None:
        """Page-lock a tensor of this memory; the device must be able to register memory.

        Args:
            tensor: A result of ``SharedMemory.tensor``.
        """
        current_accelerator().register_memory(tensor)
        self._locked.append(tensor)

    def apart(self) -> Any:
        """Return a private, copy-on-write mapping of the shared memory."""
        return self._mapped(shared=False)

    def _mapped(self, *, shared: bool) -> Any:
        """Map the memory; unlike an ``mmap``, the result keeps no descriptor open."""
        file = f"/proc/self/fd/{self._fd}"
        return torch.from_file(file, shared=shared, size=self._nbytes, dtype=torch.uint8).numpy()

    @property
    def is_open(self) -> bool:
        """Whether ``close`` has not been called yet."""
        return self._fd >= 0

    @override
    def close(self) -> None:
        """Unlock all tensors. The memory is freed when its last tensor is deleted."""
        if self._locked:
            # Weights of the next pass may still be on their way to the device.
            current_accelerator().synchronize()
        for tensor in self._locked:
            current_accelerator().unregister_memory(tensor)
        self._locked = []
        if self.is_open:
            os.close(self._fd)
            self._fd = -1
            del self._map


class SharedHostMemory(HostMemory, Closable):
    """One shared copy of the weights for all ranks; each rank updates its share of every unit.

    Rank 0's weights are copied into the memory. Collective: all ranks must create and fill the
    memory together.

    Args:
        group: The ranks.
        nbytes: Size in bytes, enough for all weights.
        pin: Whether to page-lock the weights.
    """

    def __init__(self, group: ProcessGroup, *, nbytes: int, pin: bool) -> None:
        super().__init__(pin=pin)
        self._group = group
        self._memory = SharedMemory(group, nbytes=nbytes)
        self._places: dict[int, int] = {}
        self._at = 0
        self._apart: Any = None

    @classmethod
    def of_model(
        cls, model: torch.nn.Module, group: ProcessGroup, *, pin: bool
    ) -> SharedHostMemory:
        """Create memory for all parameters of a model, large enough for any division into units.

        Args:
            model: The model.
            group: The ranks.
            pin: Whether to page-lock the weights.
        """
        tensors = tensors_of(model)
        sizes = (_paged((t.numel() + UNIT_ALIGNED) * t.element_size()) for t in tensors)
        return cls(group, nbytes=sum(sizes), pin=pin)

    @override
    def weights(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        start, nbytes = self._at, _paged(numel * dtype.itemsize)
        self._at += nbytes
        if self._group.is_main:
            self._memory.reserve(start, nbytes)
        weights = self._memory.tensor(start, numel, dtype)
        if self.pins:
            self._memory.lock(weights)
        self._places[weights.data_ptr()] = start
        return weights

    @override
    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._group.is_main:
            target.copy_(source)

    @override
    def filled(self) -> None:
        self._group.barrier("share a unit's weights")

    @override
    def share(self, span: slice) -> slice:
        vectors = -(-(span.stop - span.start) // UNIT_ALIGNED)
        size = -(-vectors // self._group.world_size) * UNIT_ALIGNED
        start = span.start + self._group.rank * size
        return slice(min(start, span.stop), min(start + size, span.stop))

    @override
    def owned(self, sizes: Sequence[int]) -> Sequence[bool]:
        loads, owners = [0] * self._group.world_size, [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
            owners[index] = loads.index(min(loads))
            loads[owners[index]] += sizes[index]
        return [owner == self._group.rank for owner in owners]

    @override
    def keep(self, weights: torch.Tensor) -> torch.Tensor:
        if self._apart is None:
            self._apart = self._memory.apart()
        start = self._places[weights.data_ptr()]
        return torch.frombuffer(
            self._apart, dtype=weights.dtype, count=weights.numel(), offset=start
        )

    @override
    def close(self) -> None:
        self._apart = None
        self._memory.close()


def _paged(nbytes: int) -> int:
    """A size rounded up to whole pages, because memory is locked by page."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


# -- Synchronisation of the ranks.


@attrs.frozen(kw_only=True, eq=False)
class _Tables:
    """Shared tables with one entry per rank. Alternating tables exist twice.

    A fast rank is at most one event ahead of ranks that still read the previous entry.
    """

    counters: torch.Tensor
    written: torch.Tensor
    """Number of the step that last updated a rank's share of each unit."""
    unit: torch.Tensor
    """Last event: index of the unit whose gradients arrived, or a mark. Alternating."""
    came: torch.Tensor
    """Members of that unit that have a gradient. Alternating."""
    squares: torch.Tensor
    """Sums of squared gradients of a rank's share, by member and by ZeRO-2's owning rank."""
    flags: torch.Tensor
    """Flags of ``any``. Alternating."""
    reasons: torch.Tensor
    stages: torch.Tensor
    """Staging buffers for gradients, in bytes."""


class Meeting(Closable):
    """Synchronisation of a machine's ranks. Collective: every rank must create it.

    Waiting raises an error if an awaited rank has closed its engine, has failed or has ended.

    Args:
        group: The ranks.
        units: The trained units.
        timeout_s: Seconds after which waiting raises an error.
        pin: Whether to page-lock the staging buffers of gradients.
    """

    def __init__(
        self, group: ProcessGroup, *, units: Sequence[Unit], timeout_s: float, pin: bool
    ) -> None:
        self._group, self._units, self._timeout_s = group, units, timeout_s
        self._rank, size = group.rank, group.world_size
        members = max(len(unit.members) for unit in units)
        kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "counters": (torch.int64, (size, 4)),
            "written": (torch.int64, (size, len(units))),
            "unit": (torch.int64, (2, size)),
            "came": (torch.uint8, (2, size, members)),
            "squares": (torch.float64, (size, members, size)),
            "flags": (torch.uint8, (2, size)),
            "reasons": (torch.uint8, (size, _LONGEST_REASON)),
            "stages": (torch.uint8, (size, _paged(max(unit.nbytes for unit in units)))),
        }
        sizes = [_paged(math.prod(shape) * dtype.itemsize) for dtype, shape in kinds.values()]
        self._memory = SharedMemory(group, nbytes=sum(sizes))
        tensors = {
            name: self._memory.tensor(sum(sizes[:index]), math.prod(shape), dtype).view(shape)
            for index, (name, (dtype, shape)) in enumerate(kinds.items())
        }
        self._tables = _Tables(**tensors)
        self.locks: Final = pin
        """Whether this rank's staging buffers are page-locked; ``is_pinned`` cannot say that."""
        if pin:
            self._memory.lock(self._tables.stages[self._rank])
        self._error: EngineError | None = None

    def stage(self, unit: Unit) -> torch.Tensor:
        """Return this rank's staging buffer for ``unit``'s gradients, in the unit's layout."""
        return self._tables.stages[self._rank, : unit.nbytes].view(unit.host.dtype)

    def stages(self, unit: Unit) -> Sequence[torch.Tensor]:
        """Return all ranks' staging buffers for ``unit``'s gradients, by rank."""
        return self._tables.stages[:, : unit.nbytes].view(unit.host.dtype).unbind()

    def agree(self, index: int, came: Collection[int] = ()) -> None:
        """Wait until every rank has staged gradients; check that the parameters match.

        Args:
            index: Index of the unit, or one of ``END``, ``STEP`` and ``DROPPED``.
            came: Indices of the unit's parameters that have a gradient.

        Raises:
            CollectiveError: A rank is missing, or has staged the gradients of a different unit or
                of different parameters.
        """
        counters = self._tables.counters[:, _STAGED]
        side = int(counters[self._rank]) & 1
        units, members = self._tables.unit[side], self._tables.came[side]
        units[self._rank] = index
        members[self._rank] = 0
        members[self._rank, list(came)] = 1
        self._count(_STAGED)
        self._wait(counters, self._name(index))
        if bool((units != index).any()) or bool((members != members[0]).any()):
            self._fail_with(self._unlike(units.tolist(), members))

    def _unlike(self, units: Sequence[int], came: torch.Tensor) -> CollectiveError:
        other = next((rank for rank, unit in enumerate(units) if unit != units[0]), None)
        if other is not None:
            key, first = "gradients", self._name(units[0])
            what = f"rank {other} has reached {self._name(units[other])}, but rank 0 {first}"
        else:
            rank, member = (came != came[0]).nonzero()[0].tolist()
            having, lacking = (rank, 0) if came[rank, member] else (0, rank)
            key = f"model.{self._units[units[0]].members[member].name}"
            what = f"the parameter has a gradient on rank {having}, but none on rank {lacking}"
        return CollectiveError(
            f"the ranks' backward passes differ: {what}",
            "make the forward pass use the same parameters in the same order on every rank",
            key,
        )

    def _name(self, index: int) -> str:
        return _MARKS.get(index) or f"the gradients of {self._units[index].name}"

    def add_squares(
        self, own: Mapping[tuple[int, int], float], came: Collection[int]
    ) -> dict[tuple[int, int], float]:
        """Return sums of squared gradients over all ranks, for the unit last passed to ``agree``.

        Args:
            own: This rank's sums, by the parameter's index and the rank that owns the elements
                under ZeRO-2.
            came: Indices of the unit's parameters that have a gradient.
        """
        squares = self._tables.squares
        squares[self._rank] = 0
        for (member, rank), square in own.items():
            squares[self._rank, member, rank] = square
        self._count(_ADDED)
        self._wait(self._tables.counters[:, _ADDED], "add up gradients")
        total = squares.sum(0).tolist()
        return {
            (member, rank): total[member][rank]
            for member in came
            for rank in range(self._group.world_size)
        }

    def barrier(self, purpose: str) -> None:
        """Wait until every rank has called ``barrier``.

        Args:
            purpose: Name of the operation, for the error message.
        """
        self._count(_PASSED)
        self._wait(self._tables.counters[:, _PASSED], purpose)

    def any(self, flag: bool, purpose: str) -> bool:
        """Return whether a flag is true on any rank.

        Args:
            flag: This rank's flag.
            purpose: Name of the operation, for the error message.
        """
        flags = self._tables.flags[int(self._tables.counters[self._rank, _PASSED]) & 1]
        flags[self._rank] = flag
        self.barrier(purpose)
        return bool(flags.any())

    def wrote(self, unit: int, step: int) -> None:
        """Announce that this rank's share of a unit is updated.

        Args:
            unit: Index of the unit.
            step: Number of the optimizer step.
        """
        self._tables.written[self._rank, unit] = step

    def wait_written(self, unit: int, step: int) -> None:
        """Wait until all ranks' shares of a unit are updated.

        Args:
            unit: Index of the unit.
            step: Number of the optimizer step.
        """
        self._wait(self._tables.written[:, unit], f"step {self._units[unit].name}", at_least=step)

    # -- Missing ranks.

    @contextmanager
    def failing(self) -> Iterator[None]:
        """If the block raises an error, make all other ranks raise one too."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Make all ranks that wait for this one raise an error.

        Args:
            error: This rank's error.
        """
        if not self._tables.counters[self._rank, _STATE]:
            text = f"{type(error).__name__}: {error}".encode()[:_LONGEST_REASON]
            reason = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._tables.reasons[self._rank, : len(text)] = reason
            self._tables.counters[self._rank, _STATE] = _FAILED

    def leave(self) -> None:
        """Announce that this rank has closed its engine."""
        if not self._tables.counters[self._rank, _STATE]:
            self._tables.counters[self._rank, _STATE] = _LEFT

    @override
    def close(self) -> None:
        if self._memory.is_open:
            self.leave()
            del self._tables, self._units
        self._memory.close()

    def _count(self, counter: int) -> None:
        self._raise()
        self._tables.counters[self._rank, counter] += 1

    def _wait(self, counters: torch.Tensor, purpose: str, at_least: int | None = None) -> None:
        count = int(counters[self._rank]) if at_least is None else at_least
        began = looked = time.monotonic()
        pause, longest = _PAUSE_S
        while late := [rank for rank, each in enumerate(counters.tolist()) if each < count]:
            self._raise()
            now = time.monotonic()
            self._look(late, purpose, processes=now - looked >= LOOK_S)
            if now - looked >= LOOK_S:
                looked = now
            if now - began >= self._timeout_s:
                self._missing(purpose, dict.fromkeys(late, "never arrived") | self._group.ended())
            time.sleep(pause)
            pause = min(1.5 * pause, longest)

    def _look(self, late: Sequence[int], purpose: str, *, processes: bool) -> None:
        """Raise an error if a rank that this one waits for can no longer arrive."""
        states = self._tables.counters[:, _STATE].tolist()
        if states[self._rank] == _LEFT:
            self._fail_with(EngineError("this rank has closed its engine", key="engine"))
        for rank in late:
            if states[rank] == _FAILED:
                self._failed(rank)
        gone = {rank: "has closed its engine" for rank in late if states[rank] == _LEFT}
        if processes:
            ended = self._group.ended()
            gone |= {rank: ended[rank] for rank in late if ended.get(rank, "").startswith(ENDED)}
        if gone:
            self._missing(purpose, gone)

    def _failed(self, rank: int) -> None:
        text = bytes(self._tables.reasons[rank].tolist()).rstrip(b"\0").decode(errors="replace")
        self._fail_with(
            EngineError(
                f"the optimizer step failed on rank {rank} ({text})",
                "resume from the last checkpoint, because the ranks' weights now differ; see "
                "the failed rank's log for the full error",
                f"rank {rank}",
            )
        )

    def _missing(self, purpose: str, absent: Mapping[int, str]) -> None:
        states = "; ".join(f"rank {rank} {state}" for rank, state in sorted(absent.items()))
        self._fail_with(
            CollectiveError(
                f"not every rank reached {purpose!r} ({states})",
                "make this call on every rank, not inside `if rank == 0`; if a rank has ended, "
                "look for the error in that rank's log",
                f"rank {self._rank}",
            )
        )

    def _fail_with(self, error: EngineError) -> None:
        """Raise an error, now and in every later call, because the ranks are out of step."""
        self._error = self._error or error
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            # Raise a new copy each time: a raised error's traceback keeps objects alive.
            raise copy(self._error)


class WrittenByAll(Future[None]):
    """Future that is done after this rank's update of a unit; ``result`` waits for all ranks."""

    def __init__(self, meeting: Meeting, *, unit: int, step: int) -> None:
        super().__init__()
        self._meeting, self._unit, self._step = meeting, unit, step

    @override
    def set_result(self, result: None) -> None:
        self._meeting.wrote(self._unit, self._step)
        super().set_result(result)

    @override
    def result(self, timeout: float | None = None) -> None:
        super().result(timeout)
        self._meeting.wait_written(self._unit, self._step)
