"""Ownership of one run's folder inside a swap root.

A folder is held through a shared ``flock`` on its ``lease.lock``, one per rank. The kernel drops
a rank's lock when the rank dies, however it dies, so the folder is live exactly as long as any
rank is, and whoever obtains the *exclusive* lock knows that no rank holds it any more.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Final, Literal

import attrs

from zerotune.errors import OffloadError
from zerotune.offload.record import LeaseRecord, is_record, lease_name
from zerotune.offload.removal import Removed, open_folder, remove_contents

LOCK_FILE: Final = "lease.lock"
DRAFT_PREFIX: Final = ".zerotune-new-"
"""Of a folder that becomes a lease once it is complete; its maker holds the root meanwhile."""

_JOIN_PATIENCE: Final = 5.0
_LEAVE_PATIENCE: Final = 0.5
_RETRY: Final = 0.005

_held: weakref.WeakSet[SwapDirectory] = weakref.WeakSet()


@attrs.frozen(kw_only=True)
class Removal:
    """How a folder was left."""

    outcome: Literal["removed", "held", "gone"]
    """``"removed"``; ``"held"``: another rank still holds it and will remove it; ``"gone"``:
    somebody else had deleted it."""
    freed: int = 0
    """Bytes on disk that were freed."""


class SwapDirectory:
    """One run's own folder inside a swap root, held by this process until it is left.

    Attributes:
        path: The folder, ``<root>/zerotune-<run id>``.
        created: Whether this rank made it; the others joined.
        ranks: Number of ranks that may hold it.
    """

    def __init__(self, *, path: Path, created: bool, ranks: int, lock: int) -> None:
        self.path = path
        self.created = created
        self.ranks = ranks
        self._lock: int | None = lock
        _drop_locks_in_forked_children()
        _held.add(self)

    @classmethod
    def claim(cls, root: Path, record: LeaseRecord) -> SwapDirectory:
        """Make the run's folder, or join it when another rank of this node has made it.

        Args:
            root: Existing folder, symlinks resolved.
            record: This rank's record; ranks that share ``run_id`` share the folder.

        Raises:
            OffloadError: The folder cannot be made, joined or locked, or belongs to a run with
                another plan.
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
            raise _refused(path, "cannot be made or joined", error) from error
        if lock is None:
            raise OffloadError(
                "was removed while this rank joined it", key="offload.root", value=str(path)
            )
        return cls(path=path, created=created, ranks=record.world_size, lock=lock)

    @property
    def held(self) -> bool:
        """Whether this process still holds the folder."""
        return self._lock is not None

    def leave(self) -> None:
        """Drop this rank's hold and leave the folder to the others."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        _held.discard(self)

    def leave_and_remove(self) -> Removal:
        """Drop this rank's hold and remove the folder if it was the last.

        Raises:
            OffloadError: The folder could not be removed, or another one took its place.
        """
        if self._lock is None:
            return Removal(outcome="held")
        try:
            if not try_lock(self._lock, exclusive=True, patience=_LEAVE_PATIENCE):
                return Removal(outcome="held")
            return _remove(self.path, self._lock)
        except OSError as error:
            raise _refused(self.path, "cannot be removed", error) from error
        finally:
            self.leave()


def try_lock(descriptor: int, *, exclusive: bool, patience: float = 0.0) -> bool:
    """Lock an open file, waiting at most ``patience`` seconds.

    Raises:
        OffloadError: This system or file system has no such locks.
        OSError: Any other failure.
    """
    fcntl = _locking()
    mode = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, mode)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RETRY)
        except OSError as error:
            if error.errno in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}:
                raise _no_locks("this file system offers no file locks") from error
            raise
        else:
            return True


def require_locks() -> None:
    """Check that this operating system can hold a lease at all.

    Raises:
        OffloadError: It has no ``flock`` (Windows).
    """
    _locking()


def _locking() -> ModuleType:
    try:
        # Late: the module exists on POSIX only, and this package must import everywhere.
        import fcntl
    except ImportError:
        raise _no_locks(
            "this operating system has no flock, so a swap folder cannot be owned safely"
        ) from None
    return fcntl


def _no_locks(reason: str) -> OffloadError:
    return OffloadError(
        reason,
        key="offload.root",
        fix="swap to a local disk on Linux, or offload to cpu instead of nvme",
    )


def _refused(path: Path, what: str, error: OSError) -> OffloadError:
    return OffloadError(
        f"{what} ({error.strerror or error}: {error.filename or path})",
        key="offload.root",
        value=str(path),
        fix="check the permissions and the free space of the swap root",
    )


def _join(path: Path, record: LeaseRecord) -> int | None:
    """Hold the folder another rank made; ``None`` when there is none."""
    try:
        folder = open_folder(path)
    except FileNotFoundError:
        return None
    try:
        lock = os.open(LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        # Only a probe of another run takes the exclusive lock here, and lets go at once.
        if not try_lock(lock, exclusive=False, patience=_JOIN_PATIENCE):
            raise OffloadError(
                "is locked by a process that is removing it",
                key="offload.root",
                value=str(path),
                fix="start the run again",
            )
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
        other = LeaseRecord.from_json(file.read_text(encoding="utf-8"))
        if other.plan_digest != record.plan_digest:
            raise OffloadError(
                f"rank {record.rank} has another plan than rank {other.rank} "
                f"({record.plan_digest[:12]} against {other.plan_digest[:12]})",
                key="offload.root",
                value=str(path),
                fix="give every rank the same configuration and arguments",
            )


def _create(root: Path, path: Path, record: LeaseRecord) -> int | None:
    """Make the folder, complete and locked before its name appears.

    Returns:
        The lock's descriptor, or ``None`` when another rank was faster.
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
            # The draft has a random name of this process's own, so nobody else can be inside.
            shutil.rmtree(draft)
            if isinstance(error, OSError) and error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                return None
            raise
    return lock


