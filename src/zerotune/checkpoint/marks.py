"""Which files an export wrote, so that a later export may take their place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs

from zerotune._util.text import json_of
from zerotune.backend.stored import read_header
from zerotune.checkpoint.files import entries, is_folder
from zerotune.checkpoint.manifest import MANIFEST
from zerotune.checkpoint.tensors import hash_of
from zerotune.errors import CheckpointCorruptError, CheckpointError

_MARK_ENTRY: Final = "zerotune"
"""Metadata key of an export's mark in a safetensors header."""


@attrs.frozen(kw_only=True)
class Mark:
    """Metadata in the headers of weight files, by which zerotune recognises its exports.

    Equal exports have equal marks, because a mark contains neither a time nor a version.
    """

    files: Mapping[str, str | None]
    """SHA-256 (hex) of each file, by path relative to the export's top folder; ``None`` for weight
    files, which contain the mark."""

    @property
    def metadata(self) -> dict[str, str]:
        """Return the metadata for the header of a weight file."""
        return {_MARK_ENTRY: json.dumps({"files": self.files}, sort_keys=True)}

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Mark | None:
        """Return the mark in a header's metadata; ``None`` if there is no valid mark."""
        try:
            files = json_of(metadata[_MARK_ENTRY])["files"]
        except (KeyError, TypeError, ValueError):
            return None
        return cls(files=files) if isinstance(files, dict) else None

    def changed(self, top: Path) -> str | None:
        """Return the path of a file in ``top`` that has changed since the export, or ``None``."""
        for name, sha256 in self.files.items():
            file = top / name
            if os.path.lexists(file) and not self._holds(file, sha256):
                return name
        return None

    def _holds(self, file: Path, sha256: str | None) -> bool:
        if not file.is_file() or file.is_symlink():
            return False
        return _mark_in(file) == self if sha256 is None else hash_of(file) == sha256


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Check that ``path`` is missing, an output folder, or an unchanged earlier export.

    An output folder is empty, or contains only checkpoints and logs, which exports keep. An export
    checks its path too, but at the end of training; call this function before.

    Args:
        path: Path of a later export.

    Raises:
        CheckpointError: Something else is there, which no export replaces.
    """
    path = Path(path)
    if not os.path.lexists(path) or (is_folder(path) and all(map(_is_by_product, entries(path)))):
        return
    changed: str | None = None
    for mark in _marks(path):
        changed = None if path.is_file() else mark.changed(path)
        if changed is None:
            return
    reason = "zerotune did not write it"
    if changed is not None:
        reason = f"{changed} has changed since zerotune wrote it"
    raise CheckpointError(
        f"exists and is not replaced: {reason}",
        "choose a different name, or remove the existing file or folder yourself",
        str(path),
    )


def _is_by_product(path: Path) -> bool:
    """Whether a training script writes such an entry into its output folder."""
    return is_folder(path) and (path.name == "logs" or (path / MANIFEST).is_file())


def check_apart(path: Path, base: Path) -> None:
    """Check that an export does not replace the folder that it reads from."""
    if path.resolve() == base.resolve():
        raise CheckpointError(
            "exists and is not replaced, because the export is made from it",
            "choose a different name for the export",
            str(path),
        )


def files_of_export(folder: Path) -> frozenset[str] | None:
    """Return the paths of an export's files; ``None`` if the folder has no complete export."""
    whole = [mark.files for mark in _marks(folder) if mark.changed(folder) is None]
    return frozenset(name for files in whole for name in files) if whole else None


def _marks(path: Path) -> Iterator[Mark]:
    """Yield the marks of a possible export; a pipeline also contains those of earlier exports."""
    if path.is_file():
        mark = None if path.is_symlink() else _mark_in(path)
        if mark is not None:
            yield mark
        return
    for file in sorted((*path.glob("*.safetensors"), *path.glob("*/*.safetensors"))):
        mark = _mark_in(file)
        if mark is not None and file.relative_to(path).as_posix() in mark.files:
            yield mark


def _mark_in(file: Path) -> Mark | None:
    try:
        return Mark.of(read_header(file)[1])
    except CheckpointCorruptError:
        return None
