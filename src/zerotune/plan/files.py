"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from zerotune.errors import PlanFileError
from zerotune.files import sync_folder, write_atomically


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file so that nobody ever sees a part of it; an existing file is replaced.

    Args:
        path: The file; its folder is made. A symbolic link is followed.
        content: All of it.

    Returns:
        ``path``.

    Raises:
        PlanFileError: The system does not let us.
    """
    final = Path(path).resolve()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(final, content)
        sync_folder(final.parent)
    except OSError as error:
        raise PlanFileError(
            f"cannot be written ({error.strerror or error})",
            key=os.fspath(path),
            fix="name a file in a folder that you may write to",
        ) from error
    return Path(path)
