"""Find the leases inside a swap root and tell the dead from the living."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import attrs

from zerotune.errors import OffloadError
from zerotune.offload.filesystem import LOCAL_FILESYSTEMS, filesystem_kind
from zerotune.offload.lease import LOCK_FILE, try_lock
from zerotune.offload.record import LeaseRecord, is_record, run_id_of
from zerotune.offload.removal import folder_bytes, open_folder

LeaseState = Literal["live", "stale", "empty", "unknown"]


@attrs.frozen(kw_only=True)
class FoundLease:
    """A leased folder found inside a swap root."""

    path: Path
    """The folder."""
    run_id: str
    """Id of the run that leased it."""
    state: LeaseState
    """``"live"``: somebody holds it. ``"stale"``: its owner is provably dead. ``"empty"``: a
    removal is under way, or was interrupted at its last step. ``"unknown"``: neither life nor
    death can be proved, so it is left alone."""
    reason: str
    """Why it is in that state."""
    size: int
    """Bytes it takes on disk; 0 where it cannot be examined."""
    records: tuple[LeaseRecord, ...] = ()
    """What its ranks wrote about themselves, by rank."""

    @property
    def reserved(self) -> int:
        """Bytes its ranks said they will write at most; 0: they did not know."""
        return sum(record.reserved for record in self.records)


@attrs.frozen(kw_only=True)
class Verdict:
    """What was found out about an open lease, which stays true while its lock is held."""

    state: LeaseState
    reason: str
    records: tuple[LeaseRecord, ...] = ()


def find_leases(root: Path) -> tuple[FoundLease, ...]:
    """Every lease inside ``root``, by name; changes nothing.

    Raises:
        OffloadError: The root cannot be listed.
    """
    try:
        paths = sorted(root.iterdir())
    except OSError as error:
        raise OffloadError(
            f"cannot be listed ({error.strerror})", key="offload.root", value=str(root)
        ) from error
    kind = filesystem_kind(root.resolve())
    found = (_inspect(path, run_id_of(path.name), kind) for path in paths)
    return tuple(lease for lease in found if lease is not None)


def _inspect(path: Path, run_id: str | None, kind: str | None) -> FoundLease | None:
    """State of one folder; ``None`` when it is no lease or was removed meanwhile."""
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
                # Let go of the lock before anything slow: a rank that leaves waits for it.
                pass
            size = folder_bytes(folder)
        except OSError as error:
            if not path.exists():
                return None
            verdict = Verdict(state="unknown", reason=f"cannot be examined ({error.strerror})")
        finally:
            os.close(folder)
    return FoundLease(
        path=path,
        run_id=run_id,
        state=verdict.state,
        reason=verdict.reason,
        size=size,
        records=verdict.records,
    )


@contextmanager
def judged(folder: int, kind: str | None) -> Iterator[Verdict]:
    """Say whether a lease is dead; a dead one stays locked, and so dead, inside the block.

    Args:
        folder: Descriptor of the leased folder.
        kind: Its kind of file system.

    Raises:
        OSError: The folder cannot be examined, or vanished; its lock file may be a link.
    """
    try:
        lock = os.open(LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        if os.fstat(folder).st_nlink and not os.listdir(folder):
            yield Verdict(state="empty", reason="a removal is under way or was interrupted")
            return
        raise
    try:
        yield _judge(folder, lock, kind)
    finally:
        os.close(lock)


def _judge(folder: int, lock: int, kind: str | None) -> Verdict:
    try:
        if not try_lock(lock, exclusive=True):
            # Read without the lock: a rank that is leaving may take it away meanwhile.
            return Verdict(
                state="live", reason="a process holds its lock", records=_readable(folder)
            )
        if os.fstat(lock).st_nlink == 0:
            # It was removed between opening and locking, by its owner.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), LOCK_FILE)
        # Read under the lock: a rank that is leaving deletes its record under the same lock, and
        # would seem dead if its record were gone between the two looks.
        records = _records(folder)
    except OffloadError as error:
        return Verdict(state="unknown", reason=f"has a damaged record: {error.reason}")
    doubt = _doubt(records, kind)
    return Verdict(
        state="unknown" if doubt else "stale",
        reason=doubt or "no process holds its lock",
        records=records,
    )


def _readable(folder: int) -> tuple[LeaseRecord, ...]:
    """The records of a living lease, for a reader; those it cannot have are left out."""
    try:
        return _records(folder)
    except (OSError, OffloadError):
        return ()


def _records(folder: int) -> tuple[LeaseRecord, ...]:
    records = []
    for name in os.listdir(folder):
        if is_record(name):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            with os.fdopen(file, encoding="utf-8", errors="replace") as stream:
                records.append(LeaseRecord.from_json(stream.read()))
    return tuple(sorted(records, key=lambda record: record.rank))


def _doubt(records: tuple[LeaseRecord, ...], kind: str | None) -> str | None:
    """Why a free lock is no proof of death here, or ``None`` when it is."""
    if not records and kind not in LOCAL_FILESYSTEMS:
        return f"it has no record, and locks on {kind or 'this file system'} prove nothing alone"
    for record in records:
        owner = record.owner
        if owner.visible() and owner.alive():
            return f"process {owner.pid} of rank {record.rank} is alive without its lock"
        if kind in LOCAL_FILESYSTEMS and record.filesystem in LOCAL_FILESYSTEMS:
            # One kernel mounts such a disk at a time, so its locks reach every user of it.
            continue
        if not owner.visible():
            seen = f" (which its owner saw as {record.filesystem})" if record.filesystem else ""
            return (
                f"was leased on host {owner.host}, in another container or before a restart, and "
                f"locks on {kind or 'this file system'}{seen} do not prove that it ended"
            )
    return None
