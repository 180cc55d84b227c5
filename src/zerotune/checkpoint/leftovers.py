"""Temporary folders of checkpoints and exports, and what killed processes left of them."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from zerotune._util.ownership import try_lock
from zerotune.checkpoint.files import check_files, entries, is_folder
from zerotune.checkpoint.manifest import MANIFEST, Manifest
from zerotune.checkpoint.marks import files_of_export
from zerotune.errors import CheckpointError

logger = logging.getLogger("zerotune")

LEFTOVER: Final = re.compile(r"(.+)\.(tmp|old|trash)-([0-9a-f]{12})", re.ASCII)

_SAVED_FILE: Final = re.compile(
    r"(weights|optimizer\..+|shadow\..+|rank)-\d{5}-of-\d{5}\.safetensors", re.ASCII
)
"""Names of the files that saving creates, whether or not a manifest lists them."""


def remove_leftovers(parent: Path, *, name: str | None = None) -> None:
    """Delete temporary folders that killed processes left in ``parent``.

    Folders in use are kept. If a checkpoint is missing, a complete temporary folder of this
    checkpoint is kept and serves as the checkpoint. A folder that cannot be deleted causes a
    warning.

    Args:
        parent: Folder that contains the checkpoints.
        name: Name of the checkpoint whose temporary folders are deleted; by default, the temporary
            folders of all checkpoints are deleted.
    """
    for path in leftovers_in(parent, name=name):
        base = parent / base_name(path)
        trash = path.name.startswith(f"{base.name}.trash-")
        if not trash and not is_folder(base) and (whole_manifest(path) or files_of_export(path)):
            continue
        try:
            with held_if_unused(path) as unused:
                if unused:
                    retire(path, base)
        except (OSError, CheckpointError) as error:
            # Usually another user's leftovers in a shared folder, which must not end this run.
            logger.warning("leftovers of a killed save cannot be deleted: %s (%s)", path, error)


def base_name(path: Path) -> str:
    """Return the name of the checkpoint that a temporary folder belongs to."""
    match = LEFTOVER.fullmatch(path.name)
    return match[1] if match else path.name


def leftovers_in(
    parent: Path, *, name: str | None = None, kinds: tuple[str, ...] = ("tmp", "old", "trash")
) -> list[Path]:
    """Return the temporary folders of all checkpoints in ``parent``, or of ``name``."""
    return [
        path
        for path in entries(parent)
        if (match := LEFTOVER.fullmatch(path.name))
        and match[2] in kinds
        and name in (None, match[1])
        and is_folder(path)
    ]


def manifest_time(folder: Path) -> int:
    """Return the mtime of a folder's manifest in nanoseconds; 0 if it has none."""
    try:
        return (folder / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def whole_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a complete checkpoint; ``None`` for others."""
    try:
        manifest = Manifest.read(folder)
        check_files(folder, manifest)
    except CheckpointError:
        return None
    return manifest


def temporary_name(path: Path, kind: str) -> Path:
    """Return a new temporary name beside ``path``."""
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(6)}")


def remove_folder(folder: Path) -> None:
    """Delete a checkpoint or an export."""
    # Without a manifest, a half-removed folder is not mistaken for a checkpoint.
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def retire(former: Path, successor: Path) -> None:
    """Remove a replaced checkpoint; move files that are not part of it to its successor."""
    if former.name.startswith(f"{successor.name}.old-") and is_folder(successor):
        for path in _foreign(former):
            target = successor / path.relative_to(former)
            if os.path.lexists(target):
                target = target.with_name(f"{target.name}.former-{secrets.token_hex(6)}")
            logger.info("keeping %s, which does not belong to the replaced files", target)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    remove_folder(former)


def _foreign(folder: Path) -> list[Path]:
    """Return the entries in a checkpoint's or export's folder that are not part of it."""
    exported = files_of_export(folder)
    if exported is not None:
        return list(_besides(folder, exported))
    try:
        listed = frozenset(record.name for record in Manifest.read(folder).files)
    except CheckpointError:
        listed = frozenset()
    others = _besides(folder, listed | {MANIFEST})
    return [path for path in others if not _SAVED_FILE.fullmatch(path.name)]


def _besides(folder: Path, names: frozenset[str]) -> Iterator[Path]:
    """Yield all entries except ``names``; a folder without any of them is yielded as one entry."""
    for path in entries(folder):
        start = f"{path.name}/"
        inside = frozenset(name.removeprefix(start) for name in names if name.startswith(start))
        if inside and is_folder(path):
            yield from _besides(path, inside)
        elif path.name not in names:
            yield path


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed or this process ends.

    Returns:
        The lock's descriptor; ``None`` if another process holds the lock or locking fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    locked = False
    try:
        with suppress(OSError):
            locked = try_lock(descriptor, exclusive=True)
    finally:
        if not locked:
            os.close(descriptor)
    return descriptor if locked else None


@contextmanager
def held_if_unused(folder: Path) -> Iterator[bool]:
    """Lock a folder inside the block; yield ``False`` if another process uses it."""
    try:
        descriptor = lock_folder(folder)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        descriptor = None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)
