"""Ownership of a swap folder: its lock, and how a lease is found and ended.

A lease is a swap folder that belongs to one run. The module's sections are, in order: the lock on
one folder, the search for leases in a root, the end of a lease, and the safe
measurement and removal of folders.
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import shutil
import signal
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, Literal

import attrs

from zerotune._util import ownership
from zerotune._util.files import open_regular, system_errors
from zerotune._util.ownership import is_run_id
from zerotune._util.proc import LOCAL_FILESYSTEMS, filesystem_kind, mount_identity
from zerotune.decisions import Decision
from zerotune.errors import OffloadError
from zerotune.offload.record import LeaseRecord

_LEASE_PREFIX: Final = "zerotune-"


def lease_name(run_id: str) -> str:
    """Return the name of a run's folder inside a swap root."""
    return f"{_LEASE_PREFIX}{run_id}"


def is_record(name: str) -> bool:
    """Return whether a file name inside a lease belongs to a rank's record."""
    return name.startswith("rank") and name.endswith(".json")


def run_id_of(name: str) -> str | None:
    """Return the run id in the name of a lease, or ``None`` for any other name."""
    run_id = name.removeprefix(_LEASE_PREFIX)
    return run_id if name != run_id and is_run_id(run_id) else None


# -- Ownership of one run's folder inside a swap root.
#
# A folder is held through a shared ``flock`` on its ``lease.lock``, one per rank. The kernel drops
# a rank's lock when the rank dies, however it dies, so the folder is live exactly as long as any
# rank is, and a process that obtains the *exclusive* lock knows that no rank holds it any more.


LOCK_FILE: Final = "lease.lock"
DRAFT_PREFIX: Final = ".zerotune-new-"
"""Name prefix of an incomplete lease; its creator locks the root until the lease is complete."""

_JOIN_PATIENCE: Final = 5.0
_LEAVE_PATIENCE: Final = 0.5

_directories_held: weakref.WeakSet[SwapDirectory] = weakref.WeakSet()


Removal = Literal["removed", "held", "gone"]
"""Result of leaving a folder. ``"held"``: another rank still has a lock on the folder and will
delete it; ``"gone"``: another process has already deleted the folder."""


class SwapDirectory:
    """A run's folder inside a swap root; this process keeps it locked until ``leave``.

    Attributes:
        path: Path of the folder, ``<root>/zerotune-<run id>``.
        created: Whether this rank created the folder; the other ranks join it.
        ranks: Number of ranks that may lock the folder.
    """

    def __init__(self, *, path: Path, created: bool, ranks: int, lock: int) -> None:
        self.path = path
        self.created = created
        self.ranks = ranks
        self._lock: int | None = lock
        _when_processes_end()
        ownership.keep_from_children(self)
        _directories_held.add(self)

    @classmethod
    def claim(cls, root: Path, record: LeaseRecord) -> SwapDirectory:
        """Create and lock the run's folder, or lock the folder that another rank has created.

        Args:
            root: The swap root.
            record: This rank's record.
        """
        path = root / lease_name(record.run_id)
        try:
            lock = _join(path, record)
            created = lock is None
            if lock is None:
                lock = _create(root, path, record)
            if lock is None:
                created, lock = False, _join(path, record)
        except OSError as error:
            raise _lease_error(path, "cannot be created or joined", error) from error
        if lock is None:
            raise OffloadError(
                "was deleted while this rank was locking it",
                "start the run again",
                "offload.root",
                str(path),
            )
        return cls(path=path, created=created, ranks=record.world_size, lock=lock)

    @property
    def held(self) -> bool:
        """Whether this process still holds its lock on the folder."""
        return self._lock is not None

    def leave(self) -> None:
        """Release this rank's lock; the folder is kept."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        _directories_held.discard(self)

    def leave_and_remove(self) -> Removal:
        """Release this rank's lock, and delete the folder if no other rank has locked it."""
        if self._lock is None:
            return "held"
        try:
            if not try_lock(self._lock, exclusive=True, patience=_LEAVE_PATIENCE):
                return "held"
            return _remove_own(self.path, self._lock)
        except OSError as error:
            raise _lease_error(self.path, "cannot be removed", error) from error
        finally:
            self.leave()


def _join(path: Path, record: LeaseRecord) -> int | None:
    """Lock the folder that another rank created; return ``None`` if there is none."""
    try:
        folder = open_folder(path)
    except FileNotFoundError:
        return None
    try:
        lock = open_regular(LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW, within=folder)
    finally:
        os.close(folder)
    try:
        # Another run's probe holds the exclusive lock only for a moment, so wait for it.
        _share(lock, path, unless="deleting the folder")
        if os.fstat(lock).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "it was removed meanwhile", str(path))
        _check_same_plan(path, record)
        record.write(path)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _check_same_plan(path: Path, record: LeaseRecord) -> None:
    for file in sorted(path.glob("rank*.json")):
        other = LeaseRecord.read(file)
        if other.plan_digest != record.plan_digest:
            raise OffloadError(
                f"rank {record.rank} has a different plan from rank {other.rank}, which wrote "
                f"this record: {record.plan_digest[:12]} instead of {other.plan_digest[:12]}",
                "give every rank the same configuration and arguments",
                "lease record",
                str(file),
            )


