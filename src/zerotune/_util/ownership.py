"""Ownership of a folder: a lock that the kernel releases with its process, and ids of runs."""

from __future__ import annotations

import errno
import functools
import os
import re
import secrets
import time
import weakref
from datetime import datetime, timezone
from typing import Any, Final, Protocol

_RUN_ID: Final = re.compile(r"\d{8}T\d{6}-[0-9a-f]{12}", re.ASCII)
_RETRY: Final = 0.005


def new_run_id() -> str:
    """Return a unique run id: UTC time for readers, and 48 random bits."""
    moment = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    return f"{moment}-{secrets.token_hex(6)}"


def is_run_id(text: str) -> bool:
    """Return whether ``text`` could come from :func:`new_run_id`, and so is safe in a path."""
    return _RUN_ID.fullmatch(text) is not None


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
