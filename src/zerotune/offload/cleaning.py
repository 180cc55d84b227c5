"""Free what dead runs left in a swap root, and nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import attrs

from zerotune._util.files import system_errors
from zerotune._util.proc import filesystem_kind, mount_identity
from zerotune._util.text import disk_size
from zerotune.decisions import Decision
from zerotune.errors import OffloadError
from zerotune.offload.bare import doubt_about, is_bare, remove_bare, survey
from zerotune.offload.lease import (
    DRAFT_PREFIX,
    dismantle,
    judged,
    require_locks,
    run_id_of,
    try_lock,
)
from zerotune.offload.removal import DEEP_PREFIX, Removed, folder_bytes, open_folder, remove_entry
from zerotune.offload.root import BENCH_PREFIX, PROBE_PREFIX

Kind = Literal["lease", "unfinished", "bare"]


@attrs.frozen(kw_only=True)
class Leftover:
    """Something in a swap root, and what became of it."""

    path: Path
    kind: Kind
    """``"lease"``: a run's folder. ``"unfinished"``: what a process that died was making.
    ``"bare"``: DeepSpeed's own layout, which no lease protects."""
    nbytes: int
    """Bytes on disk: those freed, or those it takes; 0 where it was not measured."""
    reason: str
    """Why it was removed or kept, or how its removal failed."""


@attrs.frozen(kw_only=True)
class CleanupReport:
    """What ``cleanup_stale_swap`` did, or would do."""

    root: Path
    dry_run: bool
    """Whether nothing was changed; ``removed`` then holds what would be."""
    removed: tuple[Leftover, ...] = ()
    kept: tuple[Leftover, ...] = ()
    failures: tuple[Leftover, ...] = ()
    """What should have gone and could not, ``nbytes`` of it freed all the same."""

    @property
    def freed(self) -> int:
        """Bytes on disk that were freed, or would be."""
        return sum(one.nbytes for one in (*self.removed, *self.failures))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One record of each thing that was removed, or could not be, or belongs to nobody."""
        bare = [one for one in self.kept if one.kind == "bare"]
        verb = "would free" if self.dry_run else "freed"
        return (
            *(_decision(one, verb, gone=not self.dry_run) for one in self.removed),
            *(_decision(one, "could not be removed; freed", gone=False) for one in self.failures),
            *(_decision(one, "takes", gone=False) for one in bare),
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data that JSON can hold; bytes are whole numbers."""
        return {
            "root": str(self.root),
            "dry_run": self.dry_run,
            "freed": self.freed,
            **{
                name: [{**attrs.asdict(one), "path": str(one.path)} for one in getattr(self, name)]
                for name in ("removed", "kept", "failures")
            },
        }


def _decision(one: Leftover, verb: str, *, gone: bool) -> Decision:
    return Decision(
        key="offload.stale_swap",
        before=str(one.path),
        after=None if gone else str(one.path),
        reason=f"{verb} {disk_size(one.nbytes)}: {one.reason}",
        severity="note" if gone else "warning",
    )


Cleaner = Callable[[Path], CleanupReport]
"""What an ``OffloadManager`` calls on each root it leases a folder in."""


def cleanup_stale_swap(
    root: str | os.PathLike[str], *, dry_run: bool = False, adopt: bool = False
) -> CleanupReport:
    """Remove what runs that are provably dead left in a swap root.

    Removed are folders that zerotune leased and that no process holds: the kernel dropped the
    lock when the last rank died, and no owner on record is alive. Everything else stays. A file
    of DeepSpeed's own layout (``zero_stage_3/…/rankN``) belongs to nobody in particular; it is
    reported, and removed only with ``adopt``. Symbolic links are never followed, mounts never
    crossed. Any number of processes may clean one root at once, while runs start and end there;
    a clean-up that is interrupted can be repeated.

    Args:
        root: The swap root.
        dry_run: Change nothing, and report what would go.
        adopt: Also remove DeepSpeed's own layout, where no process has a file in it open and
            every process could be asked.

    Raises:
        OffloadError: The root is no folder, is a symbolic link, or cannot be read.
    """
    require_locks()
    path = Path(root).expanduser()
    with system_errors(OffloadError, path, "cannot be cleaned up"):
        return _clean(path, dry_run=dry_run, adopt=adopt)


