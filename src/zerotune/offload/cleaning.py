"""Delete leftovers of dead runs from a swap root.

The module's sections are, in order: the clean-up with its report, the handling of DeepSpeed's swap
files without a lease, and the search for processes that may use these files.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from zerotune._util.files import system_errors
from zerotune._util.proc import filesystem_kind, locality_of, mount_identity
from zerotune._util.text import disk_size, listing
from zerotune.decisions import Decision
from zerotune.errors import OffloadError
from zerotune.offload.lease import (
    DRAFT_PREFIX,
    Removed,
    dismantle,
    folder_bytes,
    judged,
    open_folder,
    remove_entry,
    require_locks,
    run_id_of,
    try_lock,
)
from zerotune.offload.root import PROBE_PREFIX

Kind = Literal["lease", "unfinished", "bare"]


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
    """Leftovers that could not be deleted completely; ``nbytes`` counts the freed bytes."""

    @property
    def freed(self) -> int:
        """Bytes on disk that the clean-up freed, or would free without ``dry_run``."""
        return sum(one.nbytes for one in (*self.removed, *self.failures))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """A decision for each leftover that was deleted, could not be deleted, or has no lease."""
        bare = [one for one in self.kept if one.kind == "bare"]
        verb = "would free" if self.dry_run else "freed"
        return (
            *(_cleanup_decision(one, verb, gone=not self.dry_run) for one in self.removed),
            *(
                _cleanup_decision(one, "could not be removed; freed", gone=False)
                for one in self.failures
            ),
            *(_cleanup_decision(one, "takes", gone=False) for one in bare),
        )

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


def _cleanup_decision(one: Leftover, verb: str, *, gone: bool) -> Decision:
    return Decision(
        key="offload.stale_swap",
        before=str(one.path),
        after=None if gone else str(one.path),
        reason=f"{verb} {disk_size(one.nbytes)}: {one.reason}",
        severity="note" if gone else "warning",
    )


Cleaner = Callable[[Path], CleanupReport]
"""Function that an ``OffloadManager`` calls with the swap root after creating a swap folder
there."""


def cleanup_stale_swap(
    root: str | os.PathLike[str], *, dry_run: bool = False, adopt: bool = False
) -> CleanupReport:
    """Delete swap folders of provably dead runs from a swap root.

    A folder is deleted only if zerotune created it, no process holds a lock on it, and no recorded
    owner is alive. Folders in DeepSpeed's layout (``zero_stage_3/…/rankN``) have no recorded owner,
    so they are only reported, unless ``adopt`` is set. Symbolic links are not followed, and mounts
    are not entered. Several processes may clean the same root at once, while runs start and end. An
    interrupted clean-up can be repeated.

    Args:
        root: The swap root.
        dry_run: Only report what would be deleted.
        adopt: Also delete a folder in DeepSpeed's layout if every process can be inspected and no
            process uses the folder's files.

    Raises:
        OffloadError: The root is not a folder, is a symbolic link, or cannot be read.
    """
    require_locks()
    path = Path(root).expanduser()
    with system_errors(OffloadError, path, "cannot be cleaned"):
        sweep = _Sweep(path=path, dry_run=dry_run, adopt=adopt)
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
    adopt: bool
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
                key="offload.root",
                value=str(self.path),
                fix="pass the path of the swap root itself, not of a link to it"
                if linked
                else "pass the path of a folder that this user may read",
            ) from error

    def _entries(self, root: int) -> None:
        names = sorted(os.listdir(root))
        for name in names:
            if run_id_of(name) is not None:
                self._each(root, name, "lease", self._lease)
            elif is_bare(name):
                self._each(root, name, "bare", self._bare)
        prefixes = (DRAFT_PREFIX, PROBE_PREFIX)
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
        """Do one removal and record its result, including the bytes freed before a failure."""
        removed = Removed()
        try:
            gone, nbytes, reason = act(root, name, removed)
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
            target.append(self._leftover(name, kind, removed.freed, str(said)))
            return
        (self.removed if gone else self.kept).append(self._leftover(name, kind, nbytes, reason))

    def _leftover(self, name: str, kind: Kind, nbytes: int, reason: str) -> Leftover:
        return Leftover(path=self.path / name, kind=kind, nbytes=nbytes, reason=reason)

    def _lease(self, root: int, name: str, removed: Removed) -> tuple[bool, int, str]:
        folder = _open_inside(root, name)
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
        folder = _open_inside(root, name)
        try:
            swap = survey(folder)
        finally:
            os.close(folder)
        if not self.adopt:
            reason = (
                "a folder in DeepSpeed's layout without a lease; adopt=True deletes the folder if "
                "no process uses it"
            )
            return False, swap.nbytes, reason
        if self.dry_run:
            doubt = doubt_about(swap, self.kind)
        else:
            doubt = remove_bare(root, name, kind=self.kind, removed=removed)
        if doubt is not None:
            return False, swap.nbytes, doubt
        size = swap.nbytes if self.dry_run else removed.freed
        return True, size, "a folder in DeepSpeed's layout that no process uses"

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

    def _remnant(self, root: int, name: str, removed: Removed) -> tuple[bool, int, str]:
        before = os.stat(name, dir_fd=root, follow_symlinks=False).st_blocks * 512
        if not self.dry_run:
            remove_entry(root, name, mount_identity(root), removed)
        size = before if self.dry_run else removed.freed
        return True, size, "the process that was creating the entry has ended"


def _open_inside(root: int, name: str) -> int:
    folder = open_folder(name, within=root)
    if mount_identity(folder) != mount_identity(root):
        os.close(folder)
        raise NotADirectoryError(0, "another file system is mounted here", name)
    return folder


def _other_owner(root: int, name: str) -> int | None:
    """Return the owner of an entry if that is another user."""
    try:
        owner = os.stat(name, dir_fd=root, follow_symlinks=False).st_uid
    except OSError:
        return None
    return None if owner == os.geteuid() else owner


# -- Swap files that DeepSpeed wrote straight into a root, without a lease.

ADOPTED_PREFIX: Final = ".zerotune-adopted-"
"""Name prefix of a folder in DeepSpeed's layout while the folder is being removed."""

