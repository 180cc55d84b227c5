"""Set OpenMP threads and CPU cores for ranks with a CPU optimizer, and restore them later.

torch and DeepSpeed's CPU optimizers share one OpenMP runtime (torch's ``libgomp``), so
``torch.set_num_threads`` applies to both. ``DataLoader`` workers use one thread each.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import torch

from zerotune.decisions import Decision
from zerotune.platform.detect import (
    CoreShare,
    MachineProbe,
    affinity_here,
    cpu_quota,
    read_cpus,
    share_cores,
)

if TYPE_CHECKING:
    from zerotune.backend.distributed import ProcessGroup
    from zerotune.plan.model import ResolvedPlan

VARIABLE: Final = "OMP_NUM_THREADS"
KEY: Final = "threads"
_SETS_ONE_THREAD: Final = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "ACCELERATE_MIXED_PRECISION": "accelerate",
}
"""Environment variable of each launcher that sets ``OMP_NUM_THREADS=1`` by default."""


@attrs.frozen(kw_only=True)
class ThreadFacts:
    """Thread settings of this process before zerotune changes them."""

    threads: int
    """Number of torch's OpenMP threads."""
    defaults: frozenset[int]
    """Numbers of threads that torch may use by default, such as this process's number of cores."""
    environ: Mapping[str, str]

    @classmethod
    def here(cls, affinity: Collection[int]) -> ThreadFacts:
        """Read the thread settings of this process.

        Args:
            affinity: CPUs that the process may use.
        """
        cpus = read_cpus(MachineProbe().read_text, affinity)
        cores = {(cpu.node, cpu.package, cpu.core) for cpu in cpus}
        return cls(
            threads=torch.get_num_threads(),
            defaults=frozenset({len(cpus), len(cores), os.cpu_count() or 1}),
            environ=dict(os.environ),
        )

    @property
    def chosen_by(self) -> str | None:
        """User setting that determines the number of threads; ``None`` if there is none."""
        given = self.environ.get(VARIABLE)
        if given is not None and self.launcher is None:
            return f"{VARIABLE}={given} in the environment"
        usual = self.defaults | ({1} if self.launcher else frozenset())
        if self.threads not in usual:
            return f"torch.set_num_threads({self.threads})"
        return None

    @property
    def launcher(self) -> str | None:
        """The launcher that set the number of threads to 1 by default; ``None`` if none did."""
        several = self.environ.get("LOCAL_WORLD_SIZE", self.environ.get("WORLD_SIZE", "1")) != "1"
        if self.environ.get(VARIABLE) != "1" or not several:
            return None
        return next((name for mark, name in _SETS_ONE_THREAD.items() if mark in self.environ), None)


@contextlib.contextmanager
def cpu_threads(
    plan: ResolvedPlan, group: ProcessGroup, *, wanted: int | None = None, workers: int = 0
) -> Iterator[tuple[Decision, ...]]:
    """Inside the block, restrict this rank to its share of the machine's cores. Collective.

    User settings take precedence: ``OMP_NUM_THREADS`` (except 1, the default of torchrun and
    accelerate), ``torch.set_num_threads``, and CPU affinity, which is never widened.

    Args:
        plan: The resolved plan; nothing changes unless the model or the optimizer is on the CPU.
        group: Process group of all ranks; ranks on the same host share its cores.
        wanted: Number of threads; default: chosen automatically.
        workers: Number of data workers of this rank.

    Yields:
        The decisions about threads and cores.
    """
    if wanted is not None:
        share = CoreShare(threads=wanted, cpus=None, reason="set by threads=")
    elif plan.platform.accelerator != "cpu" and plan.offload_optimizer == "none":
        yield ()
        return
    else:
        affinity = affinity_here()
        host = socket.gethostname()
        everyone = enumerate(group.gather((host, affinity)))
        here = {rank: cpus for rank, (name, cpus) in everyone if name == host}
        facts = ThreadFacts.here(affinity)
        # The gather above needed every rank; from here on ranks may take different paths.
        if facts.chosen_by is not None:
            reason = f"not changed, because of {facts.chosen_by}"
            yield (Decision(key=KEY, before=facts.threads, after=facts.threads, reason=reason),)
            return
        probe = MachineProbe()
        share = share_cores(
            read_cpus(probe.read_text, affinity),
            affinities=list(here.values()),
            rank=list(here).index(group.rank),
            quota=cpu_quota(probe.read_text),
            workers=workers,
        )
    with _applied(share) as decisions:
        yield decisions


@contextlib.contextmanager
def _applied(share: CoreShare) -> Iterator[tuple[Decision, ...]]:
    before, places = torch.get_num_threads(), _thread_places() if share.cpus else {}
    launcher = ThreadFacts.here(affinity_here()).launcher
    default = f"; {VARIABLE}=1 is only {launcher}'s default" if launcher else ""
    decisions = [
        Decision(key=KEY, before=before, after=share.threads, reason=f"{share.reason}{default}")
    ]
    torch.set_num_threads(share.threads)
    bound = share.cpus if share.cpus and _move({task: set(share.cpus) for task in places}) else None
    if bound is not None:
        decisions.append(
            Decision(
                key=f"{KEY}.cpus",
                before=None,
                after=list(bound),
                reason="ranks on this machine use separate cores",
            )
        )
    try:
        yield tuple(decisions)
    finally:
        torch.set_num_threads(before)
        if bound is not None:
            everywhere = set().union(*places.values())
            _move(dict.fromkeys(_thread_places(), everywhere) | places)


def _thread_places() -> dict[int, set[int]]:
    """CPUs that each thread of this process may use; empty if the system does not support this."""
    if not hasattr(os, "sched_getaffinity"):
        return {}
    places = {}
    for entry in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # A thread may end meanwhile.
            places[int(entry.name)] = set(os.sched_getaffinity(int(entry.name)))
    return places


def _move(places: Mapping[int, set[int]]) -> bool:
    """Set the CPUs of threads; return whether this succeeded for the main thread."""
    moved = False
    for task, cpus in places.items():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(task, cpus)
            moved = moved or task == os.getpid()
    return moved
