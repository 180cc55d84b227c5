"""The folder into which ops are compiled, and its locks.

DeepSpeed compiles its kernels on first use. zerotune compiles into the folder
``TORCH_EXTENSIONS_DIR``, by default into one folder per Python environment below ``~/.cache``.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import attrs
import psutil

from zerotune._util.proc import (
    LOCAL_FILESYSTEMS,
    environment,
    filesystem_kind,
    held,
    installed_version,
)
from zerotune.backend.op_causes import Diagnosis
from zerotune.decisions import Decision

_ABANDONED_AFTER: Final = 600.0
"""Seconds after which a lock without a visible holder counts as abandoned. One op compiles in about
a minute."""

FOLDER: Final = "TORCH_EXTENSIONS_DIR"
"""Environment variable that torch reads when it loads an extension."""


def extensions_folder() -> Path:
    """Return the folder of all compiled ops: ``$TORCH_EXTENSIONS_DIR``, or the environment's own.

    Nothing is created.
    """
    stated = os.environ.get(FOLDER)
    return _environments_folder() if stated is None else Path(stated)


@cache
def _environments_folder() -> Path:
    """Folder named after everything that makes ninja compile an op again.

    Torch's default folder is named after versions of Python and CUDA only. Two environments would
    then invalidate each other's ops, because a command line contains the paths of all headers.
    """
    import torch
    from torch.utils import cpp_extension

    python = f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"
    versions = f"torch-{torch.__version__}_deepspeed-{installed_version('deepspeed')}"
    more = repr((sys.prefix, torch.__file__, torch.version.cuda, torch.version.hip))
    name = f"zerotune_{python}_{versions}_{hashlib.sha256(more.encode()).hexdigest()[:8]}"
    return Path(cpp_extension.get_default_build_root(), name)


def folder_decisions() -> tuple[Decision, ...]:
    """Return the decision for this environment's own folder; none if the user chose a folder."""
    folder = extensions_folder()
    if folder != _environments_folder():
        return ()
    return (
        Decision(
            FOLDER,
            None,
            str(folder),
            "each Python environment compiles its ops once, into its own folder",
        ),
    )


def build_folder(name: str) -> Path:
    """Return the folder in which torch builds an extension, without creating it.

    Args:
        name: Name of the extension.
    """
    return extensions_folder() / name


def built_library(folder: Path) -> Path | None:
    """Return the path to the compiled library in a build folder; ``None`` if there is none."""
    library = folder / f"{folder.name}.so"
    return library if library.is_file() else None


