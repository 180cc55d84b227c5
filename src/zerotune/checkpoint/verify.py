"""Is a checkpoint on disk what was written?"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import torch

from zerotune._util.files import of_system
from zerotune._util.text import listing
from zerotune.checkpoint.folders import check_files, find_checkpoint, whole_checkpoints
from zerotune.checkpoint.manifest import FileRecord, Manifest
from zerotune.checkpoint.tensors import Subject, TensorReader, hash_of
from zerotune.errors import CheckpointCorruptError, CheckpointError

logger = logging.getLogger("zerotune")

_LOOKED_AT_ONCE: Final = 2**22
"""Elements looked at at a time."""
_THREADS: Final = 4
"""Files hashed at a time; a core hashes about as fast as a good disk reads a quarter."""


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


def finite_checkpoint(root: Path) -> Path | None:
    """The newest whole ``step-…`` checkpoint in ``root`` without NaN or infinity.

    Not collective. Where the manifest does not say, the files are read.
    """
    for path, manifest in whole_checkpoints(root):
        spoiled = manifest.not_finite
        try:
            if spoiled is None:
                spoiled = _not_finite(*find_checkpoint(path))
        except (CheckpointError, OSError) as error:
            logger.warning("skipping a checkpoint that cannot be read: %s", error)
            continue
        if not spoiled:
            return path
        logger.warning("skipping %s: NaN or infinity in %s", path, listing(spoiled, most=3))
    return None


def _not_finite(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """The first tensor that is not finite, if any."""
    for record in manifest.files:
        subject = Subject(kind=record.kind, of=record.of)
        with TensorReader([folder / record.name], subject=subject) as reader:
            for name, tensor in reader.tensors.items():
                numel = math.prod(tensor.shape)
                for start in range(0, numel, _LOOKED_AT_ONCE):
                    piece = torch.empty(min(_LOOKED_AT_ONCE, numel - start), dtype=tensor.dtype)
                    reader.fill(piece, name, start)
                    if not subject.sound(piece):
                        return (f"{record.name}: {name}",)
    return ()


def find_damage(folder: Path, manifest: Manifest) -> tuple[CheckpointCorruptError, ...]:
    """Everything that is wrong with the files of a checkpoint, not only the first."""

    def check(record: FileRecord) -> None:
        check_files(folder, attrs.evolve(manifest, files=[record]))
        check_hash(folder, record)

    return _damages(check, manifest.files)


def check_hashes(folder: Path, records: Sequence[FileRecord]) -> None:
    """Check the content of files, several at a time."""
    for damage in _damages(partial(check_hash, folder), records):
        raise damage


def _damages(
    check: Callable[[FileRecord], None], records: Sequence[FileRecord]
) -> tuple[CheckpointCorruptError, ...]:
    """What a check finds in files, in their order; they are checked several at a time."""

    def judged(record: FileRecord) -> CheckpointCorruptError | None:
        try:
            check(record)
        except CheckpointCorruptError as damage:
            return damage
        return None

    # hashlib lets other threads run meanwhile; more than the cores of this rank would not help.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(min(_THREADS, cores or 1, max(1, len(records)))) as pool:
        return tuple(damage for damage in pool.map(judged, records) if damage)


def check_hash(folder: Path, record: FileRecord) -> None:
    """Check a file's content."""
    path = folder / record.name
    try:
        same = hash_of(path) == record.sha256
    except OSError as error:
        raise of_system(CheckpointCorruptError, error, path, "cannot be read") from error
    if not same:
        raise CheckpointCorruptError(
            "was altered after it was written (its hash differs)",
            key=str(path),
            fix="use another checkpoint",
        )
