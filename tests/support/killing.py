"""Kill a process while it writes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerotune.checkpoint import staging
from zerotune.checkpoint import tensors as tensorfile

MOMENTS = (
    (os, "fsync"),
    (Path, "mkdir"),
    (Path, "rename"),
    (Path, "unlink"),
    (shutil, "rmtree"),
    (os, "unlink"),
    (staging, "exchange"),
    (tensorfile, "write_at"),
)
"""Functions that change the disk."""


def comes_to_its_end(write: Callable[[], Any], *, moment: int) -> bool:
    """Run ``write`` in a child killed at disk change ``moment``; return whether it finished."""
    child = os.fork()
    if child == 0:
        try:
            _kill_at(moment)
            write()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return os.WIFEXITED(status)


def _kill_at(moment: int) -> None:
    left = [moment]

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return act

    for owner, name in MOMENTS:
        setattr(owner, name, deadly(getattr(owner, name)))
