"""Whether a plan's host memory fits this machine, asked before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from zerotune.platform import Platform

_CAP_IPC_LOCK: Final = 1 << 14
_STATUS: Final = Path("/proc/self/status")


def lockable_memory(platform: Platform, *, status: Path = _STATUS) -> int | None:
    """Bytes one process may lock in RAM; ``None`` when nothing limits it.

    The limit (``ulimit -l``) binds each process on its own, and none that has the capability
    ``CAP_IPC_LOCK``, as root mostly does.

    Args:
        platform: The machine, whose ``memlock_limit`` is the limit.
        status: Where Linux says what this process may do.
    """
    if platform.memlock_limit is None or _may_lock_anything(status):
        return None
    return platform.memlock_limit


def _may_lock_anything(status: Path) -> bool:
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    held = [line.split()[1] for line in lines if line.startswith("CapEff:")]
    return bool(held) and bool(int(held[0], 16) & _CAP_IPC_LOCK)