def why_stale(folder: Path) -> str | None:
    """Return why ninja would compile an op again; ``None`` if the library is up to date.

    A library becomes stale when torch, deepspeed, their paths, the compiler flags or the version of
    ninja change. The version of ninja matters because the format of ninja's build log depends on
    it.

    Args:
        folder: Build folder of the op.
    """
    import torch

    try:
        # Torch will rewrite this file before ninja reads it.
        written = (folder / "build.ninja").read_text(encoding="utf-8")
        other = re.search(r"-isystem (\S+)/torch/include", written)
        if other is not None and other[1] != str(Path(torch.__file__).parents[1]):
            return f"the Python environment with {other[1]} compiled it last"
        command = ["ninja", "-n", "-d", "explain"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"ninja cannot check whether the library is up to date: {error}"
    if "no work to do" in done.stdout:
        return None
    explained = re.search(r"ninja explain: (.+)", done.stderr + done.stdout)
    if explained is None:
        return "ninja would compile the library again"
    return f"ninja reports: {explained.group(1)}"


@attrs.frozen(kw_only=True)
class BuildLock:
    """The lock file of a process that compiles an extension."""

    path: Path
    age: float
    """Seconds since the lock was acquired."""
    holder: int | None
    """Id of the process that holds the lock; ``None`` if it is not visible on this host."""

    @classmethod
    def on(cls, folder: Path) -> BuildLock | None:
        """Return the lock of a build folder; ``None`` if the folder is not locked.

        Args:
            folder: Build folder of an op.
        """
        path = folder / "lock"
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:
            return None
        # Torch keeps the file open as long as it holds the lock.
        holders = (
            int(process.pid)
            for process in psutil.process_iter(["open_files"])
            if str(path.resolve()) in {file.path for file in process.info["open_files"] or ()}
        )
        return cls(path=path, age=max(age, 0.0), holder=next(holders, None))

    def diagnose(self) -> Diagnosis:
        """Return why the op is locked, and a fix."""
        if self.holder is not None:
            return Diagnosis(
                cause=f"process {self.holder} has been compiling the op for {self.age:.0f} s",
                fix="wait until that process has finished",
            )
        since = f"{self.age / 60:.0f} minutes" if self.age > 120 else f"{self.age:.0f} s"
        return Diagnosis(
            cause=f"the op was locked {since} ago, but no process on this host holds the lock",
            fix=f"delete {self.path} unless a process on a different host is compiling the op",
        )


SAID_EVERY: Final = 15.0
"""Seconds between messages while an op is compiled."""

SILENT_FOR: Final = 5.0
"""Seconds to wait for a lock before a warning is logged."""

_AGAIN_AFTER: Final = 60.0

_BEFORE_REMOVAL: Final = 0.2
"""Seconds between two checks of torch's lock, which torch closes shortly before deleting it."""

_OPENING: Final = 1.0
"""Seconds after its creation for which a lock is kept even if no process has it open."""

logger = logging.getLogger("zerotune")


class LivingLock:
    """Replacement for torch's ``FileBaton``; its lock is released if the holding process ends."""

    def __init__(self, lock_file_path: str, wait_seconds: float = 0.1, **_: Any) -> None:
        self._path = Path(lock_file_path)
        self._wait_seconds = wait_seconds
        self._held: int | None = None
        self._compiled = threading.Event()

    def try_acquire(self) -> bool:
        """Wait until the lock's holder has finished compiling or exited, and acquire the lock.

        If the holder has finished, ninja has nothing left to compile.
        """
        began = time.monotonic()
        announced = began + SILENT_FOR
        folder = self._path.parent
        while not self._take():
            remove_if_dead(self._path)
            lock = BuildLock.on(folder)
            if lock is not None and time.monotonic() >= announced:
                announced = time.monotonic() + _AGAIN_AFTER
                found = lock.diagnose()
                abandoned = lock.holder is None and lock.age > _ABANDONED_AFTER
                if abandoned and not _host_and_process(self._path):
                    raise found.as_error(folder.name)
                logger.warning(
                    "op %s: still waiting for its lock after %.0f s: %s (%s). Fix: %s.",
                    folder.name, time.monotonic() - began, found.cause, lock.path, found.fix,
                )  # fmt: skip
            time.sleep(self._wait_seconds)
        if built_library(folder) is None or why_stale(folder) is not None:
            # Ninja then runs for minutes without any output.
            logger.warning(
                "op %s: compiling it once, into %s; this takes one to three minutes on a few cores",
                folder.name, folder,
            )  # fmt: skip
            threading.Thread(target=self._say_progress, daemon=True).start()
        return True

    def _say_progress(self) -> None:
        began = time.monotonic()
        while not self._compiled.wait(SAID_EVERY):
            seconds = time.monotonic() - began
            logger.warning("op %s: compiling for %.0f s now", self._path.parent.name, seconds)

    def wait(self) -> None:
        """Do nothing: torch calls this method to wait, but ``try_acquire`` has already waited."""

    def release(self) -> None:
        """Release the lock."""
        self._compiled.set()
        if self._held is not None:
            # Delete the file before unlocking it, so that no other process mistakes it for the lock
            # of a dead process.
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


def _host_and_process(path: Path) -> list[str]:
    """Host and process in a lock of zerotune; empty for torch's own locks."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []


def remove_if_dead(path: Path) -> None:
    """Remove a lock file if the process that created it ran on this host and has ended.

    Args:
        path: Lock file created by torch or by a ``LivingLock``.
    """
    record = _host_and_process(path)
    # Another host's lock may be invisible from here on a shared file system.
    if record and (len(record) != 2 or record[0] != socket.gethostname()):
        return
    with suppress(OSError):
        if not record and filesystem_kind(path.parent.resolve()) not in LOCAL_FILESYSTEMS:
            return
        descriptor = os.open(path, os.O_RDWR if record else os.O_RDONLY | os.O_NONBLOCK)
        try:
            if record:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _take_over(path, descriptor, f"process {record[1]}")
            # Torch's own lock, which its creator keeps open.
            elif time.time() - os.fstat(descriptor).st_mtime > _OPENING and _is_alone(descriptor):
                time.sleep(_BEFORE_REMOVAL)
                if _is_alone(descriptor):
                    _take_over(path, descriptor, "a process")
        finally:
            os.close(descriptor)


def _is_alone(descriptor: int) -> bool:
    """Whether no other descriptor of the file is open, in any process of this machine.

    The kernel grants a write lease only then. The result is ``False`` without lease support.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    # If another process opens the file meanwhile, the kernel sends this process a signal; the
    # default signal would kill it.
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
        logger.warning(
            "op %s: %s ended while compiling the op; its lock has been removed",
            path.parent.name,
            who,
        )


@contextmanager
def building() -> Iterator[None]:
    """Inside the block, compile into ``extensions_folder()`` with this environment's ninja.

    Torch compiles under a ``LivingLock``. Locks of dead processes on any op are removed, since code
    outside the block would wait for them.
    """
    compiling: Any = importlib.import_module("torch.utils.cpp_extension")
    for lock in extensions_folder().glob("*/lock"):
        remove_if_dead(lock)
    before = compiling.FileBaton
    compiling.FileBaton = LivingLock
    try:
        with held(FOLDER, str(extensions_folder())), same_ninja():
            yield
    finally:
        compiling.FileBaton = before


def same_ninja() -> AbstractContextManager[None]:
    """Put the ninja of this Python environment first on ``PATH`` inside the block.

    A build log written by one ninja version is invalid for a different one. A script started as
    ``.venv/bin/python`` may find a different ninja than the same script in the activated
    environment. Alternating between the two would then recompile an op in every run.
    """
    folder = Path(sys.executable).parent
    own = shutil.which("ninja", path=str(folder))
    if own is None or own == shutil.which("ninja"):
        return nullcontext()
    return environment(PATH=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")
