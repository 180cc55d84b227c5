"""Files that are whole or not there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from zerotune.errors import PlanFileError


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
    draft = final.with_name(f".{final.name}.{os.getpid()}.draft")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _write(draft, content)
        draft.replace(final)
        _sync_folder(final.parent)
    except OSError as error:
        raise PlanFileError(
            f"cannot be written ({error.strerror or error})",
            key=os.fspath(path),
            fix="name a file in a folder that you may write to",
        ) from error
    finally:
        with suppress(OSError):  # Most often it is gone, renamed.
            draft.unlink()
    return Path(path)


def _write(draft: Path, content: bytes) -> None:
    with draft.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open folders.
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
