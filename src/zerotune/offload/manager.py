"""``OffloadManager``, which creates a separate swap folder for each run inside a shared root."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune._util.ownership import is_run_id, new_run_id
from zerotune.decisions import Decision, announce
from zerotune.errors import OffloadError
from zerotune.offload.cleaning import Cleaner, cleanup_stale_swap
from zerotune.offload.lease import (
    SwapDirectory,
    abandon,
    deleted_under,
    kept_after,
    release,
    require_locks,
)
from zerotune.offload.record import LeaseRecord
from zerotune.offload.root import (
    RootChoice,
    Roots,
    SwapRoot,
    Target,
    check_root,
    choose_root,
)
from zerotune.offload.space import check_host_memory, check_space, swap_needs

if TYPE_CHECKING:
    from zerotune.plan.plan import ResolvedPlan

_Directories = tuple[SwapDirectory, ...]
Share = Callable[[str], str]
"""Collective function that returns rank 0's string on every rank."""
Barrier = Callable[[], None]
"""Collective function that returns after every rank has called it."""

_FAILURE_PREFIX: Final = "failed: "


@attrs.define(kw_only=True, eq=False)
class Lease:
    """The swap folders that belong to a run."""

    plan: ResolvedPlan
    """The plan, with NVMe paths inside the swap folders."""
    paths: Mapping[Target, Path] = attrs.field(factory=lambda: MappingProxyType({}))
    """Swap folders for parameters (key ``"param"``) and optimizer states (key ``"optimizer"``)."""
    run_id: str | None = None
    """Run id, shared by all ranks; ``None`` without NVMe offload."""
    decisions: tuple[Decision, ...] = ()
    """All decisions, including those made when the lease ends."""

    @property
    def path(self) -> Path | None:
        """Swap folder for parameters; ``None`` without NVMe offload.

        If only optimizer states are swapped, this is the swap folder for optimizer states.
        """
        return self.paths.get("param", self.paths.get("optimizer"))

    def _carrying(self) -> Lease:
        """Add the lease's decisions to the plan, so that an engine's explanation shows them."""
        decisions = (*self.plan.decisions, *self.decisions)
        self.plan = attrs.evolve(self.plan, decisions=decisions)
        return self

    def _close(self, directories: _Directories, barrier: Barrier | None) -> None:
        try:
            decisions, errors = release(directories, barrier)
        except BaseException:
            self._note(abandon(directories))
            raise
        self._note((*decisions, *(kept_after(error) for error in errors)))
        if errors:
            raise errors[0]

    def _note(self, decisions: tuple[Decision, ...]) -> None:
        self.decisions = (*self.decisions, *decisions)
        # Rank 0 does not know these problems, so every rank logs its own.
        announce(decisions, rank=0)


# -- What the ranks of a run exchange before they share a lease.


def received(text: str) -> str:
    """Return the run id that rank 0 has shared.

    Args:
        text: The text that ``share`` returned.
    """
    if text.startswith(_FAILURE_PREFIX):
        raise OffloadError(
            f"rank 0 could not create the swap folder: {text.removeprefix(_FAILURE_PREFIX)}"
        )
    if not is_run_id(text):
        raise OffloadError(
            "is not a run id; share must return the string that rank 0 passed",
            "set share= to a collective that broadcasts rank 0's string to all ranks",
            "OffloadManager.share",
            text,
        )
    return text