def _create(root: Path, path: Path, record: LeaseRecord) -> int | None:
    """Make the folder, complete and locked before its name appears.

    Returns:
        The lock's descriptor, or ``None`` if another rank was faster.
    """
    with making_in(root):
        draft = Path(tempfile.mkdtemp(prefix=DRAFT_PREFIX, dir=root))
        lock = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(draft / LOCK_FILE, flags, 0o600)
            try_lock(lock, exclusive=False)
            record.write(draft)
            draft.rename(path)
        except BaseException as error:
            if lock >= 0:
                os.close(lock)
            # The draft's name is random and known to this process alone, so nothing uses it.
            shutil.rmtree(draft)
            if isinstance(error, OSError) and error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                return None
            raise
    return lock


def try_lock(descriptor: int, *, exclusive: bool, patience: float = 0.0) -> bool:
    """Try to lock an open file, and return whether the lock was obtained.

    Args:
        descriptor: Descriptor of the file.
        exclusive: Whether the lock is exclusive; otherwise it is shared.
        patience: Seconds to wait for the lock.
    """
    try:
        return ownership.try_lock(descriptor, exclusive=exclusive, patience=patience)
    except OSError as error:
        if ownership.lacks_locks(error):
            raise _no_locks("this file system does not support file locks") from error
        raise


def require_locks() -> None:
    """Check that this operating system supports leases."""
    if not ownership.has_locks():
        raise _no_locks("this operating system lacks flock, so a run cannot lock its swap folder")


def _no_locks(reason: str) -> OffloadError:
    return OffloadError(
        reason, "use a local disk on Linux, or offload to cpu instead of nvme", "offload.root"
    )


def _lease_error(path: Path, what: str, error: OSError) -> OffloadError:
    return OffloadError(
        f"{what} ({error.strerror or error}: {error.filename or path})",
        "check the permissions and the free space of the swap root",
        "offload.root",
        str(path),
    )


def _share(descriptor: int, path: Path, *, unless: str) -> None:
    """Take a shared lock; ``unless`` says what a process does that holds the exclusive one."""
    if not try_lock(descriptor, exclusive=False, patience=_JOIN_PATIENCE):
        raise OffloadError(
            f"is locked by a process that is {unless}",
            "start the run again",
            "offload.root",
            str(path),
        )


@contextmanager
def making_in(root: Path) -> Iterator[None]:
    """Hold a shared lock on a swap root inside the ``with`` block, to create files there.

    The kernel releases the lock when the process dies. A process that obtains an exclusive lock on
    the root therefore knows that every unfinished file or folder is a leftover.
    """
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _share(folder, root, unless="cleaning up the root")
        yield
    finally:
        os.close(folder)


def _remove_own(path: Path, lock: int) -> Removal:
    if os.fstat(lock).st_nlink == 0:
        return "gone"
    try:
        folder = open_folder(path)
    except FileNotFoundError:
        return "gone"
    try:
        try:
            present = os.stat(LOCK_FILE, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            present = None
        if present is None or not os.path.samestat(present, os.fstat(lock)):
            raise OffloadError(
                "is no longer the folder that this run created, so nothing in it was deleted",
                "inspect the folder, and delete it yourself if its contents are yours",
                "offload.root",
                str(path),
            )
        dismantle(folder)
    finally:
        os.close(folder)
    with suppress(FileNotFoundError):
        path.rmdir()
    return "removed"


def dismantle(folder: int) -> int:
    """Delete the contents of a leased folder that the caller has locked exclusively.

    The records and the lock file are deleted last. If the deletion is interrupted, the folder is
    therefore still recognised as a lease. The missing lock then shows that no process owns the
    lease.

    Args:
        folder: Descriptor of the folder.

    Returns:
        Bytes on disk that were freed.
    """
    freed = folder_bytes(folder)
    names = os.listdir(folder)
    # False before True.
    for name in sorted(names, key=lambda name: (name == LOCK_FILE, is_record(name))):
        remove_entry(folder, name)
    return freed


@functools.cache
def _when_processes_end() -> None:
    # A script that ends with an error outside any `with` block closes nothing.
    atexit.register(abandon_held)
    # When a rank has failed, a launcher sends SIGTERM to the others; a scheduler sends it to a job
    # whose time is over. A handler of the script is kept; only the main thread may set handlers.
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, give_back)


