"""Torch's folder of compiled extensions, looked at without touching it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import attrs

from zerotune.backend.build_errors import Diagnosis

_ABANDONED_AFTER: Final = 600.0
"""Seconds after which a lock that no visible process holds is taken for abandoned; one op compiles
in about a minute."""


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
    if explained is None:
        return "ninja would compile it again"
    hint = "; another ninja or other flags do that" if "command line" in explained.group(1) else ""
    return f"ninja says: {explained.group(1)}{hint}"


@attrs.frozen(kw_only=True)
class BuildLock:
    """The lock that a process compiling an extension holds on its folder."""

    path: Path
    age: float
    """Seconds since it was taken."""
    holder: int | None
    """Process that holds it; ``None`` when none can be seen, on another host for example."""

    @classmethod
    def on(cls, folder: Path) -> BuildLock | None:
        """The lock on a build folder, or ``None``."""
        path = folder / "lock"
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:
            return None
        return cls(path=path, age=max(age, 0.0), holder=_holder(path))

    @property
    def abandoned(self) -> bool:
        """Whether whoever took it is gone, so that waiting for it would last for ever."""
        return self.holder is None and self.age > _ABANDONED_AFTER

    def diagnose(self) -> Diagnosis:
        """What the lock means, and what to do."""
        if self.holder is not None:
            return Diagnosis(
                cause=f"process {self.holder} has been compiling it for {self.age:.0f} s",
                fix="wait until it is done",
            )
        since = f"{self.age / 60:.0f} minutes" if self.age > 120 else f"{self.age:.0f} s"
        return Diagnosis(
            cause=f"a build that began {since} ago holds its lock, and no process here has it open",
            fix=f"if nothing on another host is compiling, delete {self.path}",
        )


def _holder(lock: Path) -> int | None:
    # Torch keeps the file open as long as it holds the lock.
    import psutil

    wanted = str(lock.resolve())
    for process in psutil.process_iter(["open_files"]):
        if any(file.path == wanted for file in process.info["open_files"] or ()):
            return int(process.pid)
    return None
