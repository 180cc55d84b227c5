"""Which process a lease belongs to, and which ones may be using files that nobody leased."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from pathlib import Path
from typing import Final

import attrs

from zerotune._util.text import listing

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


# -- Which processes may be using a folder of swap files that nobody leased.


_PROC: Final = Path("/proc")
_KERNEL_THREAD: Final = 0x00200000
"""``PF_KTHREAD`` of the kernel's ``sched.h``, in field 9 of ``/proc/N/stat``."""
_CLOCK_SLACK: Final = 2.0


@attrs.frozen(kw_only=True)
class Users:
    """What a look at every process of this machine found."""

    open_in: tuple[int, ...] = ()
    """Processes that have one of the files open."""
    swapping: tuple[int, ...] = ()
    """Processes with DeepSpeed's aio loaded and no lease, which ran when the files were last
    written. DeepSpeed opens a swap file only while it reads or writes it, so such a process may
    be their owner with nothing open at this moment."""
    hidden: tuple[int, ...] = ()
    """Processes that this one may not look into."""

    def doubt(self) -> str | None:
        """Why the files cannot be said to be unused, or ``None`` when they can."""
        if self.open_in:
            return f"process {listing(self.open_in, most=5)} has a file in it open"
        if self.swapping:
            return (
                f"process {listing(self.swapping, most=5)} has DeepSpeed's aio loaded, holds no "
                "lease and was running when this was last written, so it may be its owner"
            )
        if self.hidden:
            return (
                f"this user may not see what process {listing(self.hidden, most=5)} has open; "
                "clean up as root"
            )
        return None


def users_of(
    files: Collection[tuple[int, int]], *, last_written: float, proc: Path = _PROC
) -> Users:
    """Look for processes that use files, or may.

    Processes of other machines and, from inside a container, of other containers cannot be seen.

    Args:
        files: Device and inode of each.
        last_written: When the last of them was written, seconds since 1970.
        proc: Where the kernel shows its processes.

    Raises:
        OSError: Processes cannot be listed at all (anything but Linux).
    """
    wanted = frozenset(files)
    booted = _boot_time(proc)
    open_in, swapping, hidden = [], [], []
    # A kernel that hides other users' processes hides the first one as well.
    if not (proc / "1").exists():
        hidden.append(1)
    for pid in sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()):
        process = proc / str(pid)
        try:
            started = _start_of_user_process(process)
            if started is None:
                continue
            opened, leased = _opened(process)
            if wanted & opened:
                open_in.append(pid)
                continue
            was_running = booted + started <= last_written + _CLOCK_SLACK
            if was_running and not leased and _swaps(process):
                swapping.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            # It ended while we looked.
            continue
        except PermissionError:
            hidden.append(pid)
    return Users(open_in=tuple(open_in), swapping=tuple(swapping), hidden=tuple(hidden))


def _start_of_user_process(process: Path) -> float | None:
    """Seconds from boot to its start; ``None`` for a zombie or a thread of the kernel."""
    fields = (process / "stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
    if fields[0] in "ZX" or int(fields[6]) & _KERNEL_THREAD:
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _opened(process: Path) -> tuple[set[tuple[int, int]], bool]:
    """Device and inode of all it has open, and whether a lease's lock is among them."""
    opened, leased = set(), False
    for descriptor in (process / "fd").iterdir():
        try:
            facts = descriptor.stat()
            leased = leased or descriptor.readlink().name == "lease.lock"
        except FileNotFoundError:
            continue
        opened.add((facts.st_dev, facts.st_ino))
    return opened, leased


def _swaps(process: Path) -> bool:
    """Whether it has loaded the op that DeepSpeed swaps with."""
    return "async_io" in (process / "maps").read_text("utf-8", errors="replace")


def _boot_time(proc: Path) -> float:
    for line in (proc / "stat").read_text("ascii").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise OSError("the kernel does not say when it was started")
