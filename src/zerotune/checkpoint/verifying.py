"""Is a checkpoint on disk what was written?"""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from zerotune.checkpoint.folders import check_files, find_checkpoint
from zerotune.checkpoint.manifest import FileRecord, Manifest
from zerotune.checkpoint.tensorfile import hash_of
from zerotune.errors import CheckpointCorruptError


def verify_checkpoint(directory: str | os.PathLike[str]) -> Manifest:
    """Check every file of a checkpoint against its size and hash. Not collective.

    Raises:
        CheckpointError: There is no checkpoint here.
        CheckpointCorruptError: A file is missing, truncated or altered; the message names it.
    """
    folder, manifest = find_checkpoint(directory)
    for damage in find_damage(folder, manifest):
        raise damage
    return manifest


def find_damage(folder: Path, manifest: Manifest) -> tuple[CheckpointCorruptError, ...]:
    """Everything that is wrong with the files of a checkpoint, not only the first."""
    found = []
    for record in manifest.files:
        try:
            check_files(folder, attrs.evolve(manifest, files=[record]))
            check_hash(folder, record)
        except CheckpointCorruptError as damage:
            found.append(damage)
    return tuple(found)


def check_hash(folder: Path, record: FileRecord) -> None:
    """Check a file's content.

    Raises:
        CheckpointCorruptError: It is not what was written, or cannot be read.
    """
    path = folder / record.name
    try:
        same = hash_of(path) == record.sha256
    except OSError as error:
        raise CheckpointCorruptError(f"cannot be read ({error})", key=str(path)) from error
    if not same:
        raise CheckpointCorruptError(
            "was altered after it was written (its hash differs)",
            key=str(path),
            fix="use another checkpoint",
        )
