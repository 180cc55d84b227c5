"""The lock on a folder that torch compiles into: nobody waits for a dead process, or in silence.

torch takes a file for its lock and removes it at the end (``FileBaton``). A build that is killed
leaves the file, and everybody after it waits for ever, without a word. Here the file is locked by
the kernel as well, which lets go of it when the process ends in any way.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from zerotune.backend.ops.diagnose import BuildLock
from zerotune.errors import PlatformError

SILENT_FOR: Final = 5.0
"""Seconds of waiting after which it is said what is waited for."""
_AGAIN_AFTER: Final = 60.0
_log = logging.getLogger("zerotune")


class LivingLock:
    """torch's ``FileBaton``, for as long as its process lives.

    Args:
        lock_file_path: The lock of a build folder.
        wait_seconds: Between two looks at somebody else's.
    """

    def __init__(self, lock_file_path: str, wait_seconds: float = 0.1, **_: Any) -> None:
        self._path = Path(lock_file_path)
        self._wait_seconds = wait_seconds
        self._held: int | None = None

    def try_acquire(self) -> bool:
        """Take it, once whoever has it is done or dead; ninja then finds nothing left to do.

        Raises:
            PlatformError: A process that cannot be seen took it too long ago to be building.
        """
        began = told = time.monotonic()
        told += SILENT_FOR
        while not self._take():
            remove_if_dead(self._path)
            lock = BuildLock.on(self._path.parent)
            if lock is not None and lock.abandoned and not _record(self._path):
                found = lock.diagnose()
                raise PlatformError(found.cause, key=f"op {self._path.parent.name}", fix=found.fix)
            if lock is not None and time.monotonic() >= told:
                told = time.monotonic() + _AGAIN_AFTER
                _tell(lock, time.monotonic() - began)
            time.sleep(self._wait_seconds)
        return True

    def wait(self) -> None:
        """Part of torch's interface; ``try_acquire`` has waited."""

    def release(self) -> None:
        """Let go of it."""
        if self._held is not None:
            # Removed before it is unlocked, so that no one takes it for a dead process's.
            self._path.unlink(missing_ok=True)
            os.close(self._held)
            self._held = None

    def _take(self) -> bool:
        try:
            held = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        except FileExistsError:
            return False
        fcntl.flock(held, fcntl.LOCK_EX)
        os.write(held, f"{socket.gethostname()} {os.getpid()}\n".encode())
        self._held = held
        return True


@contextmanager
def living_locks() -> Iterator[None]:
    """What torch compiles inside the block, it compiles under a ``LivingLock``."""
    compiling: Any = importlib.import_module("torch.utils.cpp_extension")
    before = compiling.FileBaton
    compiling.FileBaton = LivingLock
    try:
        yield
    finally:
        compiling.FileBaton = before


def _record(path: Path) -> list[str]:
    """Host and process in a lock of ours; empty for torch's own."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []


def remove_if_dead(path: Path) -> None:
    """Remove a lock whose process is gone; the kernel has unlocked it then."""
    record = _record(path)
    # Another host's lock may be invisible from here on a shared file system.
    if len(record) != 2 or record[0] != socket.gethostname():
        return
    try:
        found = os.open(path, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(found), path.stat()):
            path.unlink()
            _log.warning(
                "op %s: process %s died while it compiled it; its lock is taken over",
                path.parent.name,
                record[1],
            )
    except OSError:
        return
    finally:
        os.close(found)


def _tell(lock: BuildLock, seconds: float) -> None:
    found = lock.diagnose()
    _log.warning(
        "op %s: waiting for its lock for %.0f s: %s (%s). Fix: %s.",
        lock.path.parent.name,
        seconds,
        found.cause,
        lock.path,
        found.fix,
    )
