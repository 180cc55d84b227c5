"""Delete leftovers of dead runs from a swap root."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from zerotune._util.files import system_errors
from zerotune._util.proc import filesystem_kind, mount_identity
from zerotune._util.text import format_size
from zerotune.decisions import Decision
from zerotune.errors import OffloadError
from zerotune.offload.lease import (
    DRAFT_PREFIX,
    dismantle,
    folder_bytes,
    judged,
    open_folder,
    remove_entry,
    require_locks,
    run_id_of,
    try_lock,
)

Kind = Literal["lease", "unfinished", "bare"]
_BARE_NAME: Final = re.compile(r"zero_stage_\d+", re.ASCII)
"""Folders that DeepSpeed itself creates in a swap root."""


@attrs.frozen(kw_only=True)
class Leftover:
    """A file or folder in a swap root that the clean-up deleted, kept or could not delete."""

    path: Path
    kind: Kind
    """``"lease"``: a run's folder. ``"unfinished"``: an incomplete folder of a dead process.
    ``"bare"``: a folder in DeepSpeed's layout without a lease."""
    nbytes: int
    """Bytes on disk that were freed or are in use; 0 if not measured."""
    reason: str
    """Why the leftover was deleted or kept, or why its deletion failed."""


@attrs.frozen(kw_only=True)
class CleanupReport:
    """Result of ``cleanup_stale_swap``."""

    root: Path
    dry_run: bool
    """Whether this was a dry run; ``removed`` then lists what would be deleted."""
    removed: tuple[Leftover, ...] = ()
    kept: tuple[Leftover, ...] = ()
    failures: tuple[Leftover, ...] = ()
    """Leftovers that could not be deleted completely."""

    @property
    def freed(self) -> int:
        """Bytes on disk that the clean-up freed, or would free without ``dry_run``."""
        return sum(one.nbytes for one in self.removed)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """A decision for each leftover that was deleted, could not be deleted, or has no lease."""
        verb = "would free" if self.dry_run else "freed"
        said = [(one, f"{verb} {format_size(one.nbytes)}") for one in self.removed]
        said += [(one, "could not be removed") for one in self.failures]
        bare = (one for one in self.kept if one.kind == "bare")
        said += [(one, f"takes {format_size(one.nbytes)}") for one in bare]
        removed = () if self.dry_run else self.removed
        return tuple(_cleanup_decision(one, what, gone=one in removed) for one, what in said)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict; sizes are integers in bytes."""
        return {
            "root": str(self.root),
            "dry_run": self.dry_run,
            "freed": self.freed,
            **{
                name: [{**attrs.asdict(one), "path": str(one.path)} for one in getattr(self, name)]
                for name in ("removed", "kept", "failures")
            },
        }


def _cleanup_decision(one: Leftover, what: str, *, gone: bool) -> Decision:
    path = str(one.path)
    return Decision(
        "offload.stale_swap",
        path,
        None if gone else path,
        f"{what}: {one.reason}",
        "note" if gone else "warning",
    )


Cleaner = Callable[[Path], CleanupReport]
"""Function that an ``OffloadManager`` calls with the swap root after creating a swap folder
there."""


def cleanup_stale_swap(root: str | os.PathLike[str], *, dry_run: bool = False) -> CleanupReport:
    """Delete swap folders of provably dead runs from a swap root.

    A folder is deleted only if zerotune created it, no process holds a lock on it, and no recorded
    owner is alive. Folders in DeepSpeed's layout (``zero_stage_3/…/rankN``) have no recorded owner,
    so they are only reported. Symbolic links are not followed, and mounts are not entered. Several
    processes may clean the same root at once, while runs start and end. An interrupted clean-up can
    be repeated.

    Args:
        root: The swap root.
        dry_run: Only report what would be deleted.

    Raises:
        OffloadError: The root is not a folder, is a symbolic link, or cannot be read.
    """
    require_locks()
    path = Path(root).expanduser()
    with system_errors(OffloadError, path, "cannot be cleaned"):
        sweep = _Sweep(path=path, dry_run=dry_run)
        sweep.run()
    return CleanupReport(
        root=path,
        dry_run=dry_run,
        removed=tuple(sweep.removed),
        kept=tuple(sweep.kept),
        failures=tuple(sweep.failures),
    )


@attrs.define(kw_only=True)
class _Sweep:
    path: Path
    dry_run: bool
    kind: str | None = None
    """Of file system."""
    removed: list[Leftover] = attrs.field(factory=list)
    kept: list[Leftover] = attrs.field(factory=list)
    failures: list[Leftover] = attrs.field(factory=list)

    def run(self) -> None:
        try:
            root = open_folder(self.path)
            try:
                self.kind = filesystem_kind(self.path.resolve())
                self._entries(root)
            finally:
                os.close(root)
        except OSError as error:
            linked = error.errno in {errno.ELOOP, errno.ENOTDIR} and self.path.is_symlink()
            raise OffloadError(
                "is a symbolic link" if linked else f"cannot be read ({error.strerror})",
                "pass the path of the swap root itself, not of a link to it"
                if linked
                else "pass the path of a folder that this user may read",
                "offload.root",
                str(self.path),
            ) from error

    def _entries(self, root: int) -> None:
        names = sorted(os.listdir(root))
        for name in names:
            if run_id_of(name) is not None:
                self._each(root, name, "lease", self._lease)
            elif _BARE_NAME.fullmatch(name):
                self._each(root, name, "bare", self._bare)
        unfinished = [name for name in names if name.startswith(DRAFT_PREFIX)]
        if unfinished:
            self._unfinished(root, unfinished)

    def _each(
        self, root: int, name: str, kind: Kind, act: Callable[[int, str], tuple[bool, int, str]]
    ) -> None:
        """Do one removal and record its result."""
        try:
            gone, nbytes, reason = act(root, name)
        except FileNotFoundError:
            # The run or another cleaner removed it first.
            return
        except (OSError, OffloadError) as error:
            said = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
            other = _other_owner(root, name) if isinstance(error, PermissionError) else None
            if other is not None:
                said = f"belongs to user {other}; only runs of that user can delete it ({said})"
            # Not a folder that zerotune made, but a link or a file.
            foreign = isinstance(error, NotADirectoryError)
            foreign = foreign or getattr(error, "errno", None) == errno.ELOOP
            target = self.kept if other is not None or foreign else self.failures
            target.append(self._leftover(name, kind, 0, str(said)))
            return
        (self.removed if gone else self.kept).append(self._leftover(name, kind, nbytes, reason))

    def _leftover(self, name: str, kind: Kind, nbytes: int, reason: str) -> Leftover:
        return Leftover(path=self.path / name, kind=kind, nbytes=nbytes, reason=reason)

    def _lease(self, root: int, name: str) -> tuple[bool, int, str]:
        with _opened_inside(root, name) as folder:
            with judged(folder, self.kind) as verdict:
                gone = verdict.state in ("empty", "stale")
                if gone and not self.dry_run:
                    size = dismantle(folder)
                    with suppress(FileNotFoundError):
                        os.rmdir(name, dir_fd=root)
                    return gone, size, verdict.reason
            # Without the lock, for which a leaving rank waits.
            return gone, folder_bytes(folder), verdict.reason

    def _bare(self, root: int, name: str) -> tuple[bool, int, str]:
        with _opened_inside(root, name) as folder:
            size = folder_bytes(folder)
        reason = "a folder in DeepSpeed's layout without a lease; delete it if no run uses it"
        return False, size, reason

    def _unfinished(self, root: int, names: list[str]) -> None:
        try:
            alone = try_lock(root, exclusive=True)
            reason = "a process is currently creating a folder in this root"
        except (OSError, OffloadError) as error:
            alone, reason = False, f"the process that was creating the entry may be alive ({error})"
        for name in names:
            if not alone:
                self.kept.append(self._leftover(name, "unfinished", 0, reason))
                continue
            self._each(root, name, "unfinished", self._remnant)

    def _remnant(self, root: int, name: str) -> tuple[bool, int, str]:
        with _opened_inside(root, name) as folder:
            size = folder_bytes(folder)
        if not self.dry_run:
            remove_entry(root, name)
        return True, size, "the process that was creating the entry has ended"


@contextmanager
def _opened_inside(root: int, name: str) -> Iterator[int]:
    folder = open_folder(name, within=root)
    try:
        if mount_identity(folder) != mount_identity(root):
            raise NotADirectoryError(0, "another file system is mounted here", name)
        yield folder
    finally:
        os.close(folder)


def _other_owner(root: int, name: str) -> int | None:
    """Return the owner of an entry if that is another user."""
    try:
        owner = os.stat(name, dir_fd=root, follow_symlinks=False).st_uid
    except OSError:
        return None
    return None if owner == os.geteuid() else owner
