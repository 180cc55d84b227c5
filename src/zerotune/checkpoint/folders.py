"""Find the checkpoints in a folder, verify them, and delete old ones."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Final

from zerotune._util.files import system_errors
from zerotune._util.text import listing
from zerotune.checkpoint.files import check_files, entries, find_damage, is_folder
from zerotune.checkpoint.leftovers import (
    LEFTOVER,
    base_name,
    leftovers_in,
    manifest_time,
    remove_folder,
    remove_leftovers,
    temporary_name,
    whole_manifest,
)
from zerotune.checkpoint.manifest import MANIFEST, Manifest
from zerotune.errors import CheckpointCorruptError, CheckpointError

logger = logging.getLogger("zerotune")

_NUMBERED: Final = re.compile(r"(?:step|checkpoint)[-_](\d+)", re.ASCII)
"""Names of checkpoints that ``prune`` may delete."""


def step_folder(root: str | os.PathLike[str], step: int) -> Path:
    """Return the checkpoint folder of an optimizer step, such as ``<root>/step-00001234``.

    Args:
        root: Folder that contains the run's checkpoints.
        step: Number of optimizer steps taken.
    """
    return Path(root) / f"step-{step:08d}"


def checked_path(directory: str | os.PathLike[str]) -> Path:
    """Return the absolute path, or raise an error if the path is not valid for a checkpoint."""
    path = Path(os.path.abspath(directory))  # noqa: PTH100 - Path.absolute keeps "..".
    with system_errors(CheckpointError, path, "cannot be the name of a checkpoint"):
        linked = path.is_symlink()
    if linked:
        raise CheckpointError(
            "is a symbolic link, but a checkpoint must be a folder",
            f"pass the folder that the link points to, {os.path.realpath(path)}",
            str(path),
        )
    if not path.name or "\0" in str(path) or LEFTOVER.fullmatch(path.name):
        raise CheckpointError(
            "cannot be the name of a checkpoint", "choose a different name", str(path)
        )
    return path


def find_checkpoint(directory: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    """Return a checkpoint's folder and its manifest.

    The folder is usually ``directory`` itself. If a process was killed while replacing the
    checkpoint, the newest complete checkpoint under a temporary name is returned.
    """
    path = checked_path(directory)
    if (located := _located(path)) is not None:
        return located
    fix = "pass the folder of one checkpoint, such as <root>/step-00001234"
    if path.is_dir() and ((path / "latest").exists() or any(path.glob("*zero_pp_rank*"))):
        fix = "convert DeepSpeed's checkpoint with the recipe convert.py (docs/recipes.md)"
    elif path.is_dir() and (newest := latest_checkpoint(path)) is not None:
        fix = f"did you mean {newest}?"
    raise CheckpointError(f"is not a checkpoint (contains no {MANIFEST})", fix, str(path))


def _located(path: Path) -> tuple[Path, Manifest] | None:
    """Find like ``find_checkpoint``; return ``None`` if something else has that name."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return None
        (path / MANIFEST).lstat()
        return path, Manifest.read(path)
    except (FileNotFoundError, NotADirectoryError):
        if path.exists():
            return None
    except OSError as error:
        raise CheckpointCorruptError(
            f"cannot be read ({error.strerror})", "use a different checkpoint", str(path)
        ) from error
    beside = leftovers_in(path.parent, name=path.name, kinds=("tmp", "old"))
    for sibling in sorted(beside, key=manifest_time, reverse=True):
        if (manifest := whole_manifest(sibling)) is not None:
            logger.warning("%s was not completely saved; using %s instead", path, sibling)
            return sibling, manifest
    raise CheckpointError(
        "does not exist",
        "use an existing checkpoint; latest_checkpoint(root) finds the newest in a folder",
        str(path),
    )


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in ``root`` with the largest number of steps.

    The manifest gives the number; the folder may have any name. Of several checkpoints of a step,
    the newest is returned. A checkpoint is complete if its manifest is intact and every file has
    the recorded size. File contents are verified only when the checkpoint is loaded. Incomplete or
    unreadable folders and symbolic links are skipped with a warning.

    Returns:
        The path of the checkpoint; ``None`` if ``root`` contains no complete checkpoint.

    Raises:
        CheckpointError: ``root`` cannot be read.
    """
    return next((path for path, _ in whole_checkpoints(Path(root))), None)


def whole_checkpoints(root: Path) -> Iterator[tuple[Path, Manifest]]:
    """Return paths and manifests of the complete checkpoints in ``root``, newest first.

    Incomplete or unreadable folders and symbolic links are skipped with a warning.
    """
    for path, outcome in _checkpoints(root):
        if isinstance(outcome, Manifest):
            yield path, outcome
        else:
            logger.warning("skipping an incomplete checkpoint: %s", outcome)


def prune(root: str | os.PathLike[str], *, keep: int) -> tuple[Path, ...]:
    """Delete older numbered checkpoints and the temporary folders of killed processes.

    A numbered checkpoint is named like ``step-1000`` or ``checkpoint_500``. The ``keep`` complete
    ones of the largest step are kept; checkpoints with other names (``best``) are never deleted.

    Not collective: call ``prune`` on one rank after saving a checkpoint. Incomplete folders are
    kept for inspection, and symbolic links are ignored.

    Args:
        root: Folder that contains the checkpoints.
        keep: Number of checkpoints to keep, at least 1.

    Returns:
        Paths of the deleted checkpoints.

    Raises:
        CheckpointError: ``keep`` is below 1, or a checkpoint cannot be deleted.
    """
    if keep < 1:
        raise CheckpointError("must be a whole number, 1 or more", key="keep", value=keep)
    folder, removed = Path(root), []
    with system_errors(CheckpointError, folder, "older checkpoints cannot be deleted"):
        whole = [
            path
            for path, outcome in _checkpoints(folder)
            if isinstance(outcome, Manifest) and _NUMBERED.fullmatch(path.name)
        ]
        for path in whole[keep:]:
            # Without a folder of the final name, a temporary folder that may be in use stands in.
            if is_folder(path):
                trash = temporary_name(path, "trash")
                path.rename(trash)
                remove_folder(trash)
                removed.append(path)
        if folder.is_dir():
            remove_leftovers(folder)
    return tuple(removed)


def _checkpoints(root: Path) -> Iterator[tuple[Path, Manifest | CheckpointError]]:
    """Yield the paths of checkpoints and their manifests, newest first.

    Folders that have only the name of a checkpoint, or an unreadable manifest, come with the error.
    """
    found: list[tuple[tuple[int, int, int], Path, Manifest | CheckpointError]] = []
    for path in {root / base_name(entry) for entry in entries(root)}:
        named = _NUMBERED.fullmatch(path.name)
        number = int(named[1]) if named else -1
        try:
            # Not find_checkpoint, whose suggestions search for checkpoints themselves.
            located = _located(checked_path(path))
            if located is None and named is not None:
                raise CheckpointError(f"does not contain {MANIFEST}", key=str(path))
        except CheckpointError as error:
            if named is not None or os.path.lexists(path / MANIFEST):
                found.append(((number, number, 0), path, error))
            continue
        if located is not None:
            folder, manifest = located
            age = (manifest.state.global_step, number, manifest_time(folder))
            found.append((age, path, _checked(folder, manifest)))
    for _, path, outcome in sorted(found, key=itemgetter(0), reverse=True):
        yield path, outcome


def _checked(folder: Path, manifest: Manifest) -> Manifest | CheckpointError:
    try:
        check_files(folder, manifest)
    except CheckpointError as error:
        return error
    return manifest


def verify_checkpoint(directory: str | os.PathLike[str]) -> Manifest:
    """Verify the size and hash of every file in the checkpoint ``directory``. Not collective.

    Raises:
        CheckpointError: ``directory`` is not a checkpoint.
        CheckpointCorruptError: A file is missing, truncated or altered; the message names the file.
    """
    folder, manifest = find_checkpoint(directory)
    for damage in find_damage(folder, manifest):
        raise damage
    return manifest


def finite_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint in ``root`` that has no NaN or infinity.

    Not collective.
    """
    for path, manifest in whole_checkpoints(root):
        if not manifest.not_finite:
            return path
        names = listing(manifest.not_finite, most=3)
        logger.warning("skipping %s: NaN or infinity in %s", path, names)
    return None
