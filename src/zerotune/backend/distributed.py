"""Collectives between the training processes, with errors that name the missing rank."""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import importlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, TypeVar

import attrs
import psutil
import torch
import torch.distributed as dist

from zerotune._util.files import fix_of
from zerotune._util.proc import ENDED, ProcessIdentity
from zerotune._util.text import differences
from zerotune.errors import (
    CheckpointError,
    CollectiveError,
    EngineError,
    InvalidValueError,
    ZeroTuneError,
)

T = TypeVar("T")

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TASKS: Final = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which ``srun`` and MPI's launchers write the number of processes they start."""
_DEFAULT_TIMEOUT_S = 600.0
_SETTLING_S: Final = 2.0
"""Seconds that a process may take to end after its connections are closed."""
_ANSWER_S: Final = 3.0
"""Seconds that the store may take to answer when a rank is missing."""
_LAST_WORD_S: Final = 1.0
"""Seconds for which rank 0 tries to inform each remaining rank that a rank is lost."""
_STORE_S: Final = 10.0
"""Seconds that a separate store connection waits for a missing key."""
_SILENCE_S: Final = 5.0
"""Seconds after a failed collective in which every remaining rank notices the failure too."""
LOOK_S: Final = 0.5
"""Seconds between checks that the processes of missing ranks are still alive."""
_NOBODY_SENDS: Final = 1 << 30
"""A tag that no message has."""
_NO_START: Final = "all ranks arrived, but the process group could not start"
_LONGEST_LINE: Final = 200
_COLLECTIVE: Final = re.compile(
    r"gloo|NCCL|Connection (closed by peer|reset)|Broken pipe|Socket Timeout|"
    r"Timed out waiting|pair closure|c10d|ProcessGroup"
)
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
    """Rank and world size, as set by ``torchrun``, ``accelerate`` or ``deepspeed``."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False
    """Whether a launcher set the environment; ``False`` under a bare ``python``."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Launch:
        """Read the launcher's variables.

        Args:
            environment: Variables by name; default: ``os.environ``.
        """
        variables = os.environ if environment is None else environment
        given = [name for name in _TORCHRUN if name in variables]
        # `accelerate launch` with one process, and many notebooks, set some of these variables
        # without requesting a process group; only RANK or WORLD_SIZE requests one.
        if "RANK" not in given and "WORLD_SIZE" not in given:
            _check_single(variables)
            return cls()
        missing = [name for name in _TORCHRUN if name not in given]
        if missing:
            raise EngineError(
                f"the launcher set {', '.join(given)} but not {', '.join(missing)}",
                "use a launcher (torchrun, accelerate launch or deepspeed) or set the missing "
                "variables; to run a single process, unset all of these variables",
            )
        numbers = {}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            try:
                numbers[name.lower()] = int(variables[name])
            except ValueError:
                raise InvalidValueError(
                    "must be a whole number", f"let the launcher set {name}", name, variables[name]
                ) from None
        launch = cls(**numbers, launched=True)
        if not 0 <= launch.rank < launch.world_size:
            raise InvalidValueError(
                f"must be between 0 and WORLD_SIZE - 1 = {launch.world_size - 1}",
                "let the launcher set RANK and WORLD_SIZE",
                "RANK",
                launch.rank,
            )
        return launch


