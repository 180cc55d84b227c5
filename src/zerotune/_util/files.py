"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all; an existing one is replaced.

    Raises:
        OSError: The system does not let us.
    """
    # Not the process id: machines that share the disk may have the same.
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.draft")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with suppress(OSError):  # Most often it is gone, renamed.
            draft.unlink()


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to disk."""
    if os.name == "nt":  # Windows cannot open folders.
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