_LAYOUT_NAME: Final = re.compile(r"zero_stage_\d+", re.ASCII)
# Names of DeepSpeed 0.19.8: runtime/swap_tensor/partitioned_param_swapper.py, optimizer_utils.py.
_PART_NAME: Final = re.compile(r"optimizer|[a-z0-9]+params", re.ASCII)
_RANK_NAME: Final = re.compile(r"rank\d+", re.ASCII)
_FILE_NAME: Final = re.compile(r".+\.swp")


@attrs.frozen(kw_only=True)
class BareSwap:
    """Size, files and last modification time of a folder in DeepSpeed's layout."""

    nbytes: int
    """Bytes allocated on disk."""
    files: frozenset[tuple[int, int]]
    """Device and inode of every swap file."""
    last_written: float
    """Latest modification time of the files and folders, in seconds since 1970."""
    foreign: str | None
    """Path of a file that DeepSpeed did not write; ``None`` if there is none."""


def is_bare(name: str) -> bool:
    """Return whether a name in a swap root denotes a folder in DeepSpeed's layout."""
    return _LAYOUT_NAME.fullmatch(name) is not None or name.startswith(ADOPTED_PREFIX)


def survey(folder: int) -> BareSwap:
    """Inspect a folder in DeepSpeed's layout; ``folder`` is its open descriptor."""
    files, foreign, newest = set(), None, os.fstat(folder).st_mtime
    for path, facts, fits in _walk_bare(folder, (_PART_NAME, _RANK_NAME, _FILE_NAME), ""):
        newest = max(newest, facts.st_mtime)
        if not fits:
            foreign = foreign or path
        elif stat.S_ISREG(facts.st_mode):
            files.add((facts.st_dev, facts.st_ino))
    return BareSwap(
        nbytes=folder_bytes(folder),
        files=frozenset(files),
        last_written=newest,
        foreign=foreign,
    )


def _walk_bare(
    folder: int, levels: tuple[re.Pattern[str], ...], above: str
) -> Iterator[tuple[str, os.stat_result, bool]]:
    """Yield path, stat and whether the name fits DeepSpeed's layout, for everything below.

    Folders that do not fit are not entered.
    """
    pattern, *deeper = levels
    for name in sorted(os.listdir(folder)):
        try:
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        right_type = stat.S_ISDIR(facts.st_mode) if deeper else stat.S_ISREG(facts.st_mode)
        fits = right_type and pattern.fullmatch(name) is not None
        yield f"{above}{name}", facts, fits
        if fits and deeper:
            child = open_folder(name, within=folder)
            try:
                yield from _walk_bare(child, tuple(deeper), f"{above}{name}/")
            finally:
                os.close(child)


def doubt_about(swap: BareSwap, kind: str | None) -> str | None:
    """Return why a folder must be kept, or ``None`` if it can be deleted.

    Args:
        swap: Contents of the folder.
        kind: Type of the folder's file system.
    """
    if swap.foreign is not None:
        return f"contains {swap.foreign}, which is not a swap file of DeepSpeed"
    if locality_of(kind) not in ("local", "memory", "overlay"):
        return f"other machines may use the folder through {kind or 'an unknown file system'}"
    try:
        return users_of(swap.files, last_written=swap.last_written).doubt()
    except OSError as error:
        return f"the processes that use the folder cannot be determined ({error.strerror or error})"