def _check_single(variables: Mapping[str, str]) -> None:
    """Check that srun or MPI started no other process, which would train alone and save as well."""
    if dist.is_available() and dist.is_initialized():
        return
    for name in _TASKS:
        count = variables.get(name, "1")
        if count not in ("0", "1"):
            raise EngineError(
                f"{count} processes were started without RANK and MASTER_ADDR, so each would train "
                "alone and write the same files",
                "start one launcher per machine, which starts the processes (srun "
                f"--ntasks-per-node=1 torchrun --nnodes=1 --nproc-per-node={count} train.py), or "
                f"unset {name} to train in this process alone",
                name,
                count,
            )


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size, from the launcher's variables if no process group exists yet."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launch = Launch.from_environment()
    return launch.rank, launch.world_size


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
            _start_default_group(backend, launch, self._timeout)
        self._owned = _started.join()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = launch.local_rank if launch.launched else 0
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
        group._control = None
        return group

    def _connect(self) -> None:
        """Create the gloo group for control messages, and wait for all ranks."""
        before = _started.roll
        try:
            # NCCL can neither name a missing rank nor move objects without a GPU.
            self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        except RuntimeError as error:
            if before is None or not is_collective(error):
                raise
            raise before.lost(_NO_START, error) from error
        self._roll = _RollCall(self._control.group_name, rank=self.rank, before=before)
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
        with self._meeting(purpose, timeout_s=timeout_s) as deadline:
            self._meet(deadline)

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

    def agree(self, value: Any, what: str, *, fix: str = "give every rank the same value") -> None:
        """Check that all ranks have the same value; otherwise raise an error with all values.

        Args:
            value: This rank's picklable value.
            what: Name of the value, for the error message.
            fix: Fix that the error message suggests.
        """
        purpose = f"compare {what}"
        # Values may be long, and are needed only where they differ.
        digests = self.gather(hashlib.sha256(repr(value).encode()).digest(), purpose=purpose)
        if all(other == digests[0] for other in digests):
            return
        values = self.gather(value, purpose=purpose)
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
            raise self._roll.lost(f"a rank was lost during {doing}", error) from error

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
            raise self._roll.lost(what, error, patience=0 if late else _SETTLING_S) from error

    def _meet(self, deadline: float) -> None:
        """Every rank reports to rank 0, which answers all; each rank waits until its own deadline.

        In torch's ``monitored_barrier``, all ranks except rank 0 wait for the group's timeout.
        """
        token, tag = torch.zeros(1, dtype=torch.uint8), 2 * self._roll.count
        if not self.is_main:
            with self._looking():
                _await(self._send(token, 0, tag), deadline)
                _await(self._receive(token, 0, tag + 1), deadline)
            if bool(token):
                raise RuntimeError("rank 0 has lost another rank")
            return
        others = range(1, self.world_size)
        coming = [self._receive(token.clone(), rank, tag) for rank in others]
        lost: RuntimeError | None = None
        with self._looking():
            for work in coming:
                try:
                    _await(work, deadline)
                except RuntimeError as error:
                    lost = lost or error
                    # Wait briefly for ranks that are about to arrive, so that they learn of the
                    # lost rank.
                    deadline = min(deadline, time.monotonic() + _SETTLING_S)
        token.fill_(lost is not None)
        for rank in others:
            with contextlib.nullcontext() if lost is None else contextlib.suppress(RuntimeError):
                limit = deadline if lost is None else time.monotonic() + _LAST_WORD_S
                _await(self._send(token, rank, tag + 1), limit)
        if lost is not None:
            raise lost

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        return dist.isend(tensor, rank, group=self._control, tag=tag)

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        return dist.irecv(tensor, rank, group=self._control, tag=tag)

    def _wake(self) -> None:
        """Abort this rank's pending collectives; the group cannot be used afterwards.

        gloo closes all connections of a group when one receive times out.
        """
        neighbour = (self.rank + 1) % self.world_size
        with contextlib.suppress(RuntimeError, ValueError):
            _await(self._receive(torch.zeros(1, dtype=torch.uint8), neighbour, _NOBODY_SENDS), 0)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Stop waiting for a late rank that cannot come.

        The process of a rank has ended, which rank 0 tells all others, or is in a later pass.
        """
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                if (self.is_main and self._roll.dead()) or self._roll.ahead():
                    self._wake()
                    return

        looking = threading.Thread(target=look, name="zerotune-looking", daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join(_ANSWER_S)

    def close(self) -> None:
        """Leave the group; the last user destroys one that zerotune created. Repeatable."""
        if self._control is not None:
            control, self._control = self._control, None
            self._roll.leave()
            end_groups([control])
        if self._owned:
            self._owned = False
            _started.leave()


def end_groups(groups: list[Any]) -> None:
    """Destroy gloo groups of this process, with their threads and file descriptors.

    NCCL groups are left alone, because destroying an NCCL group waits for all ranks, including lost
    ones.

    Args:
        groups: torch's groups; the list is emptied.
    """
    while groups:
        group = groups.pop()
        # torch raises ValueError for a group that is already destroyed.
        with contextlib.suppress(ValueError):
            if dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)


@contextlib.contextmanager
def rendezvous(launch: Launch, *, timeout_s: float) -> Iterator[None]:
    """Wait for all launched processes before the block creates their process group.

    An error names the missing ranks, whereas torch reports only their number. If a process group
    already exists, ``rendezvous`` does not wait.

    Args:
        launch: This process's rank and world size.
        timeout_s: Seconds to wait.
    """
    if not launch.launched or launch.world_size == 1 or dist.is_initialized():
        yield
        return
    arrivals = _Arrivals(launch, timeout=timedelta(seconds=timeout_s))
    _started.arrivals = arrivals
    _started.roll = roll = arrivals.wait()
    try:
        yield
    except RuntimeError as error:
        if not is_collective(error):
            raise
        raise roll.lost(_NO_START, error) from error


class _Arrivals:
    """Record of the processes that have arrived, in the store that torch uses afterwards."""

    def __init__(self, launch: Launch, *, timeout: timedelta) -> None:
        self._launch, self._timeout = launch, timeout
        self._place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        # If this variable is set, torchrun's agent hosts the store, otherwise rank 0.
        self._agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        ranks = range(launch.world_size)
        self._keys = [f"zerotune/arrived/{self._attempt}/{rank}" for rank in ranks]
        self._store: Any = None
        self._began = time.monotonic()
        self._missing: list[int] = []
        self._holders: list[int] = []

    def wait(self) -> _RollCall:
        """Register this rank, wait for all ranks, and return the registry of the ranks."""
        try:
            host, _, port = self._place.rpartition(":")
            self._store = torch._C._distributed_c10d.TCPStore(
                host,
                int(port),
                self._launch.world_size,
                is_master=self._launch.rank == 0 and not self._agent,
                timeout=self._timeout,
                wait_for_workers=False,
                # torch's own rendezvous uses the same server while this store is referenced.
                multi_tenant=True,
            )
            note = [attrs.asdict(ProcessIdentity.current()), self._holds_store()]
            self._store.set(self._keys[self._launch.rank], json.dumps(note))
            if self._all_come():
                notes = [json.loads(each) for each in self._store.multi_get(self._keys)]
                name = f"start/{self._attempt}"
                roll = _RollCall(name, rank=self._launch.rank, store=self._store)
                roll.holders = [rank for rank, (_, holds) in enumerate(notes) if holds]
                roll.members = [ProcessIdentity(**process) for process, _ in notes]
                return roll
        except RuntimeError as error:
            raise self._absent(error) from error
        raise self._absent(None)

    def _holds_store(self) -> bool:
        """Whether the store runs in this rank's process or in its launcher."""
        if not self._agent:
            return self._launch.rank == 0
        port = int(self._place.rpartition(":")[2])
        with contextlib.suppress(psutil.Error):
            held = psutil.Process(os.getppid()).net_connections(kind="tcp")
            return any(one.status == "LISTEN" and one.laddr.port == port for one in held)
        return False

    def _all_come(self) -> bool:
        timeout, looked = self._timeout.total_seconds(), -LOOK_S
        self._missing = list(range(self._launch.world_size))
        while not self._store.check(self._keys):
            waited = time.monotonic() - self._began
            # Look before the timeout too: a rank that hosts the store may give up first and take
            # the store with it.
            if waited >= looked + LOOK_S:
                looked = waited
                self._look()
            if waited >= timeout:
                return False
            time.sleep(0.02)
        return True

    def _look(self) -> None:
        """Update which ranks are missing and which of the present ranks host the store."""
        for rank in tuple(self._missing):
            if self._store.check([self._keys[rank]]):
                self._missing.remove(rank)
                if json.loads(self._store.get(self._keys[rank]))[1]:
                    self._holders.append(rank)

    def _absent(self, error: RuntimeError | None) -> CollectiveError:
        timeout, waited = self._timeout.total_seconds(), time.monotonic() - self._began
        absent = dict.fromkeys(self._missing, "never arrived")
        if error is not None and (not absent or waited < 0.8 * timeout):
            if self._agent and self._holders:
                absent = dict.fromkeys(
                    self._holders,
                    "has exited, which also ended the rendezvous store that it hosted",
                )
            elif not self._agent and self._launch.rank:
                absent = {0: f"cannot be reached at {self._place}, where all ranks must connect"}
        what = f"not every rank reached the start within {timeout:g} s"
        return _naming_the_absent(what, absent, error, rank=self._launch.rank)


