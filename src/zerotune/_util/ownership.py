"""Whose a folder is: a lock that the kernel drops with its process, and a record of that process.

The lock decides who lives. The record tells a reader whose folder it is, and guards against a file
system whose locks lie.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import secrets
import time
import weakref
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import attrs
from typing_extensions import Self

from zerotune._util.files import read_record, sync_file
from zerotune._util.proc import LOCAL_FILESYSTEMS, ProcessIdentity
from zerotune._util.text import json_of
from zerotune.errors import ZeroTuneError

_FORMAT: Final = 1
_RUN_ID: Final = re.compile(r"\d{8}T\d{6}-[0-9a-f]{12}", re.ASCII)
_LONGEST_RECORD: Final = 65536
_RETRY: Final = 0.005


def new_run_id() -> str:
    """A run id no other run has: UTC time for the reader, 48 random bits for uniqueness."""
    moment = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    return f"{moment}-{secrets.token_hex(6)}"


def is_run_id(text: str) -> bool:
    """Whether ``text`` could come from :func:`new_run_id` (and so is safe in a path)."""
    return _RUN_ID.fullmatch(text) is not None


# -- The lock.


def try_lock(descriptor: int, *, exclusive: bool, patience: float = 0.0) -> bool:
    """Lock an open file or folder, waiting at most ``patience`` seconds.

    ``lacks_locks`` decides whether an ``OSError`` means that locks are not supported.
    """
    import fcntl

    mode = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, mode)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RETRY)
        else:
            return True


def has_locks() -> bool:
    """Whether this operating system has such locks; Windows has not."""
    try:
        # Late: the module exists on POSIX only, and packages must import everywhere.
        import fcntl  # noqa: F401
    except ImportError:
        return False
    return True


def lacks_locks(error: OSError) -> bool:
    """Whether locking failed because this file system has no such locks."""
    return error.errno in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


class Holder(Protocol):
    """Holds locks of this process."""

    def leave(self) -> None:
        """Let go of them, and of nothing else."""


_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_from_children(holder: Holder) -> None:
    """Have a forked child let go of what ``holder`` holds.

    A data-loading worker shares its parent's locks; if it outlived a killed trainer, what the dead
    one held would count as held.
    """
    _when_processes_fork()
    _holders.add(holder)


@functools.cache
def _when_processes_fork() -> None:
    # At the first lock, so that importing changes nothing in the process.
    os.register_at_fork(after_in_child=_leave_all)


def _leave_all() -> None:
    for holder in list(_holders):
        holder.leave()


# -- The record.


@attrs.frozen(kw_only=True)
class OwnerRecord:
    """Which process holds something, since when."""

    run_id: str
    """Of the run, shared by all ranks."""
    created: str
    """UTC time, ISO 8601."""
    filesystem: str | None = None
    """Kind of the file system as its owner saw it; ``None`` outside Linux."""
    owner: ProcessIdentity
    """The process that holds it."""

    _types: ClassVar[dict[str, tuple[type, ...]]] = {
        "run_id": (str,),
        "created": (str,),
        "filesystem": (str, type(None)),
    }

    @classmethod
    def for_this_process(cls, **fields: Any) -> Self:
        """The record of the calling process, as of now.

        Args:
            fields: What remains to be said.
        """
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(created=created, owner=ProcessIdentity.current(), **fields)

    @property
    def who(self) -> str:
        """The owner, for messages."""
        return f"process {self.owner.pid}"

    @classmethod
    def damaged(cls, text: str, reason: str) -> ZeroTuneError:
        """The error of a record that is none."""
        return ZeroTuneError(reason, key="record", value=text)

    def to_json(self) -> str:
        """One JSON object, indented for a human reader."""
        return json.dumps({"format": _FORMAT, **attrs.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote."""
        try:
            fields = json_of(text)
        except ValueError as error:
            raise cls.damaged(text, f"is not JSON ({error})") from None
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise cls.damaged(text, f"is not a record of format {_FORMAT}")
        owner = cls._checked(ProcessIdentity, fields.pop("owner", None), _OWNER_TYPES, text)
        return cls(owner=ProcessIdentity(**owner), **cls._checked(cls, fields, cls._types, text))

    @classmethod
    def _checked(
        cls, of: type, fields: object, types: dict[str, tuple[type, ...]], text: str
    ) -> dict[str, Any]:
        if not isinstance(fields, dict) or fields.keys() != types.keys():
            names = f"{sorted(types)} of {of.__name__}"
            raise cls.damaged(text, f"does not contain exactly the fields {names}")
        for name, value in fields.items():
            # bool is an int to Python, never to us.
            if not isinstance(value, types[name]) or isinstance(value, bool):
                raise cls.damaged(text, f"{name} has the wrong type ({type(value).__name__})")
        return fields

    @classmethod
    def read(cls, path: str | Path, *, within: int | None = None) -> Self:
        """The record in a file that anybody may have made.

        Args:
            path: Its path, or its name when ``within`` is given.
            within: Descriptor of the folder that holds it.
        """
        try:
            text = read_record(path, most=_LONGEST_RECORD, within=within)
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = f"{Path(path).name} cannot be read ({error.strerror or error})"
            raise cls.damaged("", reason) from error
        return cls.from_json(text)

    def write_to(self, path: Path) -> None:
        """Write it so that a reader sees all of it or nothing."""
        draft = path.with_name(f".{path.name.lstrip('.')}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            # What a killed process left there, or a pipe, whose opening would wait for a reader.
            draft.unlink(missing_ok=True)
            with os.fdopen(os.open(draft, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(self.to_json())
                sync_file(file)
            draft.replace(path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise

    def doubt(self, kind: str | None) -> str | None:
        """Why a free lock is no proof that its owner is dead, or ``None`` when it is.

        Args:
            kind: The kind of file system as this process sees it.
        """
        if self.owner.visible() and self.owner.alive():
            return f"{self.who} is alive without its lock"
        if kind in LOCAL_FILESYSTEMS and self.filesystem in LOCAL_FILESYSTEMS:
            # One kernel mounts such a disk at a time, so its locks reach every user of it.
            return None
        if not self.owner.visible():
            seen = f" (which the owner saw as {self.filesystem})" if self.filesystem else ""
            return (
                f"the owner took the lock on host {self.owner.host} (in a different container, or "
                f"before a restart), and on {kind or 'this file system'}{seen} an unlocked "
                "folder does not prove that the owner has ended"
            )
        return None


_OWNER_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "host": (str,),
    "boot_id": (str, type(None)),
    "pid": (int,),
    "pid_start": (int, type(None)),
    "pid_namespace": (int, type(None)),
}
