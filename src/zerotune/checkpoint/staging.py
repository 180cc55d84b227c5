"""Folders under temporary names, published when they are complete.

A checkpoint is written as ``<name>.tmp-<id>`` and renamed when it is complete. An existing
checkpoint of the same name is first renamed to ``<name>.old-<id>`` and deleted last. While a
checkpoint is replaced, a complete one always exists under one of these three names;
``find_checkpoint`` checks all of them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from typing_extensions import override

from zerotune._util.files import exchange, sync
from zerotune._util.text import format_size
from zerotune.checkpoint.leftovers import (
    lock_folder,
    remove_folder,
    remove_leftovers,
    retire,
    temporary_name,
)
from zerotune.checkpoint.manifest import MANIFEST
from zerotune.checkpoint.marks import check_replaceable
from zerotune.errors import CheckpointError

_FREE_MARGIN: Final = 2**24
"""Bytes to leave free for the file system's own bookkeeping."""


class Staging:
    """A folder with a temporary name that will become the checkpoint ``final``.

    The creator locks the folder. To other processes, an unlocked temporary folder is the leftover
    of a killed process.
    """

    def __init__(self, final: Path) -> None:
        self._check(final)
        self._final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        self.path = temporary_name(final, "tmp")
        self.path.mkdir()
        self._lock = lock_folder(self.path)

    def publish(self) -> None:
        """Rename the folder to its final name, and then delete the previous checkpoint."""
        sync(self.path)
        former = self._take_place()
        sync(self._final.parent)
        self._release()
        if former is not None:
            retire(former, self._final)
        remove_leftovers(self._final.parent, name=self._final.name)

    def abandon(self) -> None:
        """Delete the folder and everything in it."""
        self._release()
        if self.path.exists():
            remove_folder(self.path)

    def _check(self, final: Path) -> None:
        if not final.exists():
            return
        if not final.is_dir() or (any(final.iterdir()) and not (final / MANIFEST).is_file()):
            raise CheckpointError(
                "exists and is not a checkpoint, so it is not overwritten",
                "choose a different folder, or remove this one yourself",
                str(final),
            )

    def _take_place(self) -> Path | None:
        """Take the final name, and return the new path of a folder that had it before."""
        former = temporary_name(self._final, "old") if self._final.exists() else None
        if former is not None:
            self._final.rename(former)
        self.path.rename(self._final)
        return former

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class ExportStaging(Staging):
    """A folder with a temporary name that will become the export ``final``.

    If the file system can exchange two folders atomically, the new export replaces the old export
    in one operation. Readers then always find an export under its final name.
    """

    @override
    def _check(self, final: Path) -> None:
        check_replaceable(final)

    @override
    def _take_place(self) -> Path | None:
        if not self._final.exists():
            return super()._take_place()
        former = temporary_name(self._final, "old")
        # Rename first: if a kill follows the exchange, the former folder then has its .old name.
        self.path.rename(former)
        try:
            exchange(former, self._final)
        except OSError:
            former.rename(self.path)
            return super()._take_place()
        return former


def check_space(folder: Path, nbytes: int) -> None:
    """Check that ``nbytes`` more bytes fit on the disk that contains ``folder``."""
    free = shutil.disk_usage(folder).free
    if free < nbytes + _FREE_MARGIN:
        raise CheckpointError(
            f"needs {format_size(nbytes)} of disk space, but only {format_size(free)} are free",
            "free disk space, keep fewer checkpoints (prune), or save to a different disk",
            str(folder),
        )