class _Started:
    """Reference count of the default group, if zerotune created it."""

    def __init__(self) -> None:
        self._group: Any = None
        self._users = 0
        self._launched = False

        self.arrivals: _Arrivals | None = None
        """A reference that keeps the store alive, which the default group uses too."""
        self.roll: _RollCall | None = None
        """Roll call of the launched processes; ``None`` if zerotune did not wait for them."""

    def note(self, *, launched: bool) -> None:
        """Record that zerotune has just created the default group."""
        self._group, self._users, self._launched = dist.group.WORLD, 0, launched
        atexit.unregister(self._end_at_exit)
        atexit.register(self._end_at_exit)

    def join(self) -> bool:
        """Add a user; return ``False`` if zerotune did not create the default group."""
        if self._group is None or dist.group.WORLD is not self._group:
            return False
        self._users += 1
        return True

    def leave(self) -> None:
        """Remove a user; removing the last user destroys the group, except under a launcher."""
        self._users -= 1
        if self._users == 0 and not self._launched:
            self._end()

    def _end(self) -> None:
        self.roll = None
        if dist.is_initialized() and dist.group.WORLD is self._group:
            dist.destroy_process_group()
            _forget_in_deepspeed()
        self._group = None

    def _end_at_exit(self) -> None:
        self._end()
        # Engines are reference cycles that hold groups. If a group survives until the interpreter
        # exits, its threads may still be running on a busy machine and abort the process.
        gc.collect()


