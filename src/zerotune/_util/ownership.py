"""Ownership of a folder: a lock that the kernel releases with its process, and a record of it.

The lock tells whether the owner lives. The record tells who the owner is, and guards against file
systems with unreliable locks.
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
    """Return a unique run id: UTC time for readers, and 48 random bits."""
    moment = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    return f"{moment}-{secrets.token_hex(6)}"


def is_run_id(text: str) -> bool:
    """Return whether ``text`` could come from :func:`new_run_id`, and so is safe in a path."""
    return _RUN_ID.fullmatch(text) is not None


# -- The lock.


def try_lock(descriptor: int, *, exclusive: bool, patience: float = 0.0) -> bool:
    """Lock an open file or folder, waiting at most ``patience`` seconds; return whether it worked.

    If an ``OSError`` is raised, ``lacks_locks`` tells whether the file system has no locks.
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
    """Return whether this operating system has these locks; Windows does not."""
    try:
        # Late: the module exists only on POSIX, but zerotune must import everywhere.
        import fcntl  # noqa: F401
    except ImportError:
        return False
    return True


def lacks_locks(error: OSError) -> bool:
    """Return whether locking failed because the file system does not support it."""
    return error.errno in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


class Holder(Protocol):
    """Object that holds locks of this process."""

    def leave(self) -> None:
        """Give up these locks, and nothing else."""


_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_from_children(holder: Holder) -> None:
    """Make forked children give up the locks of ``holder``.

    A data-loading worker shares its parent's locks. If it outlived a killed trainer, the trainer's
    locks would still count as held.
    """
    _when_processes_fork()
    _holders.add(holder)


@functools.cache
def _when_processes_fork() -> None:
    # Registered at the first lock, so that importing changes nothing in the process.
    os.register_at_fork(after_in_child=_leave_all)


def _leave_all() -> None:
    for holder in list(_holders):
        holder.leave()


# -- The record.


@attrs.frozen(kw_only=True)
class OwnerRecord:
    """Record of the process that owns something, and since when."""

    run_id: str
    """Run id, shared by all ranks."""
    created: str
    """Time of creation in UTC, ISO 8601."""
    filesystem: str | None = None
    """Kind of the file system, as the owner saw it; ``None`` outside Linux."""
    owner: ProcessIdentity
    """The owning process."""

    _types: ClassVar[dict[str, tuple[type, ...]]] = {
        "run_id": (str,),
        "created": (str,),
        "filesystem": (str, type(None)),
    }

    @classmethod
    def for_this_process(cls, **fields: Any) -> Self:
        """Create a record of the calling process, with the current time.

        Args:
            fields: Remaining fields of the record.
        """
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(created=created, owner=ProcessIdentity.current(), **fields)

    @property
    def who(self) -> str:
        """Name of the owner, for messages."""
        return f"process {self.owner.pid}"

    @classmethod
    def damaged(cls, text: str, reason: str) -> ZeroTuneError:
        """Return the error for an invalid record."""
        return ZeroTuneError(reason, key="record", value=text)

    def to_json(self) -> str:
        """Return the record as a JSON object, indented for human readers."""
        return json.dumps({"format": _FORMAT, **attrs.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the output of :meth:`to_json`."""
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
            # To Python, a bool is an int.
            if not isinstance(value, types[name]) or isinstance(value, bool):
                raise cls.damaged(text, f"{name} has the wrong type ({type(value).__name__})")
        return fields

    @classmethod
    def read(cls, path: str | Path, *, within: int | None = None) -> Self:
        """Read the record in an untrusted file.

        Args:
            path: Path, or file name if ``within`` is given.
            within: Descriptor of the folder that contains the file.
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
        """Write the record atomically."""
        draft = path.with_name(f".{path.name.lstrip('.')}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            # The draft of a killed process, or a FIFO, whose opening would wait for a reader.
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
        """Return why a free lock does not prove that the owner has ended; ``None`` if it does.

        Args:
            kind: Kind of the file system, as this process sees it.
        """
        if self.owner.visible() and self.owner.alive():
            return f"{self.who} is alive without its lock"
        if kind in LOCAL_FILESYSTEMS and self.filesystem in LOCAL_FILESYSTEMS:
            # Only one kernel at a time mounts such a disk, so all its users see the same locks.
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
