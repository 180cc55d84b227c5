"""The processes that train together, however they were launched."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist

from zerotune.errors import CollectiveError, EngineError, InvalidValueError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DEFAULT_TIMEOUT_S = 600.0
_NCCL: Final = frozenset({"cuda", "rocm"})
_DEEPSPEED_CACHES: Final = (
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "mesh_device",
)


@attrs.frozen(kw_only=True)
class Launch:
    """Who this process is, read from what ``torchrun``, ``accelerate`` or ``deepspeed`` set."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False
    """Whether a launcher set the environment; ``False`` under a bare ``python``."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Launch:
        """Read the launcher's variables.

        Raises:
            EngineError: Some of the variables are set and others are missing.
            InvalidValueError: A variable is not a whole number, or contradicts another.
        """
        variables = os.environ if environment is None else environment
        given = [name for name in _TORCHRUN if name in variables]
        # `accelerate launch` with one process, and many notebooks, set some without meaning a
        # group; only RANK and WORLD_SIZE together ask for one.
        if "RANK" not in given and "WORLD_SIZE" not in given:
            return cls()
        missing = [name for name in _TORCHRUN if name not in given]
        if missing:
            raise EngineError(
                f"the launcher set {', '.join(given)} but not {', '.join(missing)}",
                fix="start with torchrun, accelerate launch or deepspeed, or set all of them, "
                "or unset them for a single process",
            )
        launch = cls(
            rank=_whole(variables, "RANK"),
            local_rank=_whole(variables, "LOCAL_RANK"),
            world_size=_whole(variables, "WORLD_SIZE"),
            launched=True,
        )
        if not 0 <= launch.rank < launch.world_size:
            raise InvalidValueError(
                f"a rank lies between 0 and WORLD_SIZE - 1 = {launch.world_size - 1}",
                key="RANK",
                value=launch.rank,
                fix="let the launcher set both",
            )
        return launch


def _whole(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise InvalidValueError(
            "must be a whole number", key=name, value=variables[name], fix="let the launcher set it"
        ) from None


def communication_backend(accelerator: str) -> str:
    """What processes talk through when they train on an accelerator.

    Args:
        accelerator: Its name in a plan's platform, in DeepSpeed or in torch.
    """
    return "nccl" if accelerator in _NCCL else "gloo"


class ProcessGroup:
    """The default process group of torch, with errors that name the missing rank.

    Args:
        backend: ``"gloo"``, ``"nccl"``, … used when no group exists yet.
        launch: Who this process is; read from the environment when not given.
        timeout_s: Seconds after which a collective gives up.

    An existing group (the user's, or accelerate's) is joined and left alone on ``close``. One
    that was started here is shared by all later ``ProcessGroup`` objects. The last to close ends
    it, unless a launcher made this process for its sake: such a group lasts until the process
    exits, because ranks cannot reliably meet a second time in the launcher's store.
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
            _start(backend, launch, self._timeout)
        self._owned = _started.join()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = launch.local_rank if launch.launched else 0
        self._control: Any = None
        self._met = 0
        if self.world_size > 1:
            # NCCL can neither name a missing rank nor move objects without a GPU.
            self._control = dist.new_group(backend="gloo", timeout=self._timeout)

    @classmethod
    def alone(cls) -> ProcessGroup:
        """A group of this process only, whatever else runs; starts nothing."""
        group = cls.__new__(cls)
        group._timeout = timedelta(seconds=_DEFAULT_TIMEOUT_S)
        group._owned = False
        group.rank, group.world_size, group.local_rank = 0, 1, 0
        group._control = None
        group._met = 0
        return group

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def barrier(self, purpose: str, *, timeout_s: float | None = None) -> None:
        """Wait for all ranks.

        Args:
            purpose: What the ranks are about to do, for the message.
            timeout_s: Seconds to wait; the group's timeout when not given.

        Raises:
            CollectiveError: A rank did not come; the message names it.
        """
        if self._control is None:
            return
        timeout = self._timeout if timeout_s is None else timedelta(seconds=timeout_s)
        self._met += 1
        _arrive(self._key(self.rank))
        try:
            dist.monitored_barrier(group=self._control, timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            # A rank that died closes its connection, and gloo then names an address, no rank.
            missing = [rank for rank in range(self.world_size) if not _arrived(self._key(rank))]
            who = f"rank(s) {', '.join(map(str, missing))} missing; " if missing else ""
            raise CollectiveError(
                f"not every rank came to {purpose!r} within {timeout.total_seconds():g} s "
                f"({who}{_first_line(error)})",
                key=f"rank {self.rank}",
                fix="call it on every rank, not inside `if rank == 0`, and look in the log of "
                "the rank named for why it stopped",
            ) from error

    def _key(self, rank: int) -> str:
        return f"zerotune/{self._control.group_name}/{self._met}/{rank}"

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """The picklable ``value`` of rank ``source``, on every rank."""
        if self._control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self._control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The picklable ``value`` of every rank, in rank order, on every rank."""
        if self._control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def agree(self, value: Any, what: str) -> None:
        """Check that every rank holds the same ``value``.

        Raises:
            CollectiveError: They differ; the message gives every rank's value.
        """
        values = self.gather(value)
        if any(other != values[0] for other in values):
            each = ", ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(values))
            raise CollectiveError(
                f"the ranks disagree ({each})", key=what, fix="give every rank the same arguments"
            )

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add ``tensor`` over all ranks, in place; returns it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, value: float, *, device: torch.device) -> float:
        """The mean of a number over all ranks."""
        if self.world_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64 if device.type != "mps" else torch.float32)
        return float(self.sum_(total.to(device))) / self.world_size

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` holds on some rank; a few bytes, without the accelerator."""
        if self._control is None:
            return flag
        found = torch.tensor(int(flag), dtype=torch.uint8)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._control)
        return bool(found)

    def close(self) -> None:
        """Leave the group; the last to leave ends it, if it was started here."""
        if self._owned:
            self._owned = False
            _started.leave()


