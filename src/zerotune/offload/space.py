"""Whether what a plan swaps fits on the disk, asked before anything is written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from zerotune._util.text import disk_size, is_integer
from zerotune.decisions import Decision
from zerotune.errors import OffloadError
from zerotune.offload.lease import FoundLease, find_lease, find_leases
from zerotune.offload.root import SwapRoot, Target
from zerotune.optimizers.catalogue import entry_of
from zerotune.plan.resolve import SMALLEST_SWAP_BYTES, SUB_GROUP_NVME, sub_groups

if TYPE_CHECKING:
    from zerotune.plan.model import ModelFacts, ResolvedPlan

_ALIGNMENT: Final = 1024
"""``AIO_ALIGNED_BYTES``: each thread's share of a swap file is a multiple of it."""
_DEFAULT_BLOCK: Final = 1_048_576
_FOLDERS: Final = 8
_SLACK: Final = 1.01
"""What a file system keeps for itself per byte: block lists and rounding to blocks."""


@attrs.frozen(kw_only=True)
class SwapFiles:
    """What one rank writes to one kind of swap file."""

    nbytes: int = 0
    count: int = 0

    def __add__(self, other: SwapFiles) -> SwapFiles:
        return SwapFiles(nbytes=self.nbytes + other.nbytes, count=self.count + other.count)

    def times(self, factor: int) -> SwapFiles:
        """The same for so many ranks."""
        return SwapFiles(nbytes=self.nbytes * factor, count=self.count * factor)


@attrs.frozen(kw_only=True)
class SwapNeeds:
    """The most one rank writes during a run, by what is swapped."""

    files: Mapping[Target, SwapFiles]

    def of(self, *targets: Target) -> SwapFiles:
        """What these targets need together."""
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
        said = f"{disk_size(nbytes)} for {ranks} rank(s), {disk_size(per_rank.nbytes)} each"
        taken = f", {disk_size(others)} of it spoken for by other runs" if others else ""
        if nbytes > free - others:
            raise OffloadError(
                f"the plan swaps {said}, and {disk_size(free)} ({free} bytes) are free{taken}: "
                f"{disk_size(nbytes + others - free)} are missing",
                key="offload.root",
                value=str(path),
                fix="free that much (`zerotune offload clean` shows what dead runs left), give a "
                "root on a larger disk, or offload to cpu",
            )
        if space.f_files and files > space.f_favail:
            raise OffloadError(
                f"the plan makes {files} files and folders, and {space.f_favail} can still be made",
                key="offload.root",
                value=str(path),
                fix="delete small files, or give a root on another file system",
            )
        return Decision(
            key="offload.space",
            before=None,
            after=str(path),
            reason=f"the plan swaps {said}; {disk_size(free)} are free{taken}",
        )


def swap_needs(resolved: ResolvedPlan) -> SwapNeeds | None:
    """Bytes and files that DeepSpeed swaps, per rank, at most.

    Counted as DeepSpeed 0.19.8 counts (``runtime/swap_tensor``): what is smaller than 1 MiB and
    one aio block stays in memory; a parameter's part is one file; each sub-group of the
    optimizer has a file for its master weights and for each state, and its gradients have one
    per parameter. Lengths are rounded up to 1024 bytes per aio thread.

    Returns:
        ``None`` when the plan was resolved without a model.
    """
    model = resolved.model
    if model is None:
        return None
    aio = resolved.plan.aio
    block, threads = (aio.block_size, aio.intra_op_parallelism) if aio else (None, None)
    count = _SwapCounter(
        resolved=resolved,
        model=model,
        least=max(SMALLEST_SWAP_BYTES, block if is_integer(block) and block else _DEFAULT_BLOCK),
        unit=_ALIGNMENT * (threads if is_integer(threads) and threads else 1),
    )
    files: dict[Target, SwapFiles] = {}
    if resolved.offload_param == "nvme":
        files["param"] = count.parameters()
    if resolved.offload_optimizer == "nvme":
        files["optimizer"] = count.optimizer()
    return SwapNeeds(files=files)