@contextmanager
def making_in(root: Path) -> Iterator[None]:
    """Hold the root while something unfinished is in it.

    The kernel lets go when the process dies. Whoever gets the root for itself then knows that
    every unfinished thing it sees was left behind.

    Raises:
        OffloadError: Somebody cleans the root up and does not come to an end.
        OSError: The root cannot be opened.
    """
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not try_lock(folder, exclusive=False, patience=_JOIN_PATIENCE):
            raise OffloadError(
                "is held by a process that is cleaning it up",
                key="offload.root",
                value=str(root),
                fix="start the run again",
            )
        yield
    finally:
        os.close(folder)


def _remove(path: Path, lock: int) -> Removal:
    if os.fstat(lock).st_nlink == 0:
        return Removal(outcome="gone")
    try:
        folder = open_folder(path)
    except FileNotFoundError:
        return Removal(outcome="gone")
    removed = Removed()
    try:
        _check_own(folder, lock, path)
        dismantle(folder, removed)
    finally:
        os.close(folder)
    with suppress(FileNotFoundError):
        path.rmdir()
    return Removal(outcome="removed", freed=removed.freed)


def dismantle(folder: int, removed: Removed) -> None:
    """Empty a leased folder whose lock the caller holds alone.

    The records and the lock file go last: a removal that is interrupted leaves a folder that is
    still recognised as a lease and still proves, by its free lock, that nobody holds it.

    Args:
        folder: Descriptor of the leased folder, which itself stays.
        removed: Counts along.

    Raises:
        OSError: Something in it could not be removed.
    """
    records = {name for name in os.listdir(folder) if is_record(name)}
    remove_contents(folder, keep={LOCK_FILE, *records}, removed=removed)
    remove_contents(folder, keep={LOCK_FILE}, removed=removed)
    with suppress(FileNotFoundError):
        os.unlink(LOCK_FILE, dir_fd=folder)


def _check_own(folder: int, lock: int, path: Path) -> None:
    try:
        found = os.stat(LOCK_FILE, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        found = None
    if found is None or not os.path.samestat(found, os.fstat(lock)):
        raise OffloadError(
            "is no longer the folder this run made; nothing in it was removed",
            key="offload.root",
            value=str(path),
            fix="look at what is there and delete it by hand if it is yours",
        )


@functools.cache
def _drop_locks_in_forked_children() -> None:
    # A forked data-loading worker shares its parent's lock; if it outlived a killed trainer,
    # the dead lease would count as live. Done at the first lease, so that importing changes
    # nothing in the process.
    os.register_at_fork(after_in_child=_leave_all)


def _leave_all() -> None:
    for directory in list(_held):
        directory.leave()