# -- Find the leases inside a swap root and tell stale from live ones.


LeaseState = Literal["live", "stale", "empty", "unknown"]


@attrs.frozen(kw_only=True)
class Verdict:
    """State of an open lease, valid while the caller holds the lease's lock."""

    state: LeaseState
    """``"live"``: a process holds a lock on the folder. ``"stale"``: the owner is provably dead.
    ``"empty"``: the removal of the folder is in progress, or was interrupted at the last step.
    ``"unknown"``: the owner may be alive, so the folder is kept."""
    reason: str
    """Why the folder is in this state."""
    records: tuple[LeaseRecord, ...] = ()
    """Records of the run's ranks, in rank order."""


@attrs.frozen(kw_only=True)
class FoundLease(Verdict):
    """A leased folder found inside a swap root."""

    path: Path
    """Path of the folder."""
    run_id: str
    """Id of the run that created the folder."""
    size: int
    """Bytes on disk; 0 if the folder cannot be examined."""

    @property
    def reserved(self) -> int:
        """Maximum bytes that the run's ranks write to the folder; 0 if unknown."""
        return sum(record.reserved for record in self.records)

    @property
    def still_to_come(self) -> int:
        """Reserved bytes that have not been written yet."""
        return max(0, self.reserved - self.size)


def find_leases(root: Path) -> tuple[FoundLease, ...]:
    """Return every lease inside a swap root, sorted by name, without changing any file.

    Args:
        root: The swap root.

    Raises:
        OffloadError: The root cannot be listed.
    """
    with system_errors(OffloadError, root, "the swap root cannot be listed"):
        paths = sorted(root.iterdir())
    kind = filesystem_kind(root.resolve())
    leases = (_inspect(path, run_id_of(path.name), kind) for path in paths)
    return tuple(lease for lease in leases if lease is not None)


