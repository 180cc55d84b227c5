"""What kind of file system a folder lies on, and which kinds a swap file can be trusted to."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

MEMORY_FILESYSTEMS: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""Swapping to these moves bytes from RAM to RAM."""

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
"""Kinds that one kernel at a time mounts, so that a free lock there proves nobody holds it."""

_MOUNT_TABLE: Final = Path("/proc/self/mountinfo")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def filesystem_kind(path: Path, *, mount_table: Path = _MOUNT_TABLE) -> str | None:
    """Name of the file system that holds ``path`` (``"ext4"``, ``"tmpfs"``, ``"nfs4"``).

    Args:
        path: An existing folder, symlinks resolved.
        mount_table: Linux's table of mounts, as proc(5) describes ``mountinfo``.

    Returns:
        The kernel's name of the file system, or ``None`` where no mount table can be read
        (anything but Linux).
    """
    try:
        lines = mount_table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    kind, longest = None, -1
    for line in lines:
        mount = _parse_mount(line)
        # A later line hides an earlier one on the same folder, hence >=.
        if mount and path.is_relative_to(mount[0]) and len(mount[0].parts) >= longest:
            longest, kind = len(mount[0].parts), mount[1]
    return kind


def _parse_mount(line: str) -> tuple[Path, str] | None:
    """Mount point and kind out of one line of ``mountinfo``; ``None`` when it is not one."""
    before, separator, after = line.partition(" - ")
    fields, kind = before.split(" "), after.split(" ")[0]
    if not separator or len(fields) < 6 or not kind:
        return None
    return Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])), kind


def mount_identity(descriptor: int) -> tuple[int, str | None]:
    """Device and mount an open folder belongs to; differs on the other side of a mount.

    The mount id tells a bind mount of the same device apart, which the device number cannot.
    It is ``None`` outside Linux.
    """
    try:
        facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
    except OSError:
        facts = ""
    ids = [line.split()[1] for line in facts.splitlines() if line.startswith("mnt_id:")]
    return os.fstat(descriptor).st_dev, ids[0] if ids else None