def local_ranks(resolved: ResolvedPlan, environ: Mapping[str, str] | None = None) -> int:
    """Return this machine's number of ranks: ``LOCAL_WORLD_SIZE`` if set, else the world size."""
    written = (os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE", "")
    count = int(written) if written.isdecimal() else resolved.world_size
    return min(max(count, 1), resolved.world_size)


def check_ranks(resolved: ResolvedPlan, rank: int, world_size: int | None) -> None:
    """Check that ``rank`` and ``world_size`` match the plan."""
    if world_size not in (None, resolved.world_size):
        raise OffloadError(
            f"the plan was resolved for {resolved.world_size} ranks",
            "resolve the plan for the number of ranks in this run",
            "world_size",
            world_size,
        )
    if not 0 <= rank < resolved.world_size:
        raise OffloadError(
            f"is not a rank of a run with {resolved.world_size} ranks",
            f"pass a number from 0 to {resolved.world_size - 1}",
            "rank",
            rank,
        )


def need_share(share: Share | None) -> Share:
    """Return ``share``, or raise an error if it is missing."""
    if share is not None:
        return share
    raise OffloadError(
        "several ranks need the same run id, but no function that shares it was passed",
        "set share= to a function that returns rank 0's string on every rank",
        "OffloadManager.share",
        None,
    )


class OffloadManager:
    """Creates a swap folder for each run, inside a root folder shared by all runs.

    The root is the first path that is set: an argument, a path in the trainer's configuration, the
    plan's ``nvme_path``, or an environment variable. The paths in the trainer's configuration are
    ``offload_param_path`` and ``offload_optimizer_path``. The environment variables are, in order,
    ``ZEROTUNE_OFFLOAD_PARAM_PATH``, ``ZEROTUNE_OFFLOAD_OPTIMIZER_PATH`` and ``ZEROTUNE_SWAP_ROOT``.
    If no path is set, zerotune warns and uses a folder in the system's temporary directory.

    Args:
        root: Root for parameters and optimizer states.
        offload_param_path: Root for parameters.
        offload_optimizer_path: Root for optimizer states; by default the root for parameters.
        share: Collective function that returns rank 0's string on every rank; required with several
            ranks.
        cleaner: Function that is called with each root after this run's folder is created there;
            ``partial(cleanup_stale_swap, dry_run=True)`` only reports leftovers.

    Raises:
        OffloadError: A path is blank.
    """

    def __init__(
        self,
        *,
        root: str | os.PathLike[str] | None = None,
        offload_param_path: str | os.PathLike[str] | None = None,
        offload_optimizer_path: str | os.PathLike[str] | None = None,
        share: Share | None = None,
        cleaner: Cleaner = cleanup_stale_swap,
    ) -> None:
        self._arguments = Roots(
            root=root, param=offload_param_path, optimizer=offload_optimizer_path
        )
        self._share = share
        self._cleaner = cleaner

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
        """Create this run's swap folder, and delete it at the end of the ``with`` block.

        Close the engine before the block ends. Without NVMe offload no folder is created, and only
        host memory is checked. After the folder is created, leftovers of dead runs are deleted from
        the root, and the plan's swap size is compared with the free space. After all ranks have
        left the block, the rank that created the folder deletes it. After an exception, or without
        ``barrier``, the last rank to leave the block deletes the folder. If a run is killed, the
        next ``lease`` in the same root deletes the killed run's folder.

        Args:
            resolved: The plan to run, with its optimizer resolved.
            rank: Global rank of this process.
            world_size: Number of ranks; defaults to the plan's number of ranks.
            barrier: Function that waits for all ranks; called if the block ends without an
                exception.
            share: As in ``OffloadManager``; used if the manager has no ``share``.

        Yields:
            The lease; pass its ``plan`` to the engine.

        Raises:
            UnresolvedPlanError: The plan is not fully resolved.
            OffloadError: Host memory is too small for the plan, a root is unusable or too small, or
                the system does not support file locks. The error is also raised if the ranks' plans
                differ, or do not match ``rank`` and ``world_size``. At the end of the block,
                ``OffloadError`` means that the folder was deleted during the run or cannot be
                deleted.
        """
        check_ranks(resolved, rank, world_size)
        fitted = check_host_memory(resolved, ranks=local_ranks(resolved))
        devices: dict[Target, str] = {
            "param": resolved.offload_param,
            "optimizer": resolved.offload_optimizer,
        }
        targets = tuple(target for target, device in devices.items() if device == "nvme")
        if not targets:
            lease = Lease(plan=resolved, decisions=(*fitted, *self._unused()))._carrying()
            announce(lease.decisions, rank=rank)
            yield lease
            return
        # Raises an error for an unresolved plan, before any folder is created.
        resolved.digest()
        owner = os.getpid()
        lease, directories = self._open(resolved, targets, rank, self._share or share)
        lease.decisions = (*fitted, *lease.decisions)
        lease._carrying()
        announce(lease.decisions, rank=rank)
        try:
            yield lease
        except BaseException as error:
            if os.getpid() == owner:
                gone = deleted_under(directories)
                lease._note(abandon(directories))
                if gone is not None and isinstance(error, Exception):
                    # DeepSpeed only asserts that its file opened; raise the cause instead.
                    raise gone from error
            raise
        # A forked child that leaves the block must not touch its parent's lease.
        if os.getpid() == owner:
            lease._close(directories, barrier)

    def _open(
        self, resolved: ResolvedPlan, targets: tuple[Target, ...], rank: int, share: Share | None
    ) -> tuple[Lease, _Directories]:
        run_id = new_run_id()
        if resolved.world_size == 1:
            return self._claim(resolved, targets, run_id, rank)
        share = need_share(share)
        if rank != 0:
            return self._claim(resolved, targets, received(share("")), rank)
        try:
            opened = self._claim(resolved, targets, run_id, rank)
        except BaseException as error:
            # The other ranks wait for the run id; let them fail too instead of hanging.
            share(f"{_FAILURE_PREFIX}{error}")
            raise
        try:
            share(run_id)
        except BaseException:
            abandon(opened[1])
            raise
        return opened

    def _claim(
        self, resolved: ResolvedPlan, targets: tuple[Target, ...], run_id: str, rank: int
    ) -> tuple[Lease, _Directories]:
        roots, needs = self._roots(resolved, targets), swap_needs(resolved)
        record = LeaseRecord.for_this_process(
            run_id=run_id, rank=rank, world_size=resolved.world_size, plan_digest=resolved.digest()
        )
        directories: dict[Path, SwapDirectory] = {}
        with ExitStack() as undo:
            for root in roots.values():
                if root.path not in directories:
                    here = [target for target in roots if roots[target].path == root.path]
                    reserved = needs.of(*here).nbytes if needs else 0
                    changes: dict[str, Any] = {"reserved": reserved, "filesystem": root.filesystem}
                    directory = SwapDirectory.claim(root.path, attrs.evolve(record, **changes))
                    directories[root.path] = directory
                    undo.callback(abandon, (directory,))
            # Only the rank that created a folder cleans its root; the others would repeat it.
            made = [root_path for root_path, each in directories.items() if each.created]
            cleaned = [one for root_path in made for one in self._cleaner(root_path).decisions]
            space = check_space(roots, needs, ranks=local_ranks(resolved), run_id=run_id)
            paths = {target: directories[root.path].path for target, root in roots.items()}
            lease = Lease(
                plan=resolved.with_nvme_path(**{one: str(path) for one, path in paths.items()}),
                paths=MappingProxyType(paths),
                run_id=run_id,
                decisions=(
                    *dict.fromkeys(one for root in roots.values() for one in root.decisions),
                    *_path_decisions(resolved, paths),
                    *cleaned,
                    *space,
                ),
            )
            undo.pop_all()
        return lease, tuple(directories.values())

    def _roots(self, resolved: ResolvedPlan, targets: tuple[Target, ...]) -> dict[Target, SwapRoot]:
        require_locks()
        choices: dict[Target, RootChoice] = {
            target: choose_root(
                target, arguments=self._arguments, resolved=resolved, environ=os.environ
            )
            for target in targets
        }
        checked = {choice: check_root(choice) for choice in dict.fromkeys(choices.values())}
        return {target: checked[choice] for target, choice in choices.items()}

    def _unused(self) -> tuple[Decision, ...]:
        return tuple(
            Decision(
                "offload.root",
                root,
                None,
                "the plan swaps nothing to NVMe, so no folder is created",
            )
            for root in attrs.astuple(self._arguments)
            if root is not None
        )


def _path_decisions(resolved: ResolvedPlan, paths: Mapping[Target, Path]) -> tuple[Decision, ...]:
    return tuple(
        Decision(
            f"zero_optimization.offload_{target}.nvme_path",
            resolved.nvme_paths.get(target),
            str(path),
            "this run gets a separate folder, because DeepSpeed uses the same file names "
            "for every run and deletes existing files at startup",
        )
        for target, path in paths.items()
    )
