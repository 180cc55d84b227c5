"""Find the leases inside a swap root and tell the dead from the living."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Literal

import attrs

from zerotune.errors import OffloadError
from zerotune.offload.filesystem import LOCAL_FILESYSTEMS, filesystem_kind
from zerotune.offload.lease import LOCK_FILE, try_lock
from zerotune.offload.record import LeaseRecord, run_id_of
from zerotune.offload.removal import folder_bytes, open_folder

LeaseState = Literal["live", "stale", "unknown"]


@attrs.frozen(kw_only=True)
class FoundLease:
    """A leased folder found inside a swap root."""

    path: Path
    """The folder."""
    run_id: str
    """Id of the run that leased it."""
    state: LeaseState
    """``"live"``: somebody holds it. ``"stale"``: its owner is provably dead. ``"unknown"``:
    neither can be proved, so it is left alone."""
    reason: str
    """Why it is in that state."""
    size: int
    """Bytes it takes on disk; 0 unless stale, since nobody else's size is of use here."""
    records: tuple[LeaseRecord, ...] = ()
    """What its ranks wrote about themselves, by rank."""


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
    try:
        folder = open_folder(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _found(path, run_id, "unknown", f"cannot be opened ({error.strerror})")
    try:
        return _inspect_open(path, run_id, folder, kind)
    except OSError as error:
        if not path.exists():
            return None
        return _found(path, run_id, "unknown", f"cannot be examined ({error.strerror})")
    finally:
        os.close(folder)


def _inspect_open(path: Path, run_id: str, folder: int, kind: str | None) -> FoundLease:
    lock = os.open(LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not try_lock(lock, exclusive=True):
            return _found(path, run_id, "live", "a process holds its lock")
        if os.fstat(lock).st_nlink == 0:
            # It was removed between opening and locking, by its owner.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), LOCK_FILE)
        # Read under the lock: a rank that is leaving deletes its record under the same lock, and
        # would seem dead if its record were gone between the two looks.
        records = _records(folder)
    except OffloadError as error:
        return _found(path, run_id, "unknown", f"has a damaged record: {error.reason}")
    finally:
        # Let go before anything slow: a rank that is leaving waits for this lock.
        os.close(lock)
    doubt = _doubt(records, kind)
    if doubt:
        return _found(path, run_id, "unknown", doubt, records=records)
    reason, size = "no process holds its lock", folder_bytes(folder)
    return _found(path, run_id, "stale", reason, size=size, records=records)


def _found(
    path: Path,
    run_id: str,
    state: LeaseState,
    reason: str,
    *,
    size: int = 0,
    records: tuple[LeaseRecord, ...] = (),
) -> FoundLease:
    return FoundLease(
        path=path, run_id=run_id, state=state, reason=reason, size=size, records=records
    )


def _records(folder: int) -> tuple[LeaseRecord, ...]:
    records = []
    for name in os.listdir(folder):
        if name.startswith("rank") and name.endswith(".json"):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            with os.fdopen(file, encoding="utf-8", errors="replace") as stream:
                records.append(LeaseRecord.from_json(stream.read()))
    return tuple(sorted(records, key=lambda record: record.rank))


def _doubt(records: tuple[LeaseRecord, ...], kind: str | None) -> str | None:
    """Why a free lock is no proof of death here, or ``None`` when it is."""
    for record in records:
        owner = record.owner
        if owner.alive():
            return f"process {owner.pid} of rank {record.rank} is alive without its lock"
        if not owner.same_boot() and kind not in LOCAL_FILESYSTEMS:
            return (
                f"was leased on host {owner.host} or before a restart, and locks on "
                f"{kind or 'this file system'} do not prove that it ended"
            )
    return None
