"""Atomic and durable writing of files, and reading that never waits for a FIFO."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from zerotune.errors import ZeroTuneError

_FIXES: Final = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT), "free space on this disk, or choose a different disk"
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        "give the current user access to the path, or choose a different path",
    ),
    errno.EROFS: "choose a path on a writable file system",
    errno.ENOENT: "check the path",
    errno.EIO: "check the kernel log: the disk may be failing",
}


@contextmanager
def system_errors(
    kind: type[ZeroTuneError], path: str | os.PathLike[str], purpose: str
) -> Iterator[None]:
    """Convert errors of the operating system inside the block to ``kind``, with a fix.

    Args:
        kind: Class of the error to raise.
        path: Path as the caller received it; it becomes the error's key.
        purpose: What failed, such as ``"cannot be exported to"``.
    """
    try:
        yield
    except OSError as error:
        raise of_system(kind, error, path, purpose) from error
    except ValueError as error:
        fix = None if isinstance(error, ZeroTuneError) else _impossible(os.fspath(path))
        if fix is None:
            raise
        raise kind(f"{purpose} ({error})", key=os.fspath(path), fix=fix) from error


def _impossible(path: str) -> str | None:
    """Return the fix for a path that no system call accepts; ``None`` for any other path."""
    if "\0" in path:
        return "remove the null byte from the path"
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return "remove the characters that are not valid Unicode from the path"
    return None


def of_system(
    kind: type[ZeroTuneError], error: OSError, path: str | os.PathLike[str], purpose: str
) -> ZeroTuneError:
    """Return a zerotune error for an ``OSError``, with path, purpose, reason and fix."""
    where = error.filename2 or error.filename
    inside = "" if where is None or str(where) == os.fspath(path) else f": {where}"
    return kind(
        f"{purpose} ({error.strerror or error}{inside})", key=os.fspath(path), fix=fix_of(error)
    )


def fix_of(error: OSError) -> str:
    """Return the fix for an ``OSError``."""
    return _FIXES.get(error.errno or 0, "choose another path")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set ``path`` as the file name of each ``OSError`` raised inside the block."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically; an existing file is replaced."""
    with drafted(path) as draft:
        write_synced(draft, content)


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Yield the path of a draft that replaces ``path`` if the block succeeds.

    The caller syncs the draft to disk inside the block (``write_synced``, ``sync_file``, ``sync``).
    If the block fails, the draft is deleted and ``path`` is unchanged.
    """
    draft = draft_of(path)
    try:
        yield draft
        draft.replace(path)
    finally:
        with suppress(OSError):  # Usually the draft was renamed.
            draft.unlink()


def exchange(one: Path, other: Path) -> None:
    """Swap the names of two files or folders atomically, so that neither is ever missing.

    ``OSError`` with ``ENOSYS`` or ``EINVAL`` means that the system does not support it.
    """
    # Linux has a system call for it (renameat2, since 3.15), for which Python has no function.
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(one))
    here, swapped = -100, 2
    if rename(here, os.fsencode(one), here, os.fsencode(other), swapped) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one), None, str(other))


def draft_of(path: Path) -> Path:
    """Return a unique hidden path beside ``path``."""
    # Not the process id, which may occur on several machines that share the disk.
    return path.with_name(f".{path.name}.{os.urandom(6).hex()}.draft")


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and sync it to disk."""
    with naming(path), path.open("xb") as file:
        file.write(content)
        sync_file(file)


@contextmanager
def reading_regular(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a regular file for reading; fail for a FIFO instead of waiting for its writer."""
    with os.fdopen(open_regular(path), "rb") as file:
        yield file


def check_regular(path: Path) -> None:
    """Raise ``OSError`` unless ``path`` is a regular file; opening a FIFO would block."""
    os.close(open_regular(path))


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, within: int | None = None) -> int:
    """Open an untrusted file; fail for a FIFO instead of waiting for its writer.

    Args:
        path: Path, or file name if ``within`` is given.
        flags: Flags of ``os.open``.
        within: Descriptor of the folder that contains the file.
    """
    # Windows has neither FIFOs in folders nor these flags.
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags, dir_fd=within)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def read_record(path: str | Path, *, most: int, within: int | None = None) -> str:
    """Return the first ``most`` characters of an untrusted file."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(
        open_regular(path, flags, within=within), encoding="utf-8", errors="replace"
    ) as file:
        return file.read(most)


def sync_file(file: IO[Any]) -> None:
    """Flush an open file and sync it to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
