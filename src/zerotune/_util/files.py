"""Files that are there whole or not at all, and on the disk when we say so."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import uuid
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
    """What the system refuses inside the block becomes an error of ours, with what to do.

    Args:
        kind: Class of the error.
        path: What the caller was given, the error's key.
        purpose: What was done with it: ``"cannot be exported to"``.
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
    """What to do about a path that no system call may have; ``None`` about any other."""
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
    """The error of ours for one of the system: path, purpose, reason, and what to do."""
    where = error.filename2 or error.filename
    inside = "" if where is None or str(where) == os.fspath(path) else f": {where}"
    return kind(
        f"{purpose} ({error.strerror or error}{inside})", key=os.fspath(path), fix=fix_of(error)
    )


def fix_of(error: OSError) -> str:
    """What to do about an error of the system."""
    return _FIXES.get(error.errno or 0, "choose another path")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the disk inside the block tell which file they are about."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically; an existing one is replaced."""
    with drafted(path) as draft:
        write_synced(draft, content)


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """A name beside ``path`` for a file that takes its place when the block ends well.

    Whoever writes it brings it to disk (``write_synced``, ``sync_file``, ``sync``) before that.
    When the block fails nothing is left, and ``path`` is as it was.
    """
    draft = draft_of(path)
    try:
        yield draft
        draft.replace(path)
    finally:
        with suppress(OSError):  # Most often it is gone, renamed.
            draft.unlink()


def exchange(one: Path, other: Path) -> None:
    """Swap the names of two files or folders atomically: neither is ever missing.

    ``OSError`` with ``ENOSYS`` or ``EINVAL``: the system does not know how.
    """
    # Linux has a system call for it (renameat2, since 3.15), and Python no name.
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(one))
    here, swapped = -100, 2
    if rename(here, os.fsencode(one), here, os.fsencode(other), swapped) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one), None, str(other))


def draft_of(path: Path) -> Path:
    """A unique hidden name beside ``path``."""
    # Not the process id: machines that share the disk may have the same.
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.draft")


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and bring it to disk."""
    with naming(path), path.open("xb") as file:
        file.write(content)
        sync_file(file)


@contextmanager
def reading_regular(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file for reading; opening a FIFO would wait for a writer."""
    with os.fdopen(open_regular(path), "rb") as file:
        yield file


def check_regular(path: Path) -> None:
    """Before somebody opens it who would wait for a writer: as ``reading_regular``."""
    os.close(open_regular(path))


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, within: int | None = None) -> int:
    """Open a file that anybody may have made; no pipe in its place is waited for.

    Args:
        path: Its path, or its name when ``within`` is given.
        flags: As of ``os.open``.
        within: Descriptor of the folder that holds it.
    """
    # Windows has neither FIFOs in folders nor these flags.
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags, dir_fd=within)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def read_record(path: str | Path, *, most: int, within: int | None = None) -> str:
    """The text of a small file that anybody may have made, its first ``most`` characters."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(
        open_regular(path, flags, within=within), encoding="utf-8", errors="replace"
    ) as file:
        return file.read(most)


def sync_file(file: IO[Any]) -> None:
    """Bring what was written to an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's entries, to disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
