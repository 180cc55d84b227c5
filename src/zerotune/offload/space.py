"""Check that a plan fits this machine's disk and host memory before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from zerotune._util.text import format_size
from zerotune.decisions import Decision
from zerotune.errors import OffloadError
from zerotune.offload.lease import find_leases
from zerotune.offload.root import SwapRoot, Target
from zerotune.plan.memory.items import PHASES, Workload
from zerotune.plan.memory.swap_files import SwapFiles, swap_files

if TYPE_CHECKING:
    from zerotune.plan.plan import ResolvedPlan


_FOLDERS: Final = 8
_SLACK: Final = 1.01
"""File system overhead per byte: block lists and rounding to blocks."""


@attrs.frozen(kw_only=True)
class SwapNeeds:
    """Maximum number and size of swap files that one rank writes, by kind of data."""

    files: Mapping[Target, SwapFiles]

    def of(self, *targets: Target) -> SwapFiles:
        """Return the total number and size of swap files for several kinds of data.

        Args:
            targets: Kinds of data that are swapped.
        """
        return sum((self.files.get(target, SwapFiles()) for target in targets), SwapFiles())

    def _check_disk(
        self, folders: Mapping[Path, list[Target]], *, ranks: int, run_id: str
    ) -> Decision:
        path = next(iter(folders))
        per_rank = self.of(*(target for targets in folders.values() for target in targets))
        wanted = per_rank.times(ranks)
        nbytes = int(wanted.nbytes * _SLACK)
        files = wanted.count + _FOLDERS * (ranks + 1)
        space = os.statvfs(path)
        free = space.f_bavail * space.f_frsize
        others = sum(_still_to_come(folder, run_id) for folder in folders)
        said = f"{format_size(nbytes)} for {ranks} rank(s), {format_size(per_rank.nbytes)} each"
        taken = f", of which other runs have reserved {format_size(others)}" if others else ""
        if nbytes > free - others:
            raise OffloadError(
                f"the plan swaps {said}, but only {format_size(free)} ({free} bytes) are "
                f"free{taken}: {format_size(nbytes + others - free)} are missing",
                "free disk space (`zerotune offload clean` deletes leftovers of dead runs), "
                "use a root on a larger disk, or offload to cpu",
                "offload.root",
                str(path),
            )
        if space.f_files and files > space.f_favail:
            raise OffloadError(
                f"the plan creates {files} files and folders, but the file system has room for "
                f"only {space.f_favail}",
                "delete small files, or use a root on a different file system",
                "offload.root",
                str(path),
            )
        return Decision(
            "offload.space",
            None,
            str(path),
            f"the plan swaps {said}; {format_size(free)} are free{taken}",
        )


def swap_needs(resolved: ResolvedPlan) -> SwapNeeds | None:
    """Return the maximum number and size of the swap files that one rank writes for a plan.

    Args:
        resolved: The plan, resolved with the shapes of a model.

    Returns:
        Number and size of one rank's swap files; ``None`` if the plan was resolved without a model.
    """
    model = resolved.model
    if model is None:
        return None
    files: dict[Target, SwapFiles] = {}
    weights, *others = swap_files(resolved, model).values()
    if resolved.offload_param == "nvme":
        files["param"] = weights
    if resolved.offload_optimizer == "nvme":
        files["optimizer"] = sum(others, SwapFiles())
    return SwapNeeds(files=files)


def check_space(
    roots: Mapping[Target, SwapRoot], needs: SwapNeeds | None, *, ranks: int, run_id: str
) -> tuple[Decision, ...]:
    """Check that the swap files of a run fit on the roots' disks.

    Space that other active runs have reserved on the same roots counts as used.

    Args:
        roots: Swap root for each kind of data.
        needs: Number and size of one rank's swap files; ``None`` if unknown.
        ranks: Number of ranks on this machine.
        run_id: Id of the run.
    """
    if needs is None:
        return (
            Decision(
                "offload.space",
                None,
                None,
                "the plan was resolved without a model, so the required space is unknown",
                "warning",
            ),
        )
    disks: dict[int, dict[Path, list[Target]]] = {}
    for target, root in roots.items():
        disk = disks.setdefault(root.path.stat().st_dev, {})
        disk.setdefault(root.path, []).append(target)
    return tuple(
        needs._check_disk(folders, ranks=ranks, run_id=run_id) for folders in disks.values()
    )


def _still_to_come(root: Path, run_id: str) -> int:
    """Return the bytes that other live runs in a root have reserved and not yet written."""
    return sum(
        lease.still_to_come
        for lease in find_leases(root)
        if lease.state != "stale" and lease.run_id != run_id
    )


# -- Host memory.


KEY: Final = "offload.host_memory"
BACKEND_VARIABLE: Final = "DS_PIN_MEMORY_BACKEND"


@attrs.frozen(kw_only=True)
class HostBudget:
    """Host memory that a plan needs on one machine, and the memory that is available there."""

    per_rank: int
    """Peak host memory of one rank in bytes, including page-locked memory."""
    pinned: int
    """Page-locked bytes in ``per_rank``, including the rounding of torch's allocator."""
    locked: int
    """Bytes in ``per_rank`` that DeepSpeed locks with ``mlock``, limited by ``ulimit -l``."""
    ranks: int
    """Number of ranks on this machine."""
    held: int
    """Bytes that one rank already uses, for Python, torch and the loaded model."""
    available: int
    """Available host memory in bytes, within the container's limit."""
    lockable: int | None
    """Bytes that one rank may lock; ``None`` without a limit."""

    @property
    def needed(self) -> int:
        """Bytes that all ranks on this machine must still allocate."""
        return max(0, self.per_rank - self.held) * self.ranks

    def __str__(self) -> str:
        return (
            f"{self.ranks} rank(s) x {format_size(self.per_rank)} at the peak, "
            f"{format_size(self.pinned)} of it page-locked, {format_size(self.held)} already "
            f"in use; {format_size(self.available)} available"
        )


