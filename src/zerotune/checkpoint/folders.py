"""How a checkpoint folder comes to its name, and which folders are checkpoints.

A checkpoint is filled under ``<name>.tmp-<id>`` and renamed when it is whole. One of the same name
is first renamed to ``<name>.old-<id>`` and removed last. So at every moment there is a whole
checkpoint under one of the three names, and ``find_checkpoint`` knows them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from zerotune._util.files import sync
from zerotune._util.text import disk_size
from zerotune.checkpoint.manifest import MANIFEST, Manifest
from zerotune.errors import CheckpointCorruptError, CheckpointError

logger = logging.getLogger("zerotune")

_STEP: Final = re.compile(r"step-(\d{8,})", re.ASCII)
_LEFTOVER: Final = re.compile(r"(.+)\.(tmp|old|trash)-([0-9a-f]{12})", re.ASCII)
_FREE_MARGIN: Final = 2**24
"""Bytes left free beside what will be written, for the file system's own bookkeeping."""


def step_folder(root: str | os.PathLike[str], step: int) -> Path:
    """Where the checkpoint of an optimizer step lies: ``<root>/step-00001234``."""
    return Path(root) / f"step-{step:08d}"


def checked_path(directory: str | os.PathLike[str]) -> Path:
    """An absolute path at which a checkpoint may lie.

    Raises:
        CheckpointError: It is a symbolic link, or one of the names used while writing.
    """
    path = Path(os.path.abspath(directory))  # noqa: PTH100 - Path.absolute keeps "..".
    if path.is_symlink():
        raise CheckpointError(
            "is a symbolic link; replacing it would not replace what it points to",
            key=str(path),
            fix=f"give the folder itself, {os.path.realpath(path)}",
        )
    if not path.name or _LEFTOVER.fullmatch(path.name):
        raise CheckpointError("cannot be the name of a checkpoint", key=str(path))
    return path


class Staging:
    """A folder under a temporary name that will become the checkpoint ``final``.

    The process that made it holds a lock on it, so that others can tell work in progress from
    what a killed process left behind.

    Raises:
        CheckpointError: ``final`` exists and is no checkpoint.
    """

    def __init__(self, final: Path) -> None:
        _check_replaceable(final)
        self._final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        self.path = _sibling(final, "tmp")
        self.path.mkdir()
        self._lock = _lock(self.path)

    def publish(self) -> None:
        """Give the folder its final name; a former checkpoint goes only after that."""
        sync(self.path)
        former = _sibling(self._final, "old") if self._final.exists() else None
        if former is not None:
            self._final.rename(former)
        self.path.rename(self._final)
        sync(self._final.parent)
        self._release()
        if former is not None:
            _remove(former)
        remove_leftovers(self._final.parent, name=self._final.name)

    def abandon(self) -> None:
        """Remove what was written so far."""
        self._release()
        if self.path.exists():
            _remove(self.path)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_space(folder: Path, nbytes: int) -> None:
    """Check that ``nbytes`` more fit on the disk of ``folder``.

    Raises:
        CheckpointError: They do not.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes + _FREE_MARGIN:
        raise CheckpointError(
            f"the checkpoint takes {disk_size(nbytes)} and {disk_size(free)} are free",
            key=str(folder),
            fix="free disk space, keep fewer checkpoints (prune), or save elsewhere",
        )


def find_checkpoint(directory: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    """The folder that holds the checkpoint called ``directory``, and its manifest.

    Usually ``directory`` itself. When a process was killed between the two renames that replace a
    checkpoint, the newest whole one beside it.

    Raises:
        CheckpointError: There is no checkpoint of this name.
        CheckpointCorruptError: Its manifest cannot be read.
    """
    path = checked_path(directory)
    if (path / MANIFEST).exists():
        return path, Manifest.read(path)
    if path.exists():
        raise _no_checkpoint(path)
    beside = _leftovers(path.parent, name=path.name, kinds=("tmp", "old"))
    for sibling in sorted(beside, key=_written, reverse=True):
        if (manifest := _whole(sibling)) is not None:
            logger.warning("%s was not renamed when it was saved; using %s", path, sibling)
            return sibling, manifest
    raise CheckpointError(
        "does not exist",
        key=str(path),
        fix="latest_checkpoint(root) finds the newest checkpoint in a folder",
    )


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The newest whole ``step-…`` checkpoint in ``root``.

    Whole: its manifest is intact and every file has its size. Contents are checked on loading.

    Returns:
        Its path, or ``None`` when there is none. A folder that is not whole is skipped with a
        warning.
    """
    for _, path in _steps(Path(root)):
        try:
            folder, manifest = find_checkpoint(path)
            check_files(folder, manifest)
        except CheckpointError as error:
            logger.warning("skipping a checkpoint that is not whole: %s", error)
            continue
        return path
    return None


