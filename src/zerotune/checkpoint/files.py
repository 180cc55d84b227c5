"""The files of a checkpoint: are they on disk as they were written?"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import attrs

from zerotune._util.files import of_system
from zerotune.checkpoint.manifest import FileRecord, Manifest
from zerotune.checkpoint.tensors import hash_of
from zerotune.errors import CheckpointCorruptError, CheckpointError


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file of the manifest exists and has the recorded size."""
    for record in manifest.files:
        path = folder / record.name
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointCorruptError(
                f"is missing ({error.strerror})", "use a different checkpoint", str(path)
            ) from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointCorruptError(
                "is not a regular file", "use a different checkpoint", str(path)
            )
        nbytes = status.st_size
        if nbytes != record.nbytes:
            raise CheckpointCorruptError(
                f"has {nbytes} bytes instead of {record.nbytes}",
                "use a different checkpoint",
                str(path),
            )


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder; none if the folder does not exist."""
    try:
        return list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(
            f"cannot be read ({error.strerror})",
            "give this user permission to read the folder, or pass a different folder",
            str(folder),
        ) from error


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


_THREADS: Final = 4
"""Number of files hashed concurrently; four cores together hash about as fast as a good disk reads.
"""


def find_damage(folder: Path, manifest: Manifest) -> tuple[CheckpointCorruptError, ...]:
    """Check the files of a checkpoint, and return all errors."""

    def check(record: FileRecord) -> None:
        check_files(folder, attrs.evolve(manifest, files=[record]))
        check_hash(folder, record)

    return _damages(check, manifest.files)


def check_hashes(folder: Path, records: Sequence[FileRecord]) -> None:
    """Check the hashes of several files concurrently."""
    for damage in _damages(partial(check_hash, folder), records):
        raise damage


def _damages(
    check: Callable[[FileRecord], None], records: Sequence[FileRecord]
) -> tuple[CheckpointCorruptError, ...]:
    """Return the damage that ``check`` finds, in the files' order; checks run in parallel."""

    def judged(record: FileRecord) -> CheckpointCorruptError | None:
        try:
            check(record)
        except CheckpointCorruptError as damage:
            return damage
        return None

    # hashlib releases the GIL; more threads than this rank has cores would not help.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(min(_THREADS, cores or 1, max(1, len(records)))) as pool:
        return tuple(damage for damage in pool.map(judged, records) if damage)


def check_hash(folder: Path, record: FileRecord) -> None:
    """Check that a file's content has the recorded hash."""
    path = folder / record.name
    try:
        same = hash_of(path) == record.sha256
    except OSError as error:
        raise of_system(CheckpointCorruptError, error, path, "cannot be read") from error
    if not same:
        raise CheckpointCorruptError(
            "was changed after it was written (its hash differs)",
            "use a different checkpoint",
            str(path),
        )
