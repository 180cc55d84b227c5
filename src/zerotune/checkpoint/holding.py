"""Ownership of a folder of checkpoints: one run saves at a time; others get an error."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from typing_extensions import override

from zerotune._util import ownership
from zerotune._util.closing import Closable
from zerotune._util.files import open_regular, system_errors
from zerotune._util.ownership import OwnerRecord, new_run_id
from zerotune._util.proc import ProcessIdentity, filesystem_kind
from zerotune.decisions import Decision, Severity
from zerotune.errors import CheckpointError

OWNER_LOCK: Final = ".zerotune-owner.lock"

OWNER_RECORD: Final = ".zerotune-owner.json"

_NOT_TAKEN: Final = "cannot be used for saving checkpoints, but may be readable"

_LEAVING_S: Final = 0.5
"""Seconds allowed to a run that is just leaving."""


class _Saver(OwnerRecord):
    @classmethod
    @override
    def damaged(cls, text: str, reason: str) -> CheckpointError:
        return CheckpointError(reason, key=OWNER_RECORD, value=text)


class RootHold(Closable):
    """Lock on a checkpoint folder, so that only this process saves and prunes checkpoints in it.

    Without the lock, a job that is started twice would delete its own checkpoints. Reading,
    resuming and exporting need no lock. The lock of a killed process is replaced. If file locks are
    not visible to other machines, the lock of a job that is running on another machine may be
    replaced too. That job's next save then fails, because it calls ``confirm``.

    Not collective: create a ``RootHold`` on rank 0. One process may lock the same folder several
    times::

        with RootHold("checkpoints"):
            ...

    Args:
        root: The checkpoint folder, which is created if it is missing.

    Attributes:
        decisions: Decisions about the previous owner of the lock.

    Raises:
        CheckpointError: A living process has locked the folder, or the folder is not writable.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(os.path.abspath(root))  # noqa: PTH100 - Path.absolute keeps "..".
        self._hold: _Hold | None = _Hold.of(self._root)
        self.decisions: tuple[Decision, ...] = self._hold.decisions

    def confirm(self) -> None:
        """Check before a save that no other run has replaced this process's lock.

        Raises:
            CheckpointError: Another run has locked the folder, or the lock cannot be read.
        """
        if self._hold is not None:
            self._hold.confirm()

    @override
    def close(self) -> None:
        """Unlock the folder. May be called repeatedly."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.part()


_holds: dict[Path, _Hold] = {}


class _Hold:
    """This process's lock on one folder, shared by all its users."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._users = 0
        self._lock: int | None = None
        self._record = _Saver.for_this_process(
            run_id=new_run_id(), filesystem=filesystem_kind(root)
        )
        self.decisions: tuple[Decision, ...] = ()

    @classmethod
    def of(cls, root: Path) -> _Hold:
        """Return this process's lock on a folder, and lock the folder if necessary."""
        with system_errors(CheckpointError, root, _NOT_TAKEN):
            root.mkdir(parents=True, exist_ok=True)
            root = root.resolve()
            hold = _holds.get(root)
            if hold is None:
                hold = cls(root)
                hold._take()
        hold._users += 1
        return hold

    def confirm(self) -> None:
        with system_errors(CheckpointError, self._root, _NOT_TAKEN):
            if self._mine():
                return
            # The record was removed. Take the folder again, which fails if another run owns it.
            self.leave()
            self._take()

    def part(self) -> None:
        """Release one use of the lock, and unlock the folder after the last use."""
        self._users -= 1
        if self._users or self._lock is None:
            return
        # Files that cannot be removed do no harm: they are unlocked, so the next run takes over.
        with suppress(OSError, CheckpointError):
            if self._mine():
                (self._root / OWNER_RECORD).unlink()
                (self._root / OWNER_LOCK).unlink()
        self.leave()

    def leave(self) -> None:
        """Release the lock."""
        _holds.pop(self._root, None)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _mine(self) -> bool:
        """Return whether the record is still this process's; ``False`` if there is none."""
        try:
            record = _Saver.read(self._root / OWNER_RECORD)
        except FileNotFoundError:
            return False
        if record != self._record:
            raise _other_saves(self._root, record, "has taken it over")
        return True

    def _take(self) -> None:
        self._lock = self._locked()
        ownership.keep_from_children(self)
        try:
            self._judge()
            self._record.write_to(self._root / OWNER_RECORD)
        except BaseException:
            self.leave()
            raise
        _holds[self._root] = self

    def _locked(self) -> int:
        """Return a descriptor of the lock file, locked if the file system supports locks."""
        path = self._root / OWNER_LOCK
        while True:
            lock = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            try:
                self._lock_file(lock)
                # A run that left meanwhile may have removed the opened file; then try again.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), path.lstat()):
                        return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _lock_file(self, lock: int) -> None:
        try:
            locked = ownership.try_lock(lock, exclusive=True, patience=_LEAVING_S)
        except OSError as error:
            if not ownership.lacks_locks(error):
                raise
            self._note(
                "this file system does not support file locks, so starting the same job twice may "
                "be detected only at the next save"
            )
            return
        if not locked:
            record = None
            with suppress(FileNotFoundError, CheckpointError):
                record = _Saver.read(self._root / OWNER_RECORD)
            raise _other_saves(self._root, record, "is still running")

    def _judge(self) -> None:
        """Check the former owner, because a free lock may not prove that it has ended."""
        try:
            former = _Saver.read(self._root / OWNER_RECORD)
        except FileNotFoundError:
            return
        except CheckpointError as error:
            self._note(f"the folder's owner record {error.reason}, and the folder is not locked")
            return
        if former.owner == ProcessIdentity.current():
            return
        if former.owner.visible() and former.owner.alive():
            raise _other_saves(self._root, former, "is still running")
        doubt = former.doubt(filesystem_kind(self._root))
        if doubt is None:
            self._note(
                f"{_saver_words(former)} has ended, so this process takes over the folder",
                severity="note",
            )
        else:
            self._note(
                f"taken over from {_saver_words(former)}, although {doubt}; if that process is "
                "still alive, its next save fails with an error"
            )

    def _note(self, reason: str, *, severity: Severity = "warning") -> None:
        decision = Decision("checkpoints.owner", None, str(self._root), reason, severity)
        self.decisions += (decision,)


def _saver_words(record: _Saver) -> str:
    return f"process {record.owner.pid} on {record.owner.host} (since {record.created})"


def _other_saves(root: Path, record: _Saver | None, state: str) -> CheckpointError:
    who = "another process" if record is None else _saver_words(record)
    return CheckpointError(
        f"{who} saves checkpoints in this folder and {state}",
        "if the same job was started twice, end one of the two processes; otherwise use a "
        "separate folder for each job",
        str(root),
    )