def prune(root: str | os.PathLike[str], *, keep: int) -> tuple[Path, ...]:
    """Remove all but the newest whole ``step-…`` checkpoints, and what killed saves left behind.

    Not collective: call it on one rank, after the new checkpoint is saved. Folders that are no
    whole checkpoint are left for you to look at.

    Args:
        root: The folder of checkpoints.
        keep: How many to keep, 1 or more.

    Returns:
        The checkpoints that were removed.
    """
    if keep < 1:
        raise CheckpointError("must be a whole number, 1 or more", key="keep", value=keep)
    folder = Path(root)
    removed, kept = [], 0
    for _, path in _steps(folder):
        if _whole(path) is None:
            continue
        kept += 1
        if kept > keep:
            trash = _sibling(path, "trash")
            path.rename(trash)
            _remove(trash)
            removed.append(path)
    if folder.is_dir():
        remove_leftovers(folder)
    return tuple(removed)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there, with its size.

    Raises:
        CheckpointCorruptError: Names the first that is not.
    """
    for record in manifest.files:
        path = folder / record.name
        try:
            nbytes = path.stat().st_size
        except OSError as error:
            raise CheckpointCorruptError(
                f"is missing ({error.strerror})", key=str(path), fix="use another checkpoint"
            ) from None
        if nbytes != record.nbytes:
            raise CheckpointCorruptError(
                f"has {nbytes} bytes instead of {record.nbytes}",
                key=str(path),
                fix="use another checkpoint",
            )


def remove_leftovers(parent: Path, *, name: str | None = None) -> None:
    """Remove folders that killed saves left in ``parent``; those still in use stay.

    Args:
        parent: The folder of checkpoints.
        name: Only those of this checkpoint. Without it, those of all checkpoints, but for
            whole ones whose checkpoint is missing: they stand in for it.
    """
    for path in _leftovers(parent, name=name):
        base = parent / _base(path)
        if not path.name.startswith(f"{base.name}.trash-") and not base.exists() and _whole(path):
            continue
        with _unused(path) as unused:
            if unused:
                _remove(path)


def _steps(root: Path) -> list[tuple[int, Path]]:
    """Steps and paths of the checkpoints in a folder, newest first."""
    names = {_base(path) for path in root.iterdir()} if root.is_dir() else set()
    found = [(match, root / match[0]) for name in names if (match := _STEP.fullmatch(name))]
    return sorted(((int(match[1]), path) for match, path in found), reverse=True)


def _base(path: Path) -> str:
    match = _LEFTOVER.fullmatch(path.name)
    return match[1] if match else path.name


def _leftovers(
    parent: Path, *, name: str | None = None, kinds: tuple[str, ...] = ("tmp", "old", "trash")
) -> list[Path]:
    found = []
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _LEFTOVER.fullmatch(path.name)
        wanted = match and match[2] in kinds and name in (None, match[1])
        if wanted and path.is_dir() and not path.is_symlink():
            found.append(path)
    return found


def _written(folder: Path) -> int:
    """When a folder's manifest was written, in nanoseconds; 0 when it has none."""
    try:
        return (folder / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def _whole(folder: Path) -> Manifest | None:
    try:
        manifest = Manifest.read(folder)
        check_files(folder, manifest)
    except CheckpointError:
        return None
    return manifest


def _sibling(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(6)}")


def _check_replaceable(final: Path) -> None:
    if not final.exists():
        return
    if not final.is_dir() or (any(final.iterdir()) and not (final / MANIFEST).is_file()):
        raise CheckpointError(
            "exists and is no checkpoint, so it is not replaced",
            key=str(final),
            fix="choose another folder, or remove it yourself",
        )


def _no_checkpoint(path: Path) -> CheckpointError:
    fix = "give a folder written by save_checkpoint, such as <root>/step-00001234"
    if path.is_dir() and ((path / "latest").exists() or any(path.glob("*zero_pp_rank*"))):
        fix = f"DeepSpeed's own checkpoint? `zerotune checkpoint convert {path} NEW`"
    elif path.is_dir() and (newest := latest_checkpoint(path)) is not None:
        fix = f"did you mean {newest}?"
    return CheckpointError(f"is no checkpoint (no {MANIFEST} in it)", key=str(path), fix=fix)


def _remove(folder: Path) -> None:
    # Without its manifest nothing takes a half removed folder for a checkpoint.
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _lock(folder: Path) -> int | None:
    """A lock on a folder that ends with this process; ``None`` where folders cannot be locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """Whether no process works in a folder; holds its lock meanwhile, so that none starts."""
    try:
        descriptor = _lock(folder)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        descriptor = None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)
