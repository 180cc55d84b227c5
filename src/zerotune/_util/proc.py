"""Facts about file systems, processes, environment variables and installed packages."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import attrs

MEMORY_FILESYSTEMS: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems in RAM: swapping to them only moves bytes within RAM."""

LOCAL_FILESYSTEMS: Final = MEMORY_FILESYSTEMS | {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "f2fs",
    "zfs",
    "bcachefs",
    "overlay",
}
"""File systems that one kernel at a time mounts, where a free lock proves that it has no holder."""

NETWORK_FILESYSTEMS: Final = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "ceph",
        "glusterfs",
        "gpfs",
        "beegfs",
        "afs",
        "9p",
        "virtiofs",
        "ocfs2",
        "gfs2",
        "orangefs",
        "pvfs2",
        "wekafs",
    }
)
"""File systems that several machines may share; kinds that begin with ``fuse`` also count."""

Locality = Literal["local", "memory", "overlay", "network", "unknown"]

_MOUNT_TABLE: Final = Path("/proc/self/mountinfo")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


CAP_IPC_LOCK: Final = 14
"""Number of the capability to lock any amount of memory (``linux/capability.h``)."""


def status_field(status: str, name: str) -> str | None:
    """Return the first word of a field of ``/proc/PID/status``; ``None`` if it is missing.

    Args:
        status: Text of the file.
        name: Name of the field, such as ``"VmHWM"`` (in kilobytes).
    """
    found = re.search(rf"^{name}:[ \t]*(\S+)", status, re.MULTILINE)
    return None if found is None else found.group(1)


def has_capability(status: str, bit: int) -> bool:
    """Return whether the effective capabilities of a process include ``bit``.

    Args:
        status: Text of the process's ``/proc/PID/status``.
        bit: Number of the capability.
    """
    held = status_field(status, "CapEff") or ""
    return re.fullmatch("[0-9a-f]+", held) is not None and bool(int(held, 16) >> bit & 1)


@attrs.frozen(kw_only=True)
class Mount:
    """File system that contains a folder."""

    kind: str
    """The kernel's name (``"ext4"``, ``"tmpfs"``, ``"nfs4"``)."""
    point: Path
    """Mount point."""
    root: str = "/"
    """Folder of the file system that is mounted."""


def locality_of(kind: str | None) -> Locality:
    """Return the locality of a kind of file system; ``"unknown"`` for an unlisted kind."""
    if kind is None:
        return "unknown"
    if kind in MEMORY_FILESYSTEMS:
        return "memory"
    if kind == "overlay":
        return "overlay"
    if kind in NETWORK_FILESYSTEMS or kind.startswith("fuse"):
        return "network"
    return "local" if kind in LOCAL_FILESYSTEMS else "unknown"


def mount_of(path: Path, *, mount_table: Path = _MOUNT_TABLE) -> Mount | None:
    """Return the file system that contains ``path``.

    Args:
        path: An existing folder, symlinks resolved.
        mount_table: Linux's mount table, in the format of ``mountinfo`` in proc(5).

    Returns:
        The mount; ``None`` if no mount table can be read (outside Linux).
    """
    try:
        lines = mount_table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    found: Mount | None = None
    for line in lines:
        mount = parse_mount(line)
        if mount is None or not path.is_relative_to(mount.point):
            continue
        # A later line hides an earlier one on the same folder, hence >=.
        if found is None or len(mount.point.parts) >= len(found.point.parts):
            found = mount
    return found


def filesystem_kind(path: Path, *, mount_table: Path = _MOUNT_TABLE) -> str | None:
    """Return the kind of the file system that contains ``path``, as found by ``mount_of``."""
    mount = mount_of(path, mount_table=mount_table)
    return None if mount is None else mount.kind


def parse_mount(line: str) -> Mount | None:
    """Parse a line of ``/proc/self/mountinfo``; return ``None`` for an invalid line."""
    before, separator, after = line.partition(" - ")
    fields, details = before.split(" "), after.split(" ")
    if not separator or len(fields) < 6 or not details[0]:
        return None
    return Mount(
        kind=details[0],
        point=Path(_unescape(fields[4])),
        root=_unescape(fields[3]),
    )


def _unescape(field: str) -> str:
    """Undo the octal escapes: a space is written as a backslash and 040."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def mount_identity(descriptor: int) -> tuple[int, str | None]:
    """Return device number and mount id of an open folder, which together identify its mount.

    The mount id distinguishes bind mounts of the same device, which share a device number. It is
    ``None`` outside Linux.
    """
    try:
        facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
    except OSError:
        facts = ""
    ids = [line.split()[1] for line in facts.splitlines() if line.startswith("mnt_id:")]
    return os.fstat(descriptor).st_dev, ids[0] if ids else None


# -- Identity of processes.


ENDED = "has ended"
"""Condition of a process that no longer runs."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


