"""Limits that Linux control groups (version 2) put on this process.

A limit anywhere on the path from the process's own group up to the root binds, so every level
that can be seen is read and the smallest wins. Files are read through a callable, which makes
any container's layout reproducible in a test.

Sources: ``cgroups(7)``, ``proc_pid_mountinfo(5)``, the kernel's ``cgroup-v2`` admin guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import attrs

from zerotune._util.proc import parse_mount

Read = Callable[[str], "str | None"]


@attrs.frozen(kw_only=True)
class CgroupMemory:
    """Memory limit of this process's control groups, in bytes."""

    limit: int | None = None
    """The smallest limit; ``None`` when there is none."""
    available: int | None = None
    """What the tightest level still allows, its reclaimable page cache counted as free."""


def memory_constraint(read: Read) -> CgroupMemory:
    """The memory limit on this process and what is left of it.

    Args:
        read: Returns a file's text, or ``None`` when it cannot be read.
    """
    limits: list[int] = []
    available: list[int] = []
    for folder in _folders(read):
        limit = _integer(read(f"{folder}/memory.max"))
        if limit is None:
            continue
        usage = _integer(read(f"{folder}/memory.current")) or 0
        statistics = read(f"{folder}/memory.stat") or ""
        cache = re.search(r"(?m)^inactive_file ([0-9]{1,20})$", statistics)
        used = max(0, usage - (int(cache[1]) if cache else 0))
        limits.append(limit)
        available.append(max(0, limit - used))
    return CgroupMemory(limit=min(limits, default=None), available=min(available, default=None))


def cpu_quota(read: Read) -> float | None:
    """Cores' worth of CPU time this process may use, or ``None`` when there is no quota.

    Args:
        read: Returns a file's text, or ``None`` when it cannot be read.
    """
    quotas = []
    for folder in _folders(read):
        fields = (read(f"{folder}/cpu.max") or "").split()
        microseconds, window = map(_integer, [*fields, "", ""][:2])
        if microseconds and window and microseconds > 0 and window > 0:
            quotas.append(microseconds / window)
    return min(quotas, default=None)


def _folders(read: Read) -> Iterator[str]:
    """Folders that may limit this process, from its own group up to each mount point."""
    mounts = map(parse_mount, (read("/proc/self/mountinfo") or "").splitlines())
    groups = [mount for mount in mounts if mount is not None and mount.kind == "cgroup2"]
    for line in (read("/proc/self/cgroup") or "").splitlines():
        if not line.startswith("0::"):
            continue
        path = line.removeprefix("0::")
        for mount in groups:
            prefix = mount.root.rstrip("/") + "/"
            # A container whose group lies outside of what is mounted still sees its own limit at
            # the mount point.
            inside = (path + "/").startswith(prefix)
            parts = [part for part in path[len(prefix) :].split("/") if part] if inside else []
            parts = [] if ".." in parts else parts
            for length in range(len(parts), -1, -1):
                yield "/".join([str(mount.point).rstrip("/"), *parts[:length]])


def _integer(text: str | None) -> int | None:
    stripped = (text or "").strip()
    return int(stripped) if re.fullmatch(r"-?[0-9]{1,20}", stripped) else None
