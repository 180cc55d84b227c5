"""Ownership of a folder of checkpoints: one run saves at a time; others get an error."""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from typing_extensions import override

from zerotune._util import ownership
from zerotune._util.closing import Closable
from zerotune._util.files import open_regular, system_errors
from zerotune._util.proc import ProcessIdentity
from zerotune.decisions import Decision, Severity
from zerotune.errors import CheckpointError

OWNER_LOCK: Final = ".zerotune-owner.lock"

_LEAVING_S: Final = 0.5
"""Seconds allowed to a run that is just leaving."""
_LONGEST_OWNER: Final = 256


class RootHold(Closable):
    """Lock on a checkpoint folder, so that only this process saves and prunes checkpoints in it.

    Without the lock, a job that is started twice would delete its own checkpoints. Reading,
    resuming and exporting need no lock. The kernel releases the lock when the process ends. Other
    machines see the lock if the file system shares locks between machines.

    Not collective: create a ``RootHold`` on rank 0. One process may lock the same folder several
    times::

        with RootHold("checkpoints"):
            ...

    Args:
        root: The checkpoint folder, which is created if it is missing.

    Attributes:
        decisions: A note if the former holder was killed; a warning if it ran on another machine,
            since some file systems do not share locks, or if the file system supports no locks.

    Raises:
        CheckpointError: Another process has locked the folder, or the folder is not writable.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        place = Path(os.path.abspath(root))  # noqa: PTH100 - Path.absolute keeps "..".
        purpose = "cannot be used for saving checkpoints, but may be readable"
        with system_errors(CheckpointError, place, purpose):
            place.mkdir(parents=True, exist_ok=True)
            place = place.resolve()
            self._lock: _Lock | None = _locks.get(place) or _Lock(place)
        self._lock.users += 1
        self.decisions: tuple[Decision, ...] = self._lock.decisions

    @override
    def close(self) -> None:
        """Unlock the folder. May be called repeatedly."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


_locks: Final[dict[Path, _Lock]] = {}


class _Lock:
    """This process's lock on one folder, shared by all its users."""

    def __init__(self, root: Path) -> None:
        self._root, self.users = root, 0
        self.decisions: tuple[Decision, ...] = ()
        self.descriptor = self._locked()
        """Descriptor of the locked file; ``None`` if the file system supports no locks."""
        _locks[root] = self
        ownership.keep_from_children(self)

    def release(self) -> None:
        """Release one use of the lock, and unlock the folder after the last use."""
        self.users -= 1
        if not self.users:
            # A file that cannot be removed does no harm: it is unlocked.
            with suppress(OSError):
                (self._root / OWNER_LOCK).unlink()
            self.leave()

    def leave(self) -> None:
        """Close the locked file."""
        _locks.pop(self._root, None)
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _locked(self) -> int | None:
        """Return a descriptor of the locked lock file; ``None`` without locks."""
        path = self._root / OWNER_LOCK
        while True:
            with ExitStack() as undo:
                lock = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
                undo.callback(os.close, lock)
                try:
                    locked = ownership.try_lock(lock, exclusive=True, patience=_LEAVING_S)
                except OSError as error:
                    if not ownership.lacks_locks(error):
                        raise
                    self._decide(
                        "this file system supports no file locks, so a second run of the same job "
                        "would not be noticed",
                        "warning",
                    )
                    return None
                written = os.pread(lock, _LONGEST_OWNER, 0).decode(errors="replace")
                host, _, owner = written.partition("\n")
                if not locked:
                    raise _in_use(self._root, owner)
                # A run that left meanwhile may have removed the opened file; then try again.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), path.lstat()):
                        self._take_over(host, owner)
                        os.truncate(lock, os.pwrite(lock, _this_process().encode(), 0))
                        undo.pop_all()
                        return lock

    def _take_over(self, host: str, owner: str) -> None:
        """Record that the former holder, if there was one, did not unlock the folder itself."""
        if host == platform.node():
            self._decide(f"{owner} has ended without unlocking the folder", "note")
        elif owner:
            self._decide(
                f"taken over from {owner}; if that process is still running, its locks are not "
                "visible here, and both save in this folder",
                "warning",
            )

    def _decide(self, reason: str, severity: Severity) -> None:
        decision = Decision("checkpoints.owner", None, str(self._root), reason, severity)
        self.decisions = (decision,)


def _this_process() -> str:
    """Return this machine's name, and in a second line this process for people."""
    owner = ProcessIdentity.current()
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return f"{owner.host}\nprocess {owner.pid} on {owner.host} (since {since})"


def _in_use(root: Path, owner: str) -> CheckpointError:
    return CheckpointError(
        f"{owner or 'another process'} saves checkpoints in this folder and is still running",
        "if the same job was started twice, end one of the two processes; otherwise use a "
        "separate folder for each job",
        str(root),
    )