def host_budget(
    resolved: ResolvedPlan,
    *,
    ranks: int,
    held: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> HostBudget:
    """Compute the host memory that a plan needs; the plan must be resolved with its model.

    Activations are not included, because they need no host memory on a GPU.

    Args:
        resolved: The plan.
        ranks: Number of ranks on this machine.
        held: Bytes that one rank already uses; by default this process's resident memory.
        environ: Environment variables; by default ``os.environ``.
    """
    import psutil

    environ = os.environ if environ is None else environ
    native = environ.get(BACKEND_VARIABLE, "torch").strip().lower() == "native"
    estimate = resolved.estimate(Workload(ranks_per_machine=ranks, exact_pinning=native or None))
    # DeepSpeed's aio locks its buffers in any case.
    swap_buffers = (
        [one.nbytes for one in estimate.at("host", phase) if one.component == "swap buffers"]
        for phase in PHASES
    )
    return HostBudget(
        per_rank=estimate.host,
        pinned=estimate.pinned,
        locked=estimate.pinned if native else max(map(sum, swap_buffers)),
        ranks=ranks,
        held=psutil.Process().memory_info().rss if held is None else held,
        available=resolved.platform.host_memory.available,
        lockable=resolved.platform.memlock_limit,
    )


def check_host_memory(
    resolved: ResolvedPlan, *, ranks: int, held: int | None = None
) -> tuple[Decision, ...]:
    """Check that a plan fits in host memory.

    Args:
        resolved: The plan.
        ranks: Number of ranks on this machine.
        held: Bytes that one rank already uses; by default this process's resident memory.

    Raises:
        OffloadError: The plan needs more host memory, or more locked memory, than is available.
    """
    if resolved.model is None:
        why = "the plan was resolved without a model, so the required host memory is unknown"
        return (Decision(KEY, None, None, why),)
    budget = host_budget(resolved, ranks=ranks, held=held)
    if budget.lockable is not None and budget.locked > budget.lockable:
        raise OffloadError(
            f"DeepSpeed would abort, because it locks {format_size(budget.locked)} of swap "
            f"buffers per rank, but a process may lock only {format_size(budget.lockable)}",
            "raise the limit (ulimit -l unlimited), or lower sub_group_size and buffer_count",
            KEY,
            budget.locked,
        )
    if budget.needed > budget.available:
        raise OffloadError(
            f"the plan needs more host memory than is available: {budget}",
            f"set pin_memory to false or {BACKEND_VARIABLE}=native, offload to NVMe at stage 3, or "
            "find a plan that fits with DeepSpeedPlan.advise",
            KEY,
            budget.needed,
        )
    return (Decision(KEY, None, format_size(budget.needed), str(budget)),)
