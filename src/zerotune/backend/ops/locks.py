"""The lock on a folder that torch compiles into: nobody waits for a dead process, or in silence.

torch takes a file for its lock and removes it at the end (``FileBaton``). A build that is killed
leaves the file, and everybody after it waits for ever, without a word. Here the file is locked by
the kernel as well, which lets go of it when the process ends in any way. torch's own lock is dead
once no process has it open, which the kernel knows of a local file system.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from zerotune._util.proc import LOCAL_FILESYSTEMS, filesystem_kind
from zerotune.backend.ops.diagnose import BuildLock, built_library, why_stale
from zerotune.errors import PlatformError

SILENT_FOR: Final = 5.0
"""Seconds of waiting after which it is said what is waited for."""
_AGAIN_AFTER: Final = 60.0
_ENDING: Final = 0.2
"""Seconds between two looks at torch's lock, which it closes a moment before it removes it."""
_OPENING: Final = 1.0
"""Seconds for which a new file may not yet count as open."""
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
        _announce_build(self._path.parent)
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
    """Remove a lock whose process is gone; the kernel has unlocked or closed it then."""
    record = _record(path)
    if not record:
        _remove_closed(path)
        return
    # Another host's lock may be invisible from here on a shared file system.
    if len(record) != 2 or record[0] != socket.gethostname():
        return
    try:
        found = os.open(path, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _take_over(path, found, f"process {record[1]}")
    except OSError:
        return
    finally:
        os.close(found)


def _remove_closed(path: Path) -> None:
    """Remove torch's own lock, which its maker keeps open, where nobody has it open."""
    try:
        if filesystem_kind(path.parent.resolve()) not in LOCAL_FILESYSTEMS:
            return
        found = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        if time.time() - os.fstat(found).st_mtime > _OPENING and _is_alone(found):
            time.sleep(_ENDING)
            if _is_alone(found):
                _take_over(path, found, "the process")
    except OSError:
        return
    finally:
        os.close(found)


def _is_alone(descriptor: int) -> bool:
    """Whether no other descriptor of the file is open, of any user or container of this machine.

    That is when the kernel grants a write lease. False where it grants none at all.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    # Whoever opens the file meanwhile has the kernel send a signal, by default one that kills.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _take_over(path: Path, descriptor: int, who: str) -> None:
    if os.path.samestat(os.fstat(descriptor), path.stat()):
        path.unlink()
        _log.warning(
            "op %s: %s died while it compiled it; its lock is taken over", path.parent.name, who
        )


def _announce_build(folder: Path) -> None:
    """Say what is compiled, where it is; ninja then takes minutes without a word."""
    if built_library(folder) is None or why_stale(folder) is not None:
        _log.warning(
            "op %s: compiling it into %s, once; this takes one to three minutes on few cores",
            folder.name,
            folder,
        )


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