def remove_bare(root: int, name: str, *, kind: str | None, removed: Removed) -> str | None:
    """Delete an unused folder in DeepSpeed's layout, or return why the folder must be kept.

    The folder is first renamed, so that a run that starts during the deletion creates a new folder.
    The renamed folder is inspected again, to detect a run that started just before the renaming.

    Args:
        root: Descriptor of the swap root.
        name: Name of the folder.
        kind: Type of the folder's file system.
        removed: Progress counter.
    """
    with _locked_against_cleaners(root, name) as folder:
        if folder is None:
            return "another process is deleting the folder"
        if reason := doubt_about(survey(folder), kind):
            return reason
        aside = f"{ADOPTED_PREFIX}{secrets.token_hex(6)}"
        os.rename(name, aside, src_dir_fd=root, dst_dir_fd=root)
        if reason := doubt_about(survey(folder), kind):
            _put_back(root, aside, name)
            return reason
        remove_entry(root, aside, mount_identity(root), removed)
    return None


def _put_back(root: int, aside: str, name: str) -> None:
    try:
        os.stat(name, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(aside, name, src_dir_fd=root, dst_dir_fd=root)
        return
    raise OffloadError(
        "a process began to use the folder during its removal, so nothing was deleted; the folder "
        f"is now called {aside}, because a newer folder has its old name",
        key="cleanup_stale_swap",
        value=name,
        fix="stop both runs, and create a separate swap folder for each run with OffloadManager",
    )


@contextmanager
def _locked_against_cleaners(root: int, name: str) -> Iterator[int | None]:
    """Yield the folder, locked against other cleaners; ``None`` if another cleaner is at work."""
    folder = open_folder(name, within=root)
    try:
        if not try_lock(folder, exclusive=True):
            yield None
            return
        if os.fstat(folder).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        yield folder
    finally:
        os.close(folder)


# -- Processes that may be using the files.

_KERNEL_THREAD: Final = 0x00200000
"""``PF_KTHREAD`` of the kernel's ``sched.h``, in field 9 of ``/proc/N/stat``."""
_CLOCK_SLACK: Final = 2.0


@attrs.frozen(kw_only=True)
class Users:
    """Processes on this machine that use, or may use, the files of a folder."""

    open_in: tuple[int, ...] = ()
    """Ids of processes that have one of the files open."""
    swapping: tuple[int, ...] = ()
    """Ids of processes that use DeepSpeed's aio without a lease and were running when the files
    were last written. DeepSpeed opens a swap file only to read or write it, so such a process may
    own files that are closed now."""
    hidden: tuple[int, ...] = ()
    """Ids of processes that this user may not inspect."""

    def doubt(self) -> str | None:
        """Return why the files may be in use; ``None`` if no process uses them."""
        if self.open_in:
            return f"process {listing(self.open_in, most=5)} has one of the folder's files open"
        if self.swapping:
            return (
                f"process {listing(self.swapping, most=5)} may own the folder: it uses "
                "DeepSpeed's aio without a lease and was running when the folder was last written"
            )
        if self.hidden:
            return (
                "this user may not inspect the open files of process "
                f"{listing(self.hidden, most=5)}; clean up as root"
            )
        return None


def users_of(
    files: Collection[tuple[int, int]], *, last_written: float, proc: Path = Path("/proc")
) -> Users:
    """Find the processes that use, or may use, any of ``files``.

    Processes on other machines are not found. Inside a container, processes outside the container
    are not found.

    Args:
        files: Device and inode of each file.
        last_written: Time of the last write to the files, in seconds since 1970.
        proc: Mount point of the proc file system.
    """
    wanted = frozenset(files)
    lines = (proc / "stat").read_text("ascii").splitlines()
    booted = next((float(line.split()[1]) for line in lines if line.startswith("btime ")), None)
    if booted is None:
        raise OSError("the machine's boot time is unknown")
    open_in, swapping, hidden = [], [], []
    # A kernel that hides other users' processes hides process 1 as well.
    if not (proc / "1").exists():
        hidden.append(1)
    for pid in sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()):
        process = proc / str(pid)
        try:
            started = _start_of_user_process(process)
            if started is None:
                continue
            opened, leased = _open_files(process)
            if wanted & opened:
                open_in.append(pid)
                continue
            was_running = booted + started <= last_written + _CLOCK_SLACK
            if was_running and not leased:
                maps = (process / "maps").read_text("utf-8", errors="replace")
                # DeepSpeed swaps with this op.
                if "async_io" in maps:
                    swapping.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            # The process ended meanwhile.
            continue
        except PermissionError:
            hidden.append(pid)
    return Users(open_in=tuple(open_in), swapping=tuple(swapping), hidden=tuple(hidden))


def _start_of_user_process(process: Path) -> float | None:
    """Return the start in seconds since boot; ``None`` for a zombie or a kernel thread."""
    fields = (process / "stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
    if fields[0] in "ZX" or int(fields[6]) & _KERNEL_THREAD:
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _open_files(process: Path) -> tuple[set[tuple[int, int]], bool]:
    """Return device and inode of each open file, and whether a lease's lock is among them."""
    opened, leased = set(), False
    for descriptor in (process / "fd").iterdir():
        try:
            facts = descriptor.stat()
            leased = leased or descriptor.readlink().name == "lease.lock"
        except FileNotFoundError:
            continue
        opened.add((facts.st_dev, facts.st_ino))
    return opened, leased
