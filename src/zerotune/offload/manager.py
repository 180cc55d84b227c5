"""Give each run a swap folder of its own inside a root that many runs may share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import attrs

from zerotune.decisions import Decision, announce
from zerotune.errors import OffloadError
from zerotune.offload.lease import SwapDirectory, require_locks
from zerotune.offload.record import LeaseRecord, is_run_id, new_run_id
from zerotune.offload.release import abandon, kept_after, release
from zerotune.offload.root import SwapRoot, Target, check_root, choose_root, gibibytes
from zerotune.offload.stale import find_leases

if TYPE_CHECKING:
    from zerotune.plan.resolved import ResolvedPlan

Share = Callable[[str], str]
"""Collective: every rank calls it and gets the string rank 0 passed."""
Barrier = Callable[[], None]
"""Collective: returns once every rank has called it."""

_FAILED: Final = "failed: "


@attrs.define(kw_only=True, eq=False)
class Lease:
    """A run's hold on its swap folders."""

    plan: ResolvedPlan
    """The plan, with its NVMe paths inside the lease."""
    paths: Mapping[Target, Path] = attrs.field(factory=lambda: MappingProxyType({}))
    """Folder for ``"param"`` and ``"optimizer"``, those that go to NVMe only."""
    roots: tuple[SwapRoot, ...] = ()
    """The checked roots that hold these folders."""
    run_id: str | None = None
    """Shared by all ranks; ``None`` when nothing goes to NVMe."""
    decisions: tuple[Decision, ...] = ()
    """Every automatic choice, those made when the lease ends included."""

    @property
    def path(self) -> Path | None:
        """The parameters' folder, else the optimizer's; ``None`` when nothing goes to NVMe."""
        return self.paths.get("param", self.paths.get("optimizer"))


class OffloadManager:
    """Leases swap folders.

    Args:
        root: Folder that many runs may share. When not given: the plan's NVMe paths, else the
            environment variable ``ZEROTUNE_SWAP_ROOT``, else a folder of this user's in the
            system's temporary folder, with a warning.
        optimizer_root: The same for optimizer states, where they go elsewhere.
        share: Gives every rank the string that rank 0 passes; needed above one rank.

    Raises:
        OffloadError: A root is blank.
    """

    def __init__(
        self,
        *,
        root: str | os.PathLike[str] | None = None,
        optimizer_root: str | os.PathLike[str] | None = None,
        share: Share | None = None,
    ) -> None:
        self._arguments: dict[Target, str | None] = {
            "param": _text(root, "root"),
            "optimizer": _text(optimizer_root, "optimizer_root"),
        }
        self._share = share

    @contextmanager
    def lease(
        self,
        resolved: ResolvedPlan,
        *,
        rank: int = 0,
        world_size: int | None = None,
        barrier: Barrier | None = None,
        share: Share | None = None,
    ) -> Iterator[Lease]:
        """Hold a swap folder of this run's own for as long as the ``with`` block runs.

        The engine must not outlive the block. Without NVMe offload in the plan nothing is made.
        The folder is removed at the end, by the rank that made it once all ranks are out; after
        an exception, or without ``barrier``, by whichever rank is the last to leave. A run that
        is killed leaves its folder behind; a later lease on the same root reports it.

        Args:
            resolved: The plan to run, its optimizer settled.
            rank: Global rank of this process.
            world_size: Number of ranks; the plan's when not given.
            barrier: Waits for all ranks; called when the block ends without an exception.
            share: Used when the manager was made without one.

        Yields:
            The lease, whose ``plan`` is the one to hand to the engine.

        Raises:
            UnresolvedPlanError: Something in the plan is not settled.
            OffloadError: The ranks are not the plan's or disagree, a root is unusable, this system
                has no file locks, or the folder could not be removed after a block that ended
                well.
        """
        _check_ranks(resolved, rank, world_size)
        targets = _swapped(resolved)
        if not targets:
            yield Lease(plan=resolved, decisions=self._unused())
            return
        owner = os.getpid()
        lease, directories = self._open(resolved, targets, rank, self._share or share)
        announce(lease.decisions, rank=rank)
        try:
            yield lease
        except BaseException:
            if os.getpid() == owner:
                _note(lease, abandon(directories))
            raise
        # A forked child that runs out of the block must not touch its parent's lease.
        if os.getpid() == owner:
            _close(lease, directories, barrier)

    def _open(
        self,
        resolved: ResolvedPlan,
        targets: tuple[Target, ...],
        rank: int,
        share: Share | None,
    ) -> tuple[Lease, tuple[SwapDirectory, ...]]:
        if rank != 0:
            run_id = _receive(share)
            return self._claim(resolved, targets, run_id, rank)
        if resolved.world_size == 1:
            return self._claim(resolved, targets, new_run_id(), rank)
        if share is None:
            raise _no_share()
        run_id = new_run_id()
        try:
            opened = self._claim(resolved, targets, run_id, rank)
        except BaseException as error:
            # The other ranks wait for the run id; let them fail too instead of hang.
            share(f"{_FAILED}{error}")
            raise
        try:
            share(run_id)
        except BaseException:
            abandon(opened[1])
            raise
        return opened

    def _claim(
        self,
        resolved: ResolvedPlan,
        targets: tuple[Target, ...],
        run_id: str,
        rank: int,
    ) -> tuple[Lease, tuple[SwapDirectory, ...]]:
        require_locks()
        record = LeaseRecord.for_this_process(
            run_id=run_id, rank=rank, world_size=resolved.world_size, plan_digest=resolved.digest()
        )
        roots = self._roots(resolved, targets)
        directories: dict[Path, SwapDirectory] = {}
        with ExitStack() as undo:
            for root in roots.values():
                if root.path not in directories:
                    directory = directories[root.path] = SwapDirectory.claim(root.path, record)
                    undo.callback(abandon, (directory,))
            paths = {target: directories[root.path].path for target, root in roots.items()}
            unique = {root.path: root for root in roots.values()}
            lease = Lease(
                plan=resolved.with_nvme_path(
                    **{target: str(path) for target, path in paths.items()}
                ),
                paths=MappingProxyType(paths),
                roots=tuple(unique.values()),
                run_id=run_id,
                decisions=(
                    *(decision for root in unique.values() for decision in root.decisions),
                    *_moved(resolved, paths),
                    *_left_behind(directories),
                ),
            )
            undo.pop_all()
        return lease, tuple(directories.values())

    def _roots(self, resolved: ResolvedPlan, targets: tuple[Target, ...]) -> dict[Target, SwapRoot]:
        choices = {
            target: choose_root(
                target,
                arguments=self._arguments,
                plan_paths=resolved.nvme_paths,
                environ=os.environ,
            )
            for target in targets
        }
        checked = {choice: check_root(choice) for choice in dict.fromkeys(choices.values())}
        return {target: checked[choice] for target, choice in choices.items()}

    def _unused(self) -> tuple[Decision, ...]:
        return tuple(
            Decision(
                key="offload.root",
                before=root,
                after=None,
                reason="the plan swaps nothing to NVMe, so no folder is made",
            )
            for root in self._arguments.values()
            if root is not None
        )