def _inspect(path: Path, run_id: str | None, kind: str | None) -> FoundLease | None:
    """Return the state of one folder; ``None`` if it is no lease or was removed meanwhile."""
    if run_id is None:
        return None
    size = 0
    try:
        folder = open_folder(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        verdict = Verdict(state="unknown", reason=f"cannot be opened ({error.strerror})")
    else:
        try:
            with judged(folder, kind) as verdict:
                # Release the lock before anything slow, because a leaving rank waits for it.
                pass
            size = folder_bytes(folder)
        except OSError as error:
            if not path.exists():
                return None
            verdict = Verdict(state="unknown", reason=f"cannot be examined ({error.strerror})")
        finally:
            os.close(folder)
    judgement = attrs.asdict(verdict, recurse=False)
    return FoundLease(path=path, run_id=run_id, size=size, **judgement)


@contextmanager
def judged(folder: int, kind: str | None) -> Iterator[Verdict]:
    """Context manager that yields a lease's state, and locks a lease without a living owner.

    Args:
        folder: Descriptor of the lease's folder.
        kind: Type of the folder's file system.
    """
    try:
        lock = open_regular(LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW, within=folder)
    except FileNotFoundError:
        if os.fstat(folder).st_nlink and not os.listdir(folder):
            yield Verdict(state="empty", reason="the removal is in progress or was interrupted")
            return
        raise
    try:
        yield _judge(folder, lock, kind)
    finally:
        os.close(lock)


def _judge(folder: int, lock: int, kind: str | None) -> Verdict:
    try:
        if not try_lock(lock, exclusive=True):
            # Read without the lock, so a leaving rank may delete a record meanwhile.
            records: tuple[LeaseRecord, ...] = ()
            with suppress(OSError, OffloadError):
                records = _read_records(folder)
            return Verdict(state="live", reason="a process locks the folder", records=records)
        if os.fstat(lock).st_nlink == 0:
            # Its owner removed it between opening and locking.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), LOCK_FILE)
        # Read under the lock: a leaving rank deletes its record under the same lock, and would seem
        # dead if the record disappeared between checking the lock and reading.
        records = _read_records(folder)
    except OffloadError as error:
        return Verdict(state="unknown", reason=f"has a damaged record: {error.reason}")
    doubt = next((doubt for record in records if (doubt := record.doubt(kind))), None)
    # A removal deletes the records after everything but the lock.
    if not records and kind not in LOCAL_FILESYSTEMS and os.listdir(folder) != [LOCK_FILE]:
        where = kind or "this file system"
        doubt = f"has files but no lease record, and on {where} a free lock proves nothing"
    return Verdict(
        state="unknown" if doubt else "stale",
        reason=doubt or "no process locks the folder",
        records=records,
    )


def _read_records(folder: int) -> tuple[LeaseRecord, ...]:
    records = []
    for name in os.listdir(folder):
        if is_record(name):
            records.append(LeaseRecord.read(name, within=folder))
    return tuple(sorted(records, key=lambda record: record.rank))


# -- End a lease: who removes the folders, and what happens when that fails.


def release(
    directories: tuple[SwapDirectory, ...], barrier: Callable[[], None] | None
) -> tuple[tuple[Decision, ...], tuple[OffloadError, ...]]:
    """Release a successful run's locks on its folders, and delete the folders.

    Args:
        directories: Folders of the run.
        barrier: Function that waits for all ranks; the creator of each folder then deletes it.
            Without a barrier, the last rank to leave a folder deletes it.

    Returns:
        Decisions and errors about folders that could not be deleted.
    """
    if barrier is not None:
        for directory in directories:
            if not directory.created:
                directory.leave()
        barrier()
    decisions: list[Decision] = []
    errors: list[OffloadError] = []
    for directory in directories:
        if not directory.held:
            continue
        try:
            removal = directory.leave_and_remove()
        except OffloadError as error:
            errors.append(error)
            continue
        # Without a barrier, another rank may still use the folder or may have removed it already.
        if barrier is None and directory.ranks > 1:
            continue
        if removal == "gone":
            decisions.append(
                Decision(
                    "offload.release",
                    str(directory.path),
                    None,
                    f"the swap folder {directory.path.name} was deleted during the run",
                    "warning",
                )
            )
        elif removal == "held":
            decisions.append(_left_behind(directory.path, "another process still locks the folder"))
    return tuple(decisions), tuple(errors)


def abandon(directories: tuple[SwapDirectory, ...]) -> tuple[Decision, ...]:
    """Release a run's folders after a failure, without waiting for other ranks.

    A folder that cannot be deleted is reported as a decision, not an error, so that the original
    failure stays visible.
    """
    decisions, errors = release(directories, None)
    return (*decisions, *(kept_after(error) for error in errors))


def holds_folders() -> bool:
    """Return whether this process holds a lock on a swap folder."""
    return bool(_directories_held)


def abandon_held() -> None:
    """Before this process ends, release and delete the swap folders that it still has locked."""
    abandon(tuple(_directories_held))


def give_back(number: int, _: FrameType | None) -> None:
    """Signal handler that deletes the swap folders and then ends the process."""
    abandon_held()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def deleted_under(directories: tuple[SwapDirectory, ...]) -> OffloadError | None:
    """Return an error if a swap folder was deleted during the run, otherwise ``None``."""
    for directory in directories:
        if directory.held and not directory.path.exists():
            return OffloadError(
                "the swap folder was deleted during the run, so its contents are lost",
                "resume from the last checkpoint; to clean a root use `zerotune offload "
                "clean`, which never deletes folders of active runs",
                "offload.root",
                str(directory.path),
            )
    return None


def kept_after(error: OffloadError) -> Decision:
    """Return a decision about a folder that could not be deleted."""
    return _left_behind(error.value, error.reason)


def _left_behind(path: Path | str, reason: str) -> Decision:
    return Decision("offload.release", str(path), str(path), reason, "warning")


# -- Measure and remove a folder without ever leaving it.
#
# Every step is relative to an open descriptor and refuses to follow a symbolic link, so a link
# planted inside a swap folder is removed itself and its target is untouched.


def open_folder(path: str | Path, *, within: int | None = None) -> int:
    """Open a folder without following a symbolic link, and return its descriptor.

    Args:
        path: Path to the folder.
        within: Descriptor of the folder that ``path`` is relative to.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, dir_fd=within)


def folder_bytes(folder: int) -> int:
    """Return the bytes on disk that deleting the contents of an open folder would free.

    Files that are deleted in the meantime count as 0.

    Raises:
        OSError: Another file system is mounted inside, or folders are nested too deeply.
    """
    total, home = 0, mount_identity(folder)
    try:
        for path, _, files, inside in os.fwalk(".", dir_fd=folder):
            if mount_identity(inside) != home:
                raise OSError(errno.EXDEV, "another file system is mounted here", path)
            for name in files:
                with suppress(FileNotFoundError):
                    facts = os.stat(name, dir_fd=inside, follow_symlinks=False)
                    total += facts.st_blocks * 512 if facts.st_nlink == 1 else 0
    except RecursionError:  # Others may write to a root; before Python 3.13, fwalk is recursive.
        raise OSError(errno.ELOOP, "has too deeply nested folders") from None
    return total


def remove_entry(folder: int, name: str) -> None:
    """Delete a file, or a folder and its contents, inside an open folder.

    Args:
        folder: Descriptor of the open folder.
        name: Name of the file or folder; if it does not exist, nothing is done.
    """
    with suppress(FileNotFoundError):  # Another process removed it first.
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(f"/proc/self/fd/{folder}/{name}")
        else:
            os.unlink(name, dir_fd=folder)
