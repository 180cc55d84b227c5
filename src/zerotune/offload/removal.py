"""Measure and remove a folder without ever leaving it.

Every step is relative to an open descriptor and refuses to follow a symbolic link or to cross
a mount, so a link planted inside a swap folder is removed itself and its target is untouched.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

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
    """Bytes allocated on disk below an open folder; what vanishes meanwhile counts as 0."""
    total = 0
    for _, _, names, descriptor in os.fwalk(".", dir_fd=folder, onerror=None):
        for name in names:
            try:
                facts = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue
            total += facts.st_blocks * 512
    return total


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
    home = mount_identity(folder)
    for name in os.listdir(folder):
        if name not in keep:
            remove_entry(folder, name, home, removed)
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
    try:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(facts.st_mode):
            _remove_folder(folder, name, home, removed)
            return
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        # Another remover was faster; the aim is reached.
        return
    if facts.st_nlink == 1:
        removed.freed += facts.st_blocks * 512


def _remove_folder(folder: int, name: str, home: tuple[int, str | None], removed: Removed) -> None:
    child = open_folder(name, within=folder)
    try:
        if mount_identity(child) != home:
            raise OSError(errno.EXDEV, "another file system is mounted here", name)
        remove_contents(child, removed=removed)
    finally:
        os.close(child)
    os.rmdir(name, dir_fd=folder)