@attrs.frozen(kw_only=True)
class _SwapCounter:
    resolved: ResolvedPlan
    model: ModelFacts
    least: int
    unit: int

    def _files(self, sizes: Iterator[int]) -> SwapFiles:
        swapped = [-(-size // self.unit) * self.unit for size in sizes if size >= self.least]
        return SwapFiles(nbytes=sum(swapped), count=len(swapped))

    def parameters(self) -> SwapFiles:
        element = 4 if self.resolved.precision == "fp32" else 2
        parts = self.model.parts(self.resolved.world_size)
        return self._files(part * element for part in parts)

    def optimizer(self) -> SwapFiles:
        bf16, zero = self.resolved.plan.bf16, self.resolved.plan.zero_optimization
        half = bf16 is not None and bf16.bf16_master_weights_and_grads is True
        element = 2 if half else 4
        size = None if zero is None else zero.sub_group_size
        numels = sub_groups(
            self.model, self.resolved.world_size, size if is_integer(size) else SUB_GROUP_NVME
        )
        choice = self.resolved.optimizer
        name, params = (None, None) if choice is None else (choice.name, choice.params)
        states = math.ceil(entry_of(name).states_per_weight(params))
        groups = self._files(numel * element for numel in numels)
        parts = self.model.trainable_parts(self.resolved.world_size)
        return groups.times(1 + states) + self._files(part * element for part in parts)


def check_space(
    roots: Mapping[Target, SwapRoot], needs: SwapNeeds | None, *, ranks: int, run_id: str
) -> tuple[Decision, ...]:
    """Compare what a run will write with what is free.

    What other living runs on the same roots have said they will still write counts as taken.
    """
    if needs is None:
        return (
            Decision(
                key="offload.space",
                before=None,
                after=None,
                reason="the plan was resolved without a model, so the space it needs is not known",
                severity="warning",
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
    """Bytes that other living runs in a root have reserved and not yet written."""
    return sum(
        lease.still_to_come
        for lease in find_leases(root)
        if lease.state != "stale" and lease.run_id != run_id
    )


# -- The same while a run goes on.


class SpaceWatch:
    """Whether what a run has still to swap fits on its disks, which other programs fill as well.

    DeepSpeed writes each swap file when it first needs it, in the first steps, and the same blocks
    from then on. A write that finds no room ends the process with SIGABRT.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._sizes: dict[Path, int | None] = dict.fromkeys(folders)

    def shortage(self, *, stepped: bool) -> str | None:
        """Describe the missing space; ``None`` if it fits, all is written, or it is unknown.

        Args:
            stepped: Whether an optimizer step was applied since the last call.
        """
        disks: dict[int, list[FoundLease]] = {}
        for folder, before in list(self._sizes.items()):
            lease = find_lease(folder)
            if lease is None or not lease.reserved or (stepped and lease.size == before):
                # A step that has added nothing shows that no file is missing any more.
                del self._sizes[folder]
                continue
            self._sizes[folder] = lease.size
            disks.setdefault(folder.stat().st_dev, []).append(lease)
        shortages = (_shortage_on(leases) for leases in disks.values())
        return next((text for text in shortages if text is not None), None)


def _shortage_on(leases: Sequence[FoundLease]) -> str | None:
    root = leases[0].path.parent
    space = os.statvfs(root)
    roots = dict.fromkeys(lease.path.parent for lease in leases)
    return tell_shortage(
        root,
        free=space.f_bavail * space.f_frsize,
        own=sum(lease.still_to_come for lease in leases),
        others=sum(_still_to_come(folder, leases[0].run_id) for folder in roots),
    )


def tell_shortage(root: Path, *, free: int, own: int, others: int) -> str | None:
    """What is missing on a disk, in numbers; ``None`` when it is enough."""
    # No swap file is smaller: below that only unaligned ends are left, which stay in memory.
    if own < SMALLEST_SWAP_BYTES or own + others <= free:
        return None
    taken = f", of which other runs have reserved {disk_size(others)}" if others else ""
    return (
        f"the swap disk of {root} was filled by another program: {disk_size(free)} ({free} bytes) "
        f"are free{taken}, and this run has still to write {disk_size(own)}"
    )
