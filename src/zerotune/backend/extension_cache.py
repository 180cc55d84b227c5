"""Torch's folder of compiled extensions, looked at without touching it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from zerotune.backend.build_errors import Diagnosis

_ABANDONED_AFTER: Final = 600.0
"""Seconds after which a build lock is taken for abandoned; one op compiles in about a minute."""


def build_folder(name: str) -> Path:
    """Where torch compiles the extension ``name``; asking torch itself would create the folder."""
    import torch
    from torch.utils import cpp_extension

    stated = os.environ.get("TORCH_EXTENSIONS_DIR")
    if stated is not None:
        return Path(stated) / name
    if torch.version.hip is not None:
        target = f"rocm{torch.version.hip.replace('.', '')}"
    elif torch.version.cuda is not None:
        target = f"cu{torch.version.cuda.replace('.', '')}"
    else:
        target = "cpu"
    version = sys.version_info
    tag = f"py{version.major}{version.minor}{getattr(sys, 'abiflags', '')}_{target}"
    return Path(cpp_extension.get_default_build_root()) / tag / name


def built_library(folder: Path) -> Path | None:
    """The compiled library in a build folder, or ``None``."""
    library = folder / f"{folder.name}.so"
    return library if library.is_file() else None


def why_stale(folder: Path) -> str | None:
    """Why ninja would compile again, or ``None`` when the library is up to date.

    A new torch or deepspeed, other flags and even another ninja (its record of commands differs
    between releases) make a library stale.
    """
    try:
        done = subprocess.run(
            ["ninja", "-n", "-d", "explain"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"ninja cannot tell whether it is up to date: {error}"
    if "no work to do" in done.stdout:
        return None
    explained = re.search(r"ninja explain: (.+)", done.stderr + done.stdout)
    return f"ninja says: {explained.group(1)}" if explained else "ninja would compile it again"


def lock_on(folder: Path) -> Diagnosis | None:
    """What a build lock in the folder means; ``None`` when there is none."""
    age = _lock_age(folder)
    if age is None:
        return None
    lock = folder / "lock"
    if age > _ABANDONED_AFTER:
        return Diagnosis(
            cause=f"a build that began {age / 60:.0f} minutes ago left its lock, on which every "
            "later one waits for ever",
            fix=f"if nothing is compiling, delete {lock}",
        )
    return Diagnosis(
        cause=f"another process has been compiling it for {max(age, 0):.0f} s",
        fix=f"wait; if nothing is compiling, delete {lock}",
    )


def is_abandoned(folder: Path) -> bool:
    """Whether the folder's lock is so old that whoever took it is most likely gone."""
    age = _lock_age(folder)
    return age is not None and age > _ABANDONED_AFTER


def _lock_age(folder: Path) -> float | None:
    try:
        return time.time() - (folder / "lock").stat().st_mtime
    except OSError:
        return None
