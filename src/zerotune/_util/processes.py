"""Which process this is, told apart from every other, and whether one still runs."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import attrs

ENDED = "has ended"
"""What is said of a process that no longer runs."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


@attrs.frozen(kw_only=True)
class ProcessIdentity:
    """A process, told apart from every later one that is given the same number."""

    host: str
    """Host name."""
    boot_id: str | None
    """The kernel's id of this boot; ``None`` outside Linux."""
    pid: int
    """Process id, as seen in the process's own namespace."""
    pid_start: int | None
    """Start of the process in clock ticks since boot; ``None`` outside Linux."""
    pid_namespace: int | None = None
    """The kernel's number of the namespace ``pid`` counts in; ``None`` outside Linux."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The calling process."""
        pid = os.getpid()
        state = _state_and_start(pid)
        return cls(
            host=platform.node(),
            boot_id=boot_id(),
            pid=pid,
            pid_start=state[1] if state else None,
            pid_namespace=_pid_namespace(),
        )

    def same_boot(self) -> bool:
        """Whether it ran under the kernel that is running now."""
        return self.boot_id is not None and self.boot_id == boot_id()

    def visible(self) -> bool:
        """Whether this process would see it: the same kernel and the same process numbers."""
        return self.same_boot() and self.pid_namespace in (None, _pid_namespace())

    def alive(self) -> bool:
        """Whether it still runs, as far as this process can see; a zombie does not."""
        if self.host == platform.node() and self.boot_id is None:
            return _pid_exists(self.pid)
        if not self.same_boot():
            return False
        state = _state_and_start(self.pid)
        return state is not None and state[0] not in "ZX" and state[1] == self.pid_start

    def condition(self) -> str | None:
        """``"has ended"`` or ``"is stopped"``; ``None``: it runs, or cannot be seen from here."""
        if not self.visible():
            return None
        if not self.alive():
            return ENDED
        state = _state_and_start(self.pid)
        return "is stopped" if state is not None and state[0] in "Tt" else None


def boot_id() -> str | None:
    """The kernel's id of this boot, or ``None`` outside Linux."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def _pid_namespace() -> int | None:
    try:
        return _PID_NAMESPACE.stat().st_ino
    except OSError:
        return None


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """State letter and start ticks of a process (proc(5), fields 3 and 22 of ``stat``)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command name is in parentheses and may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
