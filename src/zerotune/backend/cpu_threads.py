"""Set OpenMP threads for ranks with a CPU optimizer, and restore them later.

torch and DeepSpeed's CPU optimizers share one OpenMP runtime (torch's ``libgomp``), so
``torch.set_num_threads`` applies to both. ``DataLoader`` workers use one thread each.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs
import torch

from zerotune.decisions import Decision
from zerotune.platform.detect import Cores, MachineProbe, cpu_quota

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
    def here(cls) -> ThreadFacts:
        """Read the thread settings of this process."""
        cores = MachineProbe().cores()
        numbers = {cores.affinity, _usable(cores, cores.affinity), cores.physical, cores.logical}
        return cls(
            threads=torch.get_num_threads(), defaults=frozenset(numbers), environ=dict(os.environ)
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
    if wanted is None and plan.platform.accelerator != "cpu" and plan.offload_optimizer == "none":
        yield ()
        return
    facts, threads, reason = ThreadFacts.here(), wanted or 1, "set by threads="
    if wanted is None:
        # macOS and Windows lack the call; every core is usable there.
        affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        here = (socket.gethostname(), frozenset(affinity(0)))
        affinities = [cpus for host, cpus in group.gather(here) if host == here[0]]
        # The gather above needed every rank; from here on ranks may take different paths.
        if facts.chosen_by is not None:
            reason = f"not changed, because of {facts.chosen_by}"
            yield (Decision(KEY, facts.threads, facts.threads, reason),)
            return
        probe = MachineProbe()
        threads, reason = share_cores(
            here[1],
            affinities,
            cores=probe.cores(),
            quota=cpu_quota(probe.read_text),
            workers=workers,
        )
    if facts.launcher:
        reason += f"; {VARIABLE}=1 is only {facts.launcher}'s default"
    torch.set_num_threads(threads)
    try:
        yield (Decision(KEY, facts.threads, threads, reason),)
    finally:
        torch.set_num_threads(facts.threads)


def share_cores(
    own: Collection[int],
    affinities: Sequence[Collection[int]],
    *,
    cores: Cores,
    quota: float | None,
    workers: int,
) -> tuple[int, str]:
    """Return a rank's number of threads, and the numbers of cores and ranks it is based on.

    An optimizer on the CPU is bound by host memory, so a second thread on the same core adds
    nothing: only physical cores count.

    Args:
        own: Hardware threads available to this rank.
        affinities: Hardware threads available to each rank on this machine.
        cores: Numbers of the machine's cores.
        quota: The container's CPU quota in cores, for all ranks together.
        workers: Number of this rank's data workers, which get at most half of the rank's cores.
    """
    count, sharers = _usable(cores, len(own)), sum(not set(own).isdisjoint(a) for a in affinities)
    allowed = max(1, count // sharers)
    reason = f"{count} physical core(s)"
    reason += f" shared by {sharers} ranks" if sharers > 1 else " for this rank"
    if quota is not None:
        # Rounded down: threads beyond the quota are throttled and slow the others.
        allowed = max(1, min(allowed, int(quota / len(affinities))))
        reason += f", a container's limit of {quota:g} cores"
    left = min(workers, allowed // 2)
    if workers:
        reason += f", {left} reserved for {workers} data worker(s)"
    return max(1, allowed - left), reason


def _usable(cores: Cores, hardware_threads: int) -> int:
    """The number of physical cores behind a number of hardware threads."""
    return max(1, hardware_threads * cores.physical // cores.logical)
