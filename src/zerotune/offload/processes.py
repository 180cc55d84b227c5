"""Which processes may be using files of a swap folder that nobody leased."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

import attrs

from zerotune._util.text import listing

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