@attrs.frozen(kw_only=True)
class ProcessIdentity:
    """Identity of a process, distinct from that of a later process with the same id."""

    host: str
    """Host name."""
    boot_id: str | None
    """The kernel's id of this boot; ``None`` outside Linux."""
    pid: int
    """Process id, as seen in the process's own namespace."""
    pid_start: int | None
    """Start of the process in clock ticks since boot; ``None`` outside Linux."""
    pid_namespace: int | None = None
    """The kernel's number of the namespace of ``pid``; ``None`` outside Linux."""

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return the identity of the calling process."""
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
        """Return whether the process belongs to the current boot of this machine."""
        return self.boot_id is not None and self.boot_id == boot_id()

    def visible(self) -> bool:
        """Return whether this process can see it: same boot and same namespace of process ids."""
        return self.same_boot() and self.pid_namespace in (None, _pid_namespace())

    def alive(self) -> bool:
        """Return whether it still runs, as far as this process can see; a zombie does not."""
        state = _state_and_start(self.pid) if self.same_boot() else None
        return state is not None and state[0] not in "ZX" and state[1] == self.pid_start

    def condition(self) -> str | None:
        """Return ``"has ended"`` or ``"is stopped"``; ``None`` if it runs or is not visible."""
        if not self.visible():
            return None
        if not self.alive():
            return ENDED
        state = _state_and_start(self.pid)
        return "is stopped" if state is not None and state[0] in "Tt" else None


def boot_id() -> str | None:
    """Return the kernel's id of this boot, or ``None`` outside Linux."""
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
    """Return state letter and start ticks of a process (fields 3 and 22 of ``stat``, proc(5))."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command name is in parentheses and may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


# -- Environment variables of this process.


_held_variables: dict[str, tuple[int, str | None]] = {}
"""Number of blocks that hold each variable, and its value before the first of them."""


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Set (or, with ``None``, unset) environment variables inside the block only."""
    before = {name: os.environ.get(name) for name in variables}
    _set_variables(variables)
    try:
        yield
    finally:
        _set_variables(before)


class held:  # noqa: N801 - used like the function above
    """Set an environment variable until the last of several overlapping blocks ends.

    Two engines of one process need the same variable and may end in any order, so the first to end
    must leave it to the other. The class is not a generator, because an unfinished generator would
    run at interpreter shutdown, when this module is gone; a block that is never left restores
    nothing.
    """

    def __init__(self, name: str, value: str) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        holders, before = _held_variables.get(self._name, (0, os.environ.get(self._name)))
        _held_variables[self._name] = (holders + 1, before)
        os.environ[self._name] = self._value

    def __exit__(self, *_error: object) -> None:
        holders, before = _held_variables.pop(self._name)
        if holders > 1:
            _held_variables[self._name] = (holders - 1, before)
        else:
            _set_variables({self._name: before})


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def return_freed_memory() -> None:
    """Let glibc return freed blocks to the system, which it otherwise keeps for reuse."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's names for ``mallopt``."""


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks for reuse until ``return_freed_memory`` is called.

    By default, glibc returns the memory of large blocks at once, and the next pass touches the same
    pages anew: 5,000 page faults in every step of a small U-Net, or 5 % of its time.
    """
    if sys.platform == "linux":
        option = getattr(ctypes.CDLL(None), "mallopt", None)
        if option is not None:
            # The largest value; larger blocks are still returned.
            option(_MMAP_THRESHOLD, 32 * 2**20)
            option(_TRIM_THRESHOLD, 2**31 - 1)


def return_large_blocks() -> None:
    """Let glibc return blocks of 1 MiB and more to the system when they are freed.

    By default, it soon keeps blocks of up to 32 MiB. Long-lived blocks that are allocated between
    them, such as an optimizer's states, then keep them from being joined: updating the weights of
    SDXL one after the other took 2.6 bytes of memory per weight.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if option is not None:
        option(_MMAP_THRESHOLD, 2**20)


# -- Versions of installed packages. The import is late, because it is slower than all others here.


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or ``None``; never import it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those ``distributions`` that are installed."""
    found = {name: installed_version(name) for name in distributions}
    return {name: version for name, version in found.items() if version is not None}