def _forget_in_deepspeed(ended: Collection[Any] | None = None) -> None:
    """Clear DeepSpeed's references to destroyed groups.

    DeepSpeed caches groups in module globals. With a destroyed group there, the next engine of the
    process fails with "Group … is not registered". Without ``ended``, all caches are cleared.
    """
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is None:
        return
    for name in _DEEPSPEED_CACHES:
        if ended is None or getattr(groups, name, None) in ended:
            setattr(groups, name, None)


class DeepSpeedGroups:
    """Groups that DeepSpeed creates with the first engine and reuses for later engines."""

    def __init__(self) -> None:
        self._users = 0
        self._groups: list[Any] = []

    def join(self) -> None:
        """Count an engine as a user of the groups until it calls ``leave``."""
        self._users += 1

    def leave(self) -> None:
        """Remove an engine; removing the last engine destroys the groups."""
        self._users -= 1
        if self._users == 0:
            _forget_in_deepspeed(self._groups)
            end_groups(self._groups)

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Inside the block, record every new group as a DeepSpeed group."""
        groups = dist.distributed_c10d._world.pg_map
        before = set(groups)
        try:
            yield
        finally:
            self._groups += set(groups) - before


deepspeed_groups: Final = DeepSpeedGroups()
_started = _Started()


def _start_default_group(backend: str, launch: Launch, timeout: timedelta) -> None:
    # torch imports this module lazily. If it did so after the group exists, default arguments in
    # the module would keep the group alive forever.
    importlib.import_module("torch.distributed.nn.functional")
    if launch.launched:
        with rendezvous(launch, timeout_s=timeout.total_seconds()):
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


class _RollCall:
    """Each rank's last collective, recorded in the store, and whether its process lives.

    ``name`` is the group's name, equal on all ranks; ``before`` is the roll call to continue.
    """

    def __init__(
        self, name: str, *, rank: int, store: Any = None, before: _RollCall | None = None
    ) -> None:
        self._prefix, self._rank = f"zerotune/{name}", rank
        self._store = dist.distributed_c10d._get_default_store() if store is None else store
        # A read waits for an answer, and a connection lets nobody else write in the meantime: notes
        # would wait for a store whose process is stopped.
        self._reader = own_store(self._store)
        self.members: list[ProcessIdentity] = [] if before is None else before.members
        """Process of each rank."""
        self.holders: list[int] = [0] if before is None else before.holders
        """Ranks on whose process or launcher the store depends."""
        self.count = self.passes = 0
        """Numbers of collectives of this group, and of backward passes, so far."""

    def lost(
        self, what: str, error: RuntimeError, *, patience: float = _SETTLING_S
    ) -> CollectiveError:
        """Wait until the missing ranks are known, and return an error that names them.

        ``error`` is torch's error.
        """
        return _naming_the_absent(what, self.absent(patience=patience), error, rank=self._rank)

    def here(self, purpose: str) -> None:
        """Record in the store which collective this rank has reached."""
        self.count += 1
        self.note("", f"{self.count} {purpose}")

    def leave(self) -> None:
        """Record in the store that this rank takes part in nothing more."""
        self.note("", f"-1 has closed its engine after {self.passes} backward passes")
        # Closes the other connection.
        self._reader = self._store

    def note(self, what: str, value: str) -> None:
        """Record a value in the store."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._prefix}/{self._rank}{what}", value)

    def ahead(self) -> dict[int, str]:
        """Return ranks that wait for this one in a backward pass, while it waits elsewhere."""
        own, ahead = self.passes, {}
        with contextlib.suppress(RuntimeError):
            for rank in self._elsewhere():
                key = f"{self._prefix}/{rank}/passes"
                begun = int(self._reader.get(key)) if self._reader.check([key]) else 0
                if begun > own:
                    ahead[rank] = (
                        f"has begun pass {begun}, but the data of rank {self._rank} ended "
                        f"after {own}"
                    )
        return ahead

    def absent(self, *, patience: float) -> dict[int, str]:
        """Return the ranks that have not reached this rank's collective, each with its state.

        A process that has just lost its connections has ``patience`` seconds to end.
        """
        deadline = time.monotonic() + patience
        while not (absent := self.ended()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return absent or Asking().ask(self.ahead, seconds=_ANSWER_S) or self._behind(patience)

    def dead(self) -> bool:
        """Return whether any visible rank's process has ended; stopped processes do not count."""
        return any(state.startswith(ENDED) for state in self.ended().values())

    def ended(self) -> dict[int, str]:
        """Return the state of each rank on this machine whose process has ended or is stopped."""
        conditions = {rank: process.condition() for rank, process in enumerate(self.members)}
        return {
            rank: f"{condition} (process {self.members[rank].pid})"
            for rank, condition in conditions.items()
            if condition is not None
        }

    def _behind(self, patience: float) -> dict[int, str]:
        """The ranks that have not come as far as this one, each with its state.

        Every remaining rank notices a lost one, and records that in the store. Processes on other
        machines cannot be inspected, so a rank that records nothing counts as lost.
        """
        # A store whose host process is stopped never answers.
        asking = Asking()
        waits = patience > 0 and not all(member.visible() for member in self.members)
        if waits:
            asking.ask(lambda: self.here("a lost rank"), seconds=_ANSWER_S)
        deadline = time.monotonic() + _SILENCE_S * waits
        while absent := asking.ask(self._elsewhere, seconds=_ANSWER_S):
            if time.monotonic() >= deadline:
                return absent
            time.sleep(LOOK_S)
        if absent is None:
            what = "cannot be reached, and neither can its store"
            holders = [rank for rank in self.holders if rank < len(self.members)]
            return {
                rank: f"{what}{self._place(rank)}"
                for rank in holders
                if not self.members[rank].visible()
            }
        return {}

    def _place(self, rank: int) -> str:
        """The process of a rank on another machine; empty on this one."""
        member = self.members[rank]
        return "" if member.visible() else f" (process {member.pid} on {member.host})"

    def _elsewhere(self) -> dict[int, str]:
        absent = {}
        for rank in range(len(self.members)):
            key = f"{self._prefix}/{rank}"
            note = self._reader.get(key).decode() if self._reader.check([key]) else "0 nothing"
            count, _, purpose = note.partition(" ")
            if int(count) < self.count:
                state = f"last reached {purpose!r}" if int(count) else "never arrived"
                state = purpose if int(count) < 0 else state
                absent[rank] = f"{state}{self._place(rank)}"
        return absent


def own_store(store: Any = None) -> Any:
    """Open a separate connection to a store.

    Args:
        store: torch's store; default: the store of the default process group.
    """
    store = dist.distributed_c10d._get_default_store() if store is None else store
    with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
        store = store.clone()
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.set_timeout(timedelta(seconds=_STORE_S))
    return store


class Asking:
    """Run functions with a timeout, because a function may call a store that no longer responds."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def waits(self) -> bool:
        """Whether the last function is still running."""
        return self._thread is not None and self._thread.is_alive()

    def ask(self, question: Callable[[], T], *, seconds: float) -> T | None:
        """Run a function in a thread and return its result; ``None`` if it fails or times out.

        After a timeout the thread keeps running; no further function starts before it ends.

        Args:
            question: The function.
            seconds: Seconds to wait for the result.
        """
        answers: list[T] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError, OSError):
                answers.append(question())

        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return None
        self._thread = threading.Thread(target=run, name="zerotune-asking", daemon=True)
        self._thread.start()
        self._thread.join(seconds)
        return answers[0] if answers else None


def _naming_the_absent(
    what: str, absent: Mapping[int, str], error: Exception | None, *, rank: int
) -> CollectiveError:
    ranks = f"Rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
    states = "; ".join(f"rank {each} {state}" for each, state in absent.items())
    who = f"{ranks} {'are' if len(absent) > 1 else 'is'} missing: {states}"
    if not absent:
        who = "no rank is missing now, so a rank timed out or failed earlier"
        if error is not None:
            # torch's message begins with the C++ source line that raised the error.
            line = re.sub(r"^\[[^\]]*\] *", "", (str(error).splitlines() or [""])[0])
            who += f": {line[:_LONGEST_LINE] or type(error).__name__}"
    return CollectiveError(
        f"{what} ({who})",
        "make this call on every rank, not inside `if rank == 0`, and give every rank the same "
        "number of batches; if a rank has ended, look for its error in its log",
        f"rank {rank}",
    )


def is_collective(error: BaseException) -> bool:
    """Return whether torch raised an error because communication between processes failed.

    Args:
        error: The exception.
    """
    if isinstance(error, ZeroTuneError):
        return False
    return isinstance(error, getattr(dist, "DistError", ())) or bool(_COLLECTIVE.search(str(error)))


def _await(work: Any, deadline: float) -> None:
    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))


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