class _Started:
    """Who uses the default group, when it was started here."""

    def __init__(self) -> None:
        self._group: Any = None
        self._users = 0
        self._launched = False

    def note(self, *, launched: bool) -> None:
        """The default group has just been started here."""
        self._group, self._users, self._launched = dist.group.WORLD, 0, launched
        if launched:
            atexit.register(self._end)

    def join(self) -> bool:
        """Count a user; ``False`` when the default group is somebody else's."""
        if self._group is None or dist.group.WORLD is not self._group:
            return False
        self._users += 1
        return True

    def leave(self) -> None:
        """A user is done."""
        self._users -= 1
        if self._users == 0 and not self._launched:
            self._end()

    def _end(self) -> None:
        if dist.is_initialized() and dist.group.WORLD is self._group:
            dist.destroy_process_group()
            _forget_in_deepspeed()
        self._group = None


def _forget_in_deepspeed() -> None:
    """Make DeepSpeed forget the groups of a default process group that was just destroyed.

    It keeps them in module globals (0.18.9 for ever, 0.19.8 until they are destroyed through its
    own function), and the next engine of the process fails with "Group … is not registered".
    """
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is None:
        return
    for name in _DEEPSPEED_CACHES:
        if hasattr(groups, name):
            setattr(groups, name, None)


_started = _Started()


def _start(backend: str, launch: Launch, timeout: timedelta) -> None:
    if launch.launched:
        dist.init_process_group(backend=backend, timeout=timeout)
        _started.note(launched=True)
        return
    # A store in this process's memory: no port, no environment, no MPI.
    dist.init_process_group(
        backend=backend,
        store=torch._C._distributed_c10d.HashStore(),
        rank=0,
        world_size=1,
        timeout=timeout,
    )
    _started.note(launched=False)


def _arrive(key: str) -> None:
    """Leave a note for who may look for this rank."""
    with contextlib.suppress(RuntimeError):
        dist.distributed_c10d._get_default_store().set(key, "here")


def _arrived(key: str) -> bool:
    try:
        return bool(dist.distributed_c10d._get_default_store().check([key]))
    except RuntimeError:
        return True  # The store is gone with the rank that held it, which gloo names.


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "rank" in line.lower()]
    return lines[0] if lines else str(error).splitlines()[0]
