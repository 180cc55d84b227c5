"""Swap files that DeepSpeed wrote straight into a root, without a lease."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs

from zerotune._util.proc import locality_of, mount_identity
from zerotune.errors import OffloadError
from zerotune.offload.lease import try_lock
from zerotune.offload.processes import users_of
from zerotune.offload.removal import Removed, folder_bytes, open_folder, remove_entry

ADOPTED_PREFIX: Final = ".zerotune-adopted-"
"""Of a bare folder that is being removed; one left behind is treated as a bare folder."""

_BARE: Final = re.compile(r"zero_stage_\d+", re.ASCII)
# Names of DeepSpeed 0.19.8: runtime/swap_tensor/partitioned_param_swapper.py, optimizer_utils.py.
_PARTS: Final = re.compile(r"optimizer|[a-z0-9]+params", re.ASCII)
_RANKS: Final = re.compile(r"rank\d+", re.ASCII)
_FILES: Final = re.compile(r".+\.swp")


@attrs.frozen(kw_only=True)
class BareSwap:
    """What is inside one folder of DeepSpeed's own layout."""

    nbytes: int
    """Bytes allocated on disk."""
    files: frozenset[tuple[int, int]]
    """Device and inode of every swap file."""
    last_written: float
    """When the last of them, or a folder among them, changed, seconds since 1970."""
    foreign: str | None
    """Something in it that DeepSpeed did not write, if there is any."""


def is_bare(name: str) -> bool:
    """Whether a name inside a root is that of DeepSpeed's own layout."""
    return _BARE.fullmatch(name) is not None or name.startswith(ADOPTED_PREFIX)


def survey(folder: int) -> BareSwap:
    """Look through an open folder of that layout.

    Raises:
        OSError: It cannot be read.
    """
    files, foreign, newest = set(), None, os.fstat(folder).st_mtime
    for path, facts, fits in _walk(folder, (_PARTS, _RANKS, _FILES), ""):
        newest = max(newest, facts.st_mtime)
        if not fits:
            foreign = foreign or path
        elif stat.S_ISREG(facts.st_mode):
            files.add((facts.st_dev, facts.st_ino))
    return BareSwap(
        nbytes=folder_bytes(folder),
        files=frozenset(files),
        last_written=newest,
        foreign=foreign,
    )


def _walk(
    folder: int, levels: tuple[re.Pattern[str], ...], above: str
) -> Iterator[tuple[str, os.stat_result, bool]]:
    """Path, facts and whether it belongs, of all that is below; foreign folders stay closed."""
    pattern, *deeper = levels
    for name in sorted(os.listdir(folder)):
        try:
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        right_type = stat.S_ISDIR(facts.st_mode) if deeper else stat.S_ISREG(facts.st_mode)
        fits = right_type and pattern.fullmatch(name) is not None
        yield f"{above}{name}", facts, fits
        if fits and deeper:
            child = open_folder(name, within=folder)
            try:
                yield from _walk(child, tuple(deeper), f"{above}{name}/")
            finally:
                os.close(child)


def doubt_about(found: BareSwap, kind: str | None) -> str | None:
    """Why these files may be in use or somebody's own, or ``None`` when neither can be."""
    if found.foreign is not None:
        return f"holds {found.foreign}, which is not a swap file of DeepSpeed"
    if locality_of(kind) not in ("local", "memory", "overlay"):
        return f"other machines may be using it through {kind or 'an unknown file system'}"
    try:
        return users_of(found.files, last_written=found.last_written).doubt()
    except OSError as error:
        return f"it cannot be seen which processes use it ({error.strerror or error})"


def remove_bare(root: int, name: str, *, kind: str | None, removed: Removed) -> str | None:
    """Remove a folder of DeepSpeed's own layout if nobody can be using it.

    It is first moved to a name that nobody knows, so that a run which starts meanwhile makes a
    new one; then looked at once more, so that a run which started just before is noticed.

    Args:
        root: Descriptor of the folder that holds it.
        name: Its name.
        kind: Kind of file system.
        removed: Counts along.

    Returns:
        Why it was kept, or ``None`` when it is gone.

    Raises:
        OSError: It could not be removed.
        OffloadError: It turned out to be in use and its name was taken meanwhile.
    """
    with _held(root, name) as folder:
        if folder is None:
            return "another process is removing it"
        if reason := doubt_about(survey(folder), kind):
            return reason
        aside = f"{ADOPTED_PREFIX}{secrets.token_hex(6)}"
        os.rename(name, aside, src_dir_fd=root, dst_dir_fd=root)
        if reason := doubt_about(survey(folder), kind):
            _put_back(root, aside, name)
            return reason
        remove_entry(root, aside, mount_identity(root), removed)
    return None


def _put_back(root: int, aside: str, name: str) -> None:
    try:
        os.stat(name, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(aside, name, src_dir_fd=root, dst_dir_fd=root)
        return
    raise OffloadError(
        f"a process began to use it while it was being removed, and its name is taken by a newer "
        f"folder; nothing was deleted, it is now {aside}",
        key="cleanup_stale_swap",
        value=name,
        fix="end both runs and give each a lease of its own",
    )


@contextmanager
def _held(root: int, name: str) -> Iterator[int | None]:
    """The folder, locked against another cleaner; ``None`` when there is one at work."""
    folder = open_folder(name, within=root)
    try:
        if not try_lock(folder, exclusive=True):
            yield None
            return
        if os.fstat(folder).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        yield folder
    finally:
        os.close(folder)
