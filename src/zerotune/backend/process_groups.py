"""Process groups of this process: who starts them, who uses them, and when they end."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
import torch.distributed as dist

from zerotune._util.proc import ProcessIdentity
from zerotune.backend.roll_call import LOOK_S, NO_START, RollCall, is_collective, naming_the_absent
from zerotune.errors import CollectiveError

if TYPE_CHECKING:
    from zerotune.backend.launch import Launch

_DEEPSPEED_CACHES: Final = (
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "mesh_device",
)


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
    arrivals = Arrivals(launch, timeout=timedelta(seconds=timeout_s))
    started.arrivals = arrivals
    started.roll = roll = arrivals.wait()
    try:
        yield
    except RuntimeError as error:
        if not is_collective(error):
            raise
        raise roll.lost(NO_START, error) from error


class Arrivals:
    """Record of the processes that have arrived, in the store that torch uses afterwards."""

    def __init__(self, launch: Launch, *, timeout: timedelta) -> None:
        self._launch, self._timeout = launch, timeout
        self._place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        # If this variable is set, torchrun's agent on rank 0's machine hosts the store, otherwise
        # rank 0 does.
        self._agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        ranks = range(launch.world_size)
        self._keys = [f"zerotune/arrived/{self._attempt}/{rank}" for rank in ranks]
        self._store: Any = None
        self._began = time.monotonic()
        self._missing: list[int] = []

    def wait(self) -> RollCall:
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
            own = json.dumps(attrs.asdict(ProcessIdentity.current()))
            self._store.set(self._keys[self._launch.rank], own)
            if self._all_come():
                notes = self._store.multi_get(self._keys)
                name = f"start/{self._attempt}"
                roll = RollCall(name, rank=self._launch.rank, store=self._store)
                roll.members = [ProcessIdentity(**json.loads(each)) for each in notes]
                return roll
        except RuntimeError as error:
            raise self._absent(error) from error
        raise self._absent(None)

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
        """Update which ranks are missing."""
        self._missing = [
            rank for rank in self._missing if not self._store.check([self._keys[rank]])
        ]

    def _absent(self, error: RuntimeError | None) -> CollectiveError:
        timeout, waited = self._timeout.total_seconds(), time.monotonic() - self._began
        absent = dict.fromkeys(self._missing, "never arrived")
        if error is not None and (not absent or waited < 0.8 * timeout):
            if self._agent and 0 not in absent:
                absent = {0: "has exited with its launcher, which hosted the rendezvous store"}
            elif not self._agent and self._launch.rank:
                absent = {0: f"cannot be reached at {self._place}, where all ranks must connect"}
        what = f"not every rank reached the start within {timeout:g} s"
        return naming_the_absent(what, absent, error, rank=self._launch.rank)


class _Started:
    """Reference count of the default group, if zerotune created it."""

    def __init__(self) -> None:
        self._group: Any = None
        self._users = 0
        self._launched = False

        self.arrivals: Arrivals | None = None
        """A reference that keeps the store alive, which the default group uses too."""
        self.roll: RollCall | None = None
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

started = _Started()


def start_default_group(backend: str, launch: Launch, timeout: timedelta) -> None:
    """Create torch's default process group, of which zerotune is the owner.

    Args:
        backend: Backend such as ``"gloo"`` or ``"nccl"``.
        launch: This process's rank and world size.
        timeout: Time after which a collective raises an error.
    """
    # torch imports this module lazily. If it did so after the group exists, default arguments in
    # the module would keep the group alive forever.
    importlib.import_module("torch.distributed.nn.functional")
    if launch.launched:
        with rendezvous(launch, timeout_s=timeout.total_seconds()):
            dist.init_process_group(backend=backend, timeout=timeout)
        started.note(launched=True)
        return
    # A store in this process's memory: no port, no environment, no MPI.
    dist.init_process_group(
        backend=backend,
        store=torch._C._distributed_c10d.HashStore(),
        rank=0,
        world_size=1,
        timeout=timeout,
    )
    started.note(launched=False)
