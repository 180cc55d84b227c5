"""Make sure a swap root can be used, before anything is allocated."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.proc import filesystem_kind, is_rotational, locality_of
from zerotune._util.text import disk_size
from zerotune.decisions import Decision, Severity
from zerotune.errors import OffloadError
from zerotune.offload.choosing import FIX, PATH_VARIABLES, ROOT_VARIABLE, RootChoice
from zerotune.offload.lease import making_in

PROBE_PREFIX: Final = ".zerotune-probe-"
"""Of a file that is written for a moment; its maker holds the root meanwhile."""
BENCH_PREFIX: Final = ".zerotune-bench-"
"""The same, of a folder that lasts as long as a measurement."""

_PROBE: Final = bytes(4096)
_LONGEST_PATH: Final = 4096
# "/zerotune-<28>/zero_stage_3/optimizer/rank<N>/<id>_gradient_<offset>_<length>.tensor.swp" with
# every number as long as a 64-bit integer can be (names in DeepSpeed 0.19.8, swap_tensor/).
_ROOM_FOR_SWAP_FILES: Final = 224


@attrs.frozen(kw_only=True)
class SwapRoot:
    """A swap root that exists and was really written to."""

    path: Path
    """Absolute, symlinks resolved."""
    filesystem: str | None
    """Kernel's name of its file system; ``None`` outside Linux."""
    free_bytes: int
    """Bytes an unprivileged user may still write."""
    free_inodes: int
    """Files that can still be made; 0 where the file system does not count them."""
    rotational: bool | None = None
    """Whether it lies on spinning platters; ``None``: not known."""
    decisions: tuple[Decision, ...] = ()
    """How it was chosen and what to know of its file system."""


def check_root(choice: RootChoice) -> SwapRoot:
    """Make the folder if needed and prove that swap files can be written to it.

    Raises:
        OffloadError: It cannot be made, is no folder, is a symbolic link, cannot be written, is
            full, or its path leaves no room for the names of swap files.
    """
    try:
        path = _make(choice)
        with making_in(path):
            _write_probe(path)
        space = os.statvfs(path)
        facts = path.stat()
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OffloadError):
            raise
        # RuntimeError: a loop of symlinks (before Python 3.13); ValueError: a NUL in the path.
        raise _unusable(choice, f"cannot be used ({_say(error)})") from error
    kind, rotational = filesystem_kind(path), is_rotational(path)
    free = space.f_bavail * space.f_frsize
    remarks = (_on_filesystem(kind), _on_disk(rotational), _on_owner(facts))
    return SwapRoot(
        path=path,
        filesystem=kind,
        free_bytes=free,
        free_inodes=space.f_favail,
        rotational=rotational,
        decisions=(
            _chosen(choice, path, kind, free),
            *(_remark(path, *remark) for remark in remarks if remark),
        ),
    )


def _make(choice: RootChoice) -> Path:
    given = Path(choice.path).expanduser()
    if given.is_symlink():
        raise _linked(choice, given)
    if given.exists() and not given.is_dir():
        raise _unusable(choice, "is a file, not a folder")
    path = given.resolve()
    _check_length(path, choice)
    given.mkdir(parents=True, exist_ok=True, mode=0o700 if choice.fallback else 0o777)
    if choice.fallback:
        # Anybody may have made this name in a shared temporary folder.
        facts = given.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
            raise _unusable(choice, "belongs to somebody else")
    return path


def _linked(choice: RootChoice, given: Path) -> OffloadError:
    target = given.readlink()
    if not given.exists():
        reason, fix = "is a symbolic link to nothing; is its disk mounted?", FIX
    else:
        # Whoever may change the link could move the next run's clean-up to any folder.
        reason = f"is a symbolic link (to {target}), and a swap root must be the folder itself"
        fix = f"give {given.resolve()}"
    return OffloadError(reason, key=choice.key, value=choice.path, fix=fix)


def _check_length(path: Path, choice: RootChoice) -> None:
    length = len(os.fsencode(path)) + _ROOM_FOR_SWAP_FILES
    if length > _LONGEST_PATH:
        raise _unusable(
            choice,
            f"is too long: the swap files inside would have paths of {length} bytes, and the "
            f"system takes {_LONGEST_PATH}",
        )


def _write_probe(path: Path) -> None:
    # Permission bits do not tell: root passes them, read-only mounts and quotas ignore them.
    probe = path / f"{PROBE_PREFIX}{secrets.token_hex(6)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(probe, flags, 0o600)
    try:
        if os.write(descriptor, _PROBE) != len(_PROBE):
            raise OSError("only part of a 4096-byte probe could be written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        probe.unlink()


def _chosen(choice: RootChoice, path: Path, kind: str | None, free: int) -> Decision:
    reason = f"taken from {choice.key}"
    if choice.passed_over:
        reason = f"{reason}, which comes before {' and '.join(choice.passed_over)}"
    if choice.fallback:
        asked = ", ".join((ROOT_VARIABLE, *PATH_VARIABLES.values()))
        reason = (
            f"nothing names a swap root (argument root, offload_param_path, nvme_path, {asked}), "
            "so the temporary folder is used"
        )
    return Decision(
        key="offload.root",
        before=None if choice.fallback else choice.path,
        after=str(path),
        reason=f"{reason}; {kind or 'unknown file system'}, {disk_size(free)} free",
        severity="warning" if choice.fallback else "note",
    )


def _remark(path: Path, key: str, reason: str, severity: Severity = "warning") -> Decision:
    return Decision(key=key, before=None, after=str(path), reason=reason, severity=severity)


def _on_filesystem(kind: str | None) -> tuple[str, str] | None:
    locality = locality_of(kind)
    if locality == "memory":
        return "offload.filesystem", f"{kind} lives in RAM, so swapping to it frees no memory"
    if locality == "overlay":
        return "offload.filesystem", (
            "overlay is a container's writable layer: it may be slow, small, or kept in RAM; "
            "mount a volume of a local disk"
        )
    if locality == "network":
        return "offload.filesystem", (
            f"{kind} is a shared file system: its locks may not reach other machines, so nothing "
            "of theirs is ever cleaned up here; give each machine a root of its own"
        )
    if locality == "unknown" and kind is not None:
        return "offload.filesystem", (
            f"{kind} is not known as a local file system: its locks may not reach other "
            "machines, so give each machine a root of its own"
        )
    return None


def _on_disk(rotational: bool | None) -> tuple[str, str] | None:
    if not rotational:
        return None
    return "offload.disk", (
        "this disk has spinning platters, and a step reads and writes tens of bytes per "
        "parameter; DeepSpeed's `ds_nvme_tune` measures what it can do"
    )


def _on_owner(facts: os.stat_result) -> tuple[str, str] | None:
    if facts.st_uid not in (os.getuid(), 0):
        return "offload.owner", f"belongs to user {facts.st_uid}, who may delete what is inside"
    if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
        return "offload.owner", (
            "other users may write here and so delete this run's folder; chmod +t keeps them off"
        )
    return None


def _unusable(choice: RootChoice, reason: str) -> OffloadError:
    return OffloadError(reason, key=choice.key, value=choice.path, fix=FIX)


def _say(error: Exception) -> Any:
    return getattr(error, "strerror", None) or error