def _receive(share: Share | None) -> str:
    if share is None:
        raise _no_share()
    answer = share("")
    if answer.startswith(_FAILED):
        raise OffloadError(f"rank 0 could not lease it: {answer.removeprefix(_FAILED)}")
    if not is_run_id(answer):
        raise OffloadError(
            "is not a run id; share must return what rank 0 passed",
            key="OffloadManager.share",
            value=answer,
            fix="give a collective broadcast from rank 0",
        )
    return answer


def _text(root: str | os.PathLike[str] | None, name: str) -> str | None:
    if root is None:
        return None
    text = os.fspath(root)
    if not text.strip():
        raise OffloadError(
            "is blank",
            key=f"OffloadManager.{name}",
            value=text,
            fix="give a folder on a local disk, or leave the argument out",
        )
    return text


def _check_ranks(resolved: ResolvedPlan, rank: int, world_size: int | None) -> None:
    if world_size not in (None, resolved.world_size):
        raise OffloadError(
            f"the plan was resolved for {resolved.world_size} ranks",
            key="world_size",
            value=world_size,
            fix="resolve the plan with the number of ranks that run it",
        )
    if not 0 <= rank < resolved.world_size:
        raise OffloadError(
            f"is not a rank of {resolved.world_size}",
            key="rank",
            value=rank,
            fix="count ranks from 0",
        )


def _swapped(resolved: ResolvedPlan) -> tuple[Target, ...]:
    devices: dict[Target, str] = {
        "param": resolved.offload_param,
        "optimizer": resolved.offload_optimizer,
    }
    return tuple(target for target, device in devices.items() if device == "nvme")


def _no_share() -> OffloadError:
    return OffloadError(
        "several ranks need one run id, and nothing carries it between them",
        key="OffloadManager.share",
        value=None,
        fix="pass share=, a function that returns rank 0's string on every rank",
    )


def _moved(resolved: ResolvedPlan, paths: Mapping[Target, Path]) -> tuple[Decision, ...]:
    return tuple(
        Decision(
            key=f"zero_optimization.offload_{target}.nvme_path",
            before=resolved.nvme_paths.get(target),
            after=str(path),
            reason="a folder of this run's own: DeepSpeed uses the same file names for every run "
            "and deletes what it finds at start",
        )
        for target, path in paths.items()
    )


def _left_behind(directories: Mapping[Path, SwapDirectory]) -> tuple[Decision, ...]:
    # Only the rank that made the folder looks: the others would repeat it.
    return tuple(
        Decision(
            key="offload.stale_swap",
            before=str(found.path),
            after=str(found.path),
            reason=f"{gibibytes(found.size)} left by a run that has ended ({found.reason}); "
            "not removed",
            severity="warning",
        )
        for root, directory in directories.items()
        if directory.created
        for found in find_leases(root)
        if found.state == "stale"
    )


def _close(lease: Lease, directories: tuple[SwapDirectory, ...], barrier: Barrier | None) -> None:
    try:
        decisions, errors = release(directories, barrier)
    except BaseException:
        _note(lease, abandon(directories))
        raise
    _note(lease, (*decisions, *(kept_after(error) for error in errors)))
    if errors:
        raise errors[0]


def _note(lease: Lease, decisions: tuple[Decision, ...]) -> None:
    lease.decisions = (*lease.decisions, *decisions)
    # These are a rank's own problems, which rank 0 knows nothing of, so any rank says them.
    announce(decisions, rank=0)
