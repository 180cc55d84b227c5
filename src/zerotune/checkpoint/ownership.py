"""Which run saves in a folder of checkpoints: one at a time; a second start names it."""

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

LOCK_FILE: Final = ".zerotune-owner.lock"
RECORD: Final = ".zerotune-owner.json"

_REFUSED: Final = "cannot be taken for saving checkpoints, though it may be read"
_PATIENCE: Final = 0.5
"""Seconds that a run which is just leaving may take."""


class _Record(OwnerRecord):
    @classmethod
    @override
    def damaged(cls, text: str, reason: str) -> CheckpointError:
        return CheckpointError(reason, key=RECORD, value=text)


class RootHold(Closable):
    """A folder of checkpoints that this process alone saves in and prunes, until it is closed.

    A job that is started twice would otherwise remove checkpoints under its other self. Only who
    saves takes the folder; reading, resuming and exporting need no hold. What a killed process left
    is taken over. On a file system whose locks do not reach other machines a run there cannot be
    seen; then the folder is taken over too, and the other one is told when it saves next
    (``confirm``).

    Not collective: take it on rank 0. Holds of one process share the folder::

        with RootHold("checkpoints"):
            ...

    Args:
        root: The folder; made when it is not there.

    Attributes:
        decisions: Whose it was before, and what is not certain.

    Raises:
        CheckpointError: A living process holds it, or the folder cannot be written.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(os.path.abspath(root))  # noqa: PTH100 - Path.absolute keeps "..".
        self._hold: _Hold | None = _Hold.of(self._root)
        self.decisions: tuple[Decision, ...] = self._hold.decisions

    def confirm(self) -> None:
        """Check that nobody has taken the folder over; to be called before each save.

        Raises:
            CheckpointError: Somebody has, or it cannot be looked at.
        """
        if self._hold is not None:
            self._hold.confirm()

    @override
    def close(self) -> None:
        """Give the folder up. May be repeated."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.part()


_holds: dict[Path, _Hold] = {}


class _Hold:
    """This process's lock on one folder, however many use it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._users = 0
        self._lock: int | None = None
        self._record = _Record.for_this_process(
            run_id=new_run_id(), filesystem=filesystem_kind(root)
        )
        self.decisions: tuple[Decision, ...] = ()

    @classmethod
    def of(cls, root: Path) -> _Hold:
        """The one of this process, taken now unless it has been."""
        with system_errors(CheckpointError, root, _REFUSED):
            root.mkdir(parents=True, exist_ok=True)
            root = root.resolve()
            hold = _holds.get(root)
            if hold is None:
                hold = cls(root)
                hold._take()
        hold._users += 1
        return hold

    def confirm(self) -> None:
        with system_errors(CheckpointError, self._root, _REFUSED):
            if self._mine():
                return
            # Somebody removed the record; whoever took the folder meanwhile is met there.
            self.leave()
            self._take()

    def part(self) -> None:
        """One user less; the last gives the folder up."""
        self._users -= 1
        if self._users or self._lock is None:
            return
        # What cannot be removed is taken over by the next: no lock is held, and its owner ends.
        with suppress(OSError, CheckpointError):
            if self._mine():
                (self._root / RECORD).unlink()
                (self._root / LOCK_FILE).unlink()
        self.leave()

    def leave(self) -> None:
        """Let go of the lock."""
        _holds.pop(self._root, None)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _mine(self) -> bool:
        """Whether the record is still this one's; ``False`` when there is none."""
        try:
            record = _Record.read(self._root / RECORD)
        except FileNotFoundError:
            return False
        if record != self._record:
            raise _refusal(self._root, record, "has taken it over")
        return True

    def _take(self) -> None:
        self._lock = self._locked()
        ownership.keep_from_children(self)
        try:
            self._judge()
            self._record.write_to(self._root / RECORD)
        except BaseException:
            self.leave()
            raise
        _holds[self._root] = self

    def _locked(self) -> int:
        """A descriptor of the lock file, locked where there are locks."""
        path = self._root / LOCK_FILE
        while True:
            lock = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            try:
                self._lock_file(lock)
                # A run that left meanwhile has removed the file that was opened.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), path.lstat()):
                        return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _lock_file(self, lock: int) -> None:
        try:
            locked = ownership.try_lock(lock, exclusive=True, patience=_PATIENCE)
        except OSError as error:
            if not ownership.lacks_locks(error):
                raise
            self._note(
                "this file system offers no file locks, so a run that is started a second time may "
                "be noticed only when it saves"
            )
            return
        if not locked:
            record = None
            with suppress(FileNotFoundError, CheckpointError):
                record = _Record.read(self._root / RECORD)
            raise _refusal(self._root, record, "still runs")

    def _judge(self) -> None:
        """Look whose it was: the lock is free, which may prove nothing."""
        try:
            former = _Record.read(self._root / RECORD)
        except FileNotFoundError:
            return
        except CheckpointError as error:
            self._note(f"the record of who held it {error.reason}, and nobody holds its lock")
            return
        if former.owner == ProcessIdentity.current():
            return
        if former.owner.visible() and former.owner.alive():
            raise _refusal(self._root, former, "still runs")
        doubt = former.doubt(filesystem_kind(self._root))
        if doubt is None:
            self._note(f"{_owner(former)} has ended; its folder is taken over", severity="note")
        else:
            self._note(
                f"taken over from {_owner(former)}, although {doubt}; if it lives, it is "
                "told when it saves next"
            )

    def _note(self, reason: str, *, severity: Severity = "warning") -> None:
        decision = Decision(
            key="checkpoints.owner",
            before=None,
            after=str(self._root),
            reason=reason,
            severity=severity,
        )
        self.decisions += (decision,)


def _owner(record: _Record) -> str:
    return f"process {record.owner.pid} on {record.owner.host} (since {record.created})"


def _refusal(root: Path, record: _Record | None, state: str) -> CheckpointError:
    who = "another process" if record is None else _owner(record)
    return CheckpointError(
        f"{who} saves checkpoints in this folder and {state}",
        key=str(root),
        fix="if the same job was started twice, end one of them; otherwise give each a folder of "
        "its own",
    )
