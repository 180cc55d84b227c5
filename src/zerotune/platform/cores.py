"""Which cores a rank computes on: a pure choice from facts about the machine.

An optimizer on the CPU is bound by host memory, so a second thread on the same core adds nothing:
physical cores are counted. Ranks of one machine that may run on the same cores divide them,
without straddling a NUMA node where that can be had; each leaves some to its data workers.

Sources: the kernel's ``Documentation/ABI/stable/sysfs-devices-system-cpu`` and
``sysfs-devices-node``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence

import attrs

from zerotune.errors import InvalidValueError

Read = Callable[[str], "str | None"]


@attrs.frozen(kw_only=True, order=True)
class LogicalCpu:
    """One hardware thread; ordered by where it lies."""

    node: int
    """NUMA node; 0 where the system does not tell."""
    package: int
    """Socket."""
    core: int
    """Physical core within the socket; equal for siblings."""
    number: int
    """As ``sched_setaffinity`` counts them."""


@attrs.frozen(kw_only=True)
class CoreShare:
    """What one rank computes on."""

    threads: int
    """Of OpenMP, for the optimizer and for operators on the CPU."""
    cpus: tuple[int, ...] | None
    """Hardware threads to stay on, siblings included; ``None``: where the system puts it."""
    reason: str
    """One sentence with the numbers."""


def read_cpus(read: Read, numbers: Iterable[int]) -> tuple[LogicalCpu, ...]:
    """Where hardware threads lie; without sysfs each counts as a core of its own.

    Args:
        read: Returns a file's text, or ``None`` when it cannot be read.
        numbers: The hardware threads this process may run on.
    """
    online = parse_list(read("/sys/devices/system/node/online") or "")
    node_of = {
        number: node
        for node in online
        for number in parse_list(read(f"/sys/devices/system/node/node{node}/cpulist") or "")
    }
    return tuple(sorted(_logical_cpu(read, number, node_of.get(number, 0)) for number in numbers))


def affinity_here() -> frozenset[int]:
    """Numbers of the hardware threads this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def describe_cpus(cpus: Sequence[LogicalCpu], *, quota: float | None = None) -> str:
    """What a process may compute on, in words."""
    words = f"{len(_by_core(cpus))} physical core(s), {len(cpus)} hardware thread(s)"
    return words if quota is None else f"{words}, a container's limit of {quota:g} cores"


def parse_list(text: str) -> tuple[int, ...]:
    """The numbers of a kernel list, such as ``"0-3,8"``; what is not one is left out."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match:
            first = int(match.group(1))
            numbers.extend(range(first, int(match.group(2) or first) + 1))
    return tuple(numbers)


def share_cores(
    own: Sequence[LogicalCpu],
    *,
    affinities: Sequence[Collection[int]],
    rank: int,
    quota: float | None = None,
    workers: int = 0,
) -> CoreShare:
    """Divide physical cores over the ranks that may run on them.

    Args:
        own: What this rank may run on.
        affinities: Numbers of the hardware threads of every rank of this machine.
        rank: Which of them this is.
        quota: Cores' worth of time that a container allows all of them together.
        workers: Data workers of this rank; at most half of its cores is left to them.
    """
    if not own or not 0 <= rank < len(affinities):
        raise InvalidValueError(
            "needs the hardware threads of every rank of this machine, this one's included",
            key="affinities",
            value=len(affinities),
            fix="gather os.sched_getaffinity(0) from the ranks of this machine",
        )
    cores = _by_core(own)
    sharers = [index for index, cpus in enumerate(affinities) if set(cpus) & set(affinities[rank])]
    place, count = sharers.index(rank), len(sharers)
    mine = cores[place * len(cores) // count : (place + 1) * len(cores) // count]
    if len(cores) < count:
        mine = [cores[place % len(cores)]]
    allowed = len(mine)
    if quota is not None:
        # Rounded down: threads beyond the quota are throttled and slow the others.
        allowed = max(1, min(allowed, int(quota / len(affinities))))
    left = min(workers, allowed // 2)
    bound = 1 < count <= len(cores)
    reason = f"{len(cores)} physical core(s)"
    reason += f" shared by {count} ranks" if count > 1 else " for this rank"
    if quota is not None:
        reason += f", a container's limit of {quota:g} cores"
    if workers:
        reason += f", {left} left to {workers} data worker(s)"
    return CoreShare(
        threads=max(1, allowed - left),
        cpus=tuple(sorted(cpu.number for core in mine for cpu in core)) if bound else None,
        reason=reason,
    )


def _by_core(cpus: Iterable[LogicalCpu]) -> list[list[LogicalCpu]]:
    cores: dict[tuple[int, int, int], list[LogicalCpu]] = {}
    for cpu in sorted(cpus):
        cores.setdefault((cpu.node, cpu.package, cpu.core), []).append(cpu)
    return list(cores.values())


def _logical_cpu(read: Read, number: int, node: int) -> LogicalCpu:
    folder = f"/sys/devices/system/cpu/cpu{number}/topology"
    core = parse_list(read(f"{folder}/core_id") or "")
    package = parse_list(read(f"{folder}/physical_package_id") or "")
    if not core:
        # Numbers of cores are small; this one cannot meet a real one of the same socket.
        return LogicalCpu(node=node, package=-1, core=number, number=number)
    return LogicalCpu(node=node, package=package[0] if package else 0, core=core[0], number=number)
