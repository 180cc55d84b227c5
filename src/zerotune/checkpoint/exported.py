"""Which files on the disk are exports of zerotune, so that a later export may take their place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs

from zerotune._util.text import json_of
from zerotune.backend.stored import read_header
from zerotune.checkpoint.tensors import hash_of
from zerotune.errors import CheckpointCorruptError, CheckpointError

_KEY: Final = "zerotune"
"""Where the mark stands in a safetensors header."""


@attrs.frozen(kw_only=True)
class Mark:
    """What the weights of an export say in their headers of the export they belong to.

    The same export has the same mark: it holds neither time nor version.
    """

    files: Mapping[str, str | None]
    """SHA-256 (hex) by path from the top of the export; ``None`` of weights, which hold the mark
    themselves."""

    @property
    def metadata(self) -> dict[str, str]:
        """For the header of the weights."""
        return {_KEY: json.dumps({"files": self.files}, sort_keys=True)}

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Mark | None:
        """The mark in a header; ``None``: none of ours."""
        try:
            files = json_of(metadata[_KEY])["files"]
        except (KeyError, TypeError, ValueError):
            return None
        return cls(files=files) if isinstance(files, dict) else None

    def changed(self, top: Path) -> str | None:
        """Which of the files in ``top`` is not as it was written; those that are gone are not."""
        for name, sha256 in self.files.items():
            file = top / name
            if os.path.lexists(file) and not self._holds(file, sha256):
                return name
        return None

    def _holds(self, file: Path, sha256: str | None) -> bool:
        if not file.is_file() or file.is_symlink():
            return False
        return _mark_in(file) == self if sha256 is None else hash_of(file) == sha256


def check_replaceable(path: Path) -> None:
    """Check that nothing is lost when an export takes the place of ``path``.

    Raises:
        CheckpointError: It is not all of what an earlier export wrote there.
    """
    if not os.path.lexists(path) or _empty(path):
        return
    changed: str | None = None
    for mark in _marks(path):
        changed = None if path.is_file() else mark.changed(path)
        if changed is None:
            return
    reason = "zerotune did not write it"
    if changed is not None:
        reason = f"{changed} in it has changed since zerotune wrote it"
    raise CheckpointError(
        f"exists and is not replaced: {reason}",
        key=str(path),
        fix="choose another name, or remove it yourself",
    )


def check_apart(path: Path, base: Path) -> None:
    """Check that an export does not take the place of what it is made from.

    Raises:
        CheckpointError: It would.
    """
    if path.resolve() == base.resolve():
        raise CheckpointError(
            "exists and is not replaced: the export is made from it",
            key=str(path),
            fix="choose another name",
        )


def files_of_export(folder: Path) -> frozenset[str] | None:
    """Files of the export in a folder, by their path in it; ``None``: there is no whole one."""
    whole = [mark.files for mark in _marks(folder) if mark.changed(folder) is None]
    return frozenset(name for files in whole for name in files) if whole else None


def _marks(path: Path) -> Iterator[Mark]:
    """The marks of what may be an export; a pipeline holds those of earlier ones, too."""
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


def _empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
