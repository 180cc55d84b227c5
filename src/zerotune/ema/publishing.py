"""A folder that is complete or absent."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a temporary folder beside ``path``, then put it there.

    A folder that exists already keeps its other files; each new file replaces the old one whole.

    Args:
        path: The folder to be.
        write: Takes the temporary folder and writes files into it, no folders.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        draft = Path(temporary) / path.name
        write(draft)
        files = [file for file in draft.iterdir() if file.is_file()]
        for file in files:
            _sync(file)
        if path.exists():
            for file in files:
                file.replace(path / file.name)
        else:
            draft.rename(path)
        _sync(path)
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
