"""Measure and remove a folder without ever leaving it.

Every step is relative to an open descriptor and refuses to follow a symbolic link or to cross
a mount, so a link planted inside a swap folder is removed itself and its target is untouched.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import attrs

from zerotune._util.proc import mount_identity


@attrs.define(kw_only=True)
class Removed:
    """What a removal has freed so far, which stays true when it fails or is interrupted."""

    freed: int = 0
    """Bytes that were allocated on disk for what is gone."""


def open_folder(path: str | Path, *, within: int | None = None) -> int:
    """Open a folder itself, never the target of a symbolic link.

    Args:
        path: Its path, or its name when ``within`` is given.
        within: Descriptor of the folder that holds it.

    Raises:
        OSError: ``ENOTDIR`` or ``ELOOP`` for a file or a link, ``ENOENT`` when it is missing.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, dir_fd=within)


def folder_bytes(folder: int) -> int:
    """Bytes allocated on disk below an open folder; what vanishes meanwhile counts as 0.

    Raises:
        OSError: The folder cannot be read; ``ESTALE`` when one in it is moved meanwhile.
    """
    # However deep the tree, one folder of it is open at a time.
    here = open_folder(".", within=folder)
    try:
        total, names = _look(here)
        above = [(os.fstat(here), names)]
        while above:
            facts, names = above[-1]
            if not os.path.samestat(os.fstat(here), facts):
                raise OSError(errno.ESTALE, "was moved while it was measured")
            if names:
                child = _entered(here, names.pop())
                if child is None:
                    continue
                nbytes, inner = _look(child)
                total += nbytes
                above.append((os.fstat(child), inner))
            else:
                above.pop()
                child = open_folder("..", within=here) if above else os.dup(here)
            os.close(here)
            here = child
    finally:
        os.close(here)
    return total


def _look(folder: int) -> tuple[int, list[str]]:
    """Bytes of the files directly inside, and the names of its folders."""
    total, folders = 0, []
    for name in os.listdir(folder):
        try:
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(facts.st_mode):
            folders.append(name)
        else:
            total += facts.st_blocks * 512
    return total, folders


def _entered(folder: int, name: str) -> int | None:
    """A folder inside, readable; ``None``: it is gone, or not for us to read."""
    try:
        child = open_folder(name, within=folder)
    except OSError:
        return None
    return child


def remove_contents(
    folder: int, *, keep: Collection[str] = (), removed: Removed | None = None
) -> int:
    """Remove everything below an open folder.

    Args:
        folder: Descriptor of the folder, which stays.
        keep: Names directly inside it that stay too.
        removed: Counts along; what it counts is kept when an error ends the removal.

    Returns:
        Bytes that were allocated on disk for what is gone.

    Raises:
        OSError: Something could not be removed; ``EXDEV`` when it is a mount.
    """
    removed = Removed() if removed is None else removed
    before = removed.freed
    emptying = _Emptying(top=folder, home=mount_identity(folder), removed=removed)
    emptying.remove(name for name in os.listdir(folder) if name not in keep)
    return removed.freed - before


def remove_entry(folder: int, name: str, home: tuple[int, str | None], removed: Removed) -> None:
    """Remove one name inside an open folder, with all below it.

    Args:
        folder: Descriptor of the folder.
        name: A name directly inside it; one that is missing is no error.
        home: ``mount_identity(folder)``, beyond which nothing is touched.
        removed: Counts along.

    Raises:
        OSError: It could not be removed; ``EXDEV`` when it is a mount.
    """
    _Emptying(top=folder, home=home, removed=removed).remove([name])


DEEP_PREFIX: Final = ".zerotune-deep-"
"""Of a folder that lay deep in a tree which is being removed."""

_DEEPEST: Final = 64


@attrs.define(kw_only=True)
class _Emptying:
    """Removes names inside a folder, with all below them.

    What lies too deep is moved to the top and removed in its turn, so that no tree needs a deep
    stack or an open folder per level.
    """

    top: int
    home: tuple[int, str | None]
    removed: Removed
    waiting: list[str] = attrs.field(factory=list)

    def remove(self, names: Iterable[str]) -> None:
        """Remove names directly inside the top."""
        self.waiting.extend(names)
        while self.waiting:
            self._entry(self.top, self.waiting.pop(), 0)

    def _entry(self, folder: int, name: str, depth: int) -> None:
        try:
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(facts.st_mode):
                self._folder(folder, name, depth)
                return
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            # Another remover was faster; the aim is reached.
            return
        if facts.st_nlink == 1:
            self.removed.freed += facts.st_blocks * 512

    def _folder(self, folder: int, name: str, depth: int) -> None:
        child = open_folder(name, within=folder)
        try:
            if mount_identity(child) != self.home:
                raise OSError(errno.EXDEV, "another file system is mounted here", name)
            if depth >= _DEEPEST:
                lifted = f"{DEEP_PREFIX}{secrets.token_hex(6)}"
                os.rename(name, lifted, src_dir_fd=folder, dst_dir_fd=self.top)
                self.waiting.append(lifted)
                return
            for inner in os.listdir(child):  # noqa: PTH208 - a descriptor.
                self._entry(child, inner, depth + 1)
        finally:
            os.close(child)
        os.rmdir(name, dir_fd=folder)