def _clean(path: Path, *, dry_run: bool, adopt: bool) -> CleanupReport:
    sweep = _Sweep(path=path, dry_run=dry_run, adopt=adopt, kind=None)
    try:
        descriptor = open_folder(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        sweep.kind = filesystem_kind(path.resolve())
        sweep.run(descriptor)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    return CleanupReport(
        root=path,
        dry_run=dry_run,
        removed=tuple(sweep.removed),
        kept=tuple(sweep.kept),
        failures=tuple(sweep.failures),
    )


def _unreadable(path: Path, error: OSError) -> OffloadError:
    linked = error.errno in {errno.ELOOP, errno.ENOTDIR} and path.is_symlink()
    reason = "is a symbolic link" if linked else f"cannot be read ({error.strerror})"
    return OffloadError(
        reason, key="offload.root", value=str(path), fix="give the swap root itself, a folder"
    )


@attrs.define(kw_only=True)
class _Sweep:
    path: Path
    dry_run: bool
    adopt: bool
    kind: str | None
    removed: list[Leftover] = attrs.field(factory=list)
    kept: list[Leftover] = attrs.field(factory=list)
    failures: list[Leftover] = attrs.field(factory=list)

    def run(self, root: int) -> None:
        names = sorted(os.listdir(root))
        for name in names:
            if run_id_of(name) is not None:
                self._each(root, name, "lease", self._lease)
            elif is_bare(name):
                self._each(root, name, "bare", self._bare)
        prefixes = (DRAFT_PREFIX, PROBE_PREFIX, BENCH_PREFIX, DEEP_PREFIX)
        unfinished = [name for name in names if name.startswith(prefixes)]
        if unfinished:
            self._unfinished(root, unfinished)

    def _each(
        self,
        root: int,
        name: str,
        kind: Kind,
        act: Callable[[int, str, Removed], tuple[bool, int, str]],
    ) -> None:
        """Do one thing; note what came of it, what it freed before it failed included."""
        removed = Removed()
        try:
            gone, nbytes, reason = act(root, name, removed)
        except FileNotFoundError:
            # Its run, or another cleaner, was faster.
            return
        except (OSError, OffloadError) as error:
            said = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
            other = _other_owner(root, name) if isinstance(error, PermissionError) else None
            if other is not None:
                said = f"belongs to user {other}, whose runs clean it up ({said})"
            target = self.kept if other is not None or _is_foreign(error) else self.failures
            target.append(self._leftover(name, kind, removed.freed, str(said)))
            return
        (self.removed if gone else self.kept).append(self._leftover(name, kind, nbytes, reason))

    def _leftover(self, name: str, kind: Kind, nbytes: int, reason: str) -> Leftover:
        return Leftover(path=self.path / name, kind=kind, nbytes=nbytes, reason=reason)

    def _lease(self, root: int, name: str, removed: Removed) -> tuple[bool, int, str]:
        folder = _opened(root, name)
        try:
            with judged(folder, self.kind) as verdict:
                if verdict.state == "empty" and not self.dry_run:
                    with suppress(FileNotFoundError):
                        os.rmdir(name, dir_fd=root)
                elif verdict.state == "stale" and not self.dry_run:
                    dismantle(folder, removed)
                    os.rmdir(name, dir_fd=root)
            gone = verdict.state in ("empty", "stale")
            size = removed.freed if gone and not self.dry_run else folder_bytes(folder)
        finally:
            os.close(folder)
        return gone, size, verdict.reason

    def _bare(self, root: int, name: str, removed: Removed) -> tuple[bool, int, str]:
        folder = _opened(root, name)
        try:
            found = survey(folder)
        finally:
            os.close(folder)
        if not self.adopt:
            reason = "DeepSpeed's own layout, leased by nobody; adopt=True removes it when unused"
            return False, found.nbytes, reason
        if self.dry_run:
            doubt = doubt_about(found, self.kind)
        else:
            doubt = remove_bare(root, name, kind=self.kind, removed=removed)
        if doubt is not None:
            return False, found.nbytes, doubt
        size = found.nbytes if self.dry_run else removed.freed
        return True, size, "DeepSpeed's own layout, in use by no process"

    def _unfinished(self, root: int, names: list[str]) -> None:
        try:
            alone = try_lock(root, exclusive=True)
            reason = "a process is making something in this root now"
        except (OSError, OffloadError) as error:
            alone, reason = False, f"it cannot be told whether its maker lives ({error})"
        for name in names:
            if not alone:
                self.kept.append(self._leftover(name, "unfinished", 0, reason))
                continue
            self._each(root, name, "unfinished", self._remnant)

    def _remnant(self, root: int, name: str, removed: Removed) -> tuple[bool, int, str]:
        before = os.stat(name, dir_fd=root, follow_symlinks=False).st_blocks * 512
        if not self.dry_run:
            remove_entry(root, name, mount_identity(root), removed)
        size = before if self.dry_run else removed.freed
        return True, size, "the process that was making it has ended"


def _opened(root: int, name: str) -> int:
    folder = open_folder(name, within=root)
    if mount_identity(folder) != mount_identity(root):
        os.close(folder)
        raise NotADirectoryError(0, "another file system is mounted here", name)
    return folder


def _other_owner(root: int, name: str) -> int | None:
    """The user a name belongs to, if that is another than ours."""
    try:
        owner = os.stat(name, dir_fd=root, follow_symlinks=False).st_uid
    except OSError:
        return None
    return None if owner == os.geteuid() else owner


def _is_foreign(error: Exception) -> bool:
    """Whether it is no folder of ours at all: a link, a file, a mount."""
    return isinstance(error, NotADirectoryError) or getattr(error, "errno", None) == errno.ELOOP
