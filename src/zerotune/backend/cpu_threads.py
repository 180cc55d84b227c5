"""Set OpenMP threads for ranks with a CPU optimizer, and restore them later.

torch and DeepSpeed's CPU optimizers share one OpenMP runtime (torch's ``libgomp``), so
``torch.set_num_threads`` applies to both. ``DataLoader`` workers use one thread each.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator, Mapping
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
    from zerotune.plan.plan import ResolvedPlan

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
    """Inside the block, use as many threads as this rank's share of the cores. Collective.

    User settings take precedence: ``OMP_NUM_THREADS`` (except 1, the default of torchrun and
    accelerate) and ``torch.set_num_threads``. The share lies within the rank's CPU affinity, which
    ``torchrun --numa-binding`` sets.

    Args:
        plan: The resolved plan; nothing changes unless the model or the optimizer is on the CPU.
        group: Process group of all ranks; ranks on the same host share its cores.
        wanted: Number of threads; default: chosen automatically.
        workers: Number of data workers of this rank.

    Yields:
        The decisions about threads.
    """
    if wanted is not None:
        share = CoreShare(threads=wanted, reason="set by threads=")
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
    before = torch.get_num_threads()
    launcher = ThreadFacts.here(affinity_here()).launcher
    default = f"; {VARIABLE}=1 is only {launcher}'s default" if launcher else ""
    torch.set_num_threads(share.threads)
    try:
        yield (
            Decision(key=KEY, before=before, after=share.threads, reason=share.reason + default),
        )
    finally:
        torch.set_num_threads(before)
