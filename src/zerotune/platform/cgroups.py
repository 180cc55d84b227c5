"""Limits that Linux control groups put on this process, versions 1 and 2, nested or mixed.

A limit anywhere on the path from the process's own group up to the root binds, so every level
that can be seen is read and the smallest wins. Files are read through a callable, which makes
any container's layout reproducible in a test.

Sources: ``cgroups(7)``, ``proc_pid_mountinfo(5)``; the kernel's ``cgroup-v1/memory`` and
``cgroup-v2`` admin guides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal

import attrs

from zerotune._util.proc import Mount, parse_mount

Read = Callable[[str], "str | None"]

_VERSIONS: Final[dict[str, Literal[1, 2]]] = {"cgroup": 1, "cgroup2": 2}
_NO_LIMIT: Final = 1 << 60
"""Version 1 spells "no limit" as the largest page-aligned integer; nobody has an exbibyte."""


@attrs.frozen(kw_only=True)
class CgroupMemory:
    """Memory limit of this process's control groups, in bytes."""

    limit: int | None = None
    """The smallest limit; ``None`` when there is none."""
    available: int | None = None
    """What the tightest level still allows, its reclaimable page cache counted as free."""


@attrs.frozen(kw_only=True)
class _Level:
    version: Literal[1, 2]
    directory: str


def memory_constraint(read: Read) -> CgroupMemory:
    """The memory limit on this process and what is left of it.

    Args:
        read: Returns a file's text, or ``None`` when it cannot be read.
    """
    limits: list[int] = []
    available: list[int] = []
    for level in _levels(read, "memory"):
        limit, used = _memory_of(level, read)
        if limit is None:
            continue
        limits.append(limit)
        available.append(max(0, limit - used))
    return CgroupMemory(limit=min(limits, default=None), available=min(available, default=None))


def cpu_quota(read: Read) -> float | None:
    """Cores' worth of CPU time this process may use, or ``None`` when there is no quota.

    Args:
        read: Returns a file's text, or ``None`` when it cannot be read.
    """
    quotas = [_quota_of(level, read) for level in _levels(read, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _memory_of(level: _Level, read: Read) -> tuple[int | None, int]:
    statistics = _statistics(read(f"{level.directory}/memory.stat"))
    if level.version == 2:
        limit = _integer(read(f"{level.directory}/memory.max"))
        usage = _integer(read(f"{level.directory}/memory.current"))
        cache = statistics.get("inactive_file", 0)
    else:
        # Levels above the mount point are invisible in a container; the kernel sums them up here.
        candidates = (
            _integer(read(f"{level.directory}/memory.limit_in_bytes")),
            statistics.get("hierarchical_memory_limit"),
        )
        limit = min((value for value in candidates if value is not None), default=None)
        usage = _integer(read(f"{level.directory}/memory.usage_in_bytes"))
        cache = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    if limit is not None and limit >= _NO_LIMIT:
        limit = None
    return limit, max(0, (usage or 0) - cache)


def _quota_of(level: _Level, read: Read) -> float | None:
    if level.version == 2:
        fields = (read(f"{level.directory}/cpu.max") or "").split()
        quota, period = [*fields, "", ""][:2]
    else:
        quota = read(f"{level.directory}/cpu.cfs_quota_us") or ""
        period = read(f"{level.directory}/cpu.cfs_period_us") or ""
    microseconds, window = _integer(quota), _integer(period)
    if microseconds is None or window is None or microseconds <= 0 or window <= 0:
        return None
    return microseconds / window


def _levels(read: Read, controller: str) -> Iterator[_Level]:
    """Directories that may limit this process, from its own group up to each mount point."""
    mounts = list(_mounts(read("/proc/self/mountinfo") or ""))
    for version, controllers, path in _memberships(read("/proc/self/cgroup") or ""):
        if version == 1 and controller not in controllers:
            continue
        for mount in mounts:
            if _VERSIONS[mount.kind] == version and (version == 2 or controller in mount.options):
                for directory in _upwards(mount, path):
                    yield _Level(version=version, directory=directory)


def _memberships(text: str) -> Iterator[tuple[Literal[1, 2], frozenset[str], str]]:
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        hierarchy, controllers, path = fields
        version: Literal[1, 2] = 2 if hierarchy == "0" and not controllers else 1
        yield version, frozenset(controllers.split(",")), path


def _mounts(text: str) -> Iterator[Mount]:
    parsed = (parse_mount(line) for line in text.splitlines())
    return (mount for mount in parsed if mount is not None and mount.kind in _VERSIONS)


def _upwards(mount: Mount, path: str) -> Iterable[str]:
    parts = _below(mount.root, path)
    for length in range(len(parts), -1, -1):
        yield "/".join([str(mount.point).rstrip("/"), *parts[:length]])


def _below(root: str, path: str) -> list[str]:
    """Names that lead from a mount's root to ``path``; none when ``path`` is not below it.

    A container whose group lies outside of what is mounted still sees its own limit at the mount
    point.
    """
    prefix = root.rstrip("/") + "/"
    if not (path + "/").startswith(prefix):
        return []
    parts = [part for part in path[len(prefix) :].split("/") if part]
    return [] if ".." in parts else parts


def _statistics(text: str | None) -> dict[str, int]:
    pairs = (line.split() for line in (text or "").splitlines())
    return {
        pair[0]: value
        for pair in pairs
        if len(pair) == 2 and (value := _integer(pair[1])) is not None
    }


def _integer(text: str | None) -> int | None:
    stripped = (text or "").strip()
    return int(stripped) if re.fullmatch(r"-?[0-9]{1,20}", stripped) else None
