"""Choose the swap root and make sure it can be used, before anything is allocated."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from zerotune.decisions import Decision
from zerotune.errors import OffloadError
from zerotune.offload.filesystem import LOCAL_FILESYSTEMS, MEMORY_FILESYSTEMS, filesystem_kind

Target = Literal["param", "optimizer"]
"""What is swapped: parameters or optimizer states."""

ROOT_VARIABLE: Final = "ZEROTUNE_SWAP_ROOT"

_FIX: Final = "give a folder on a local disk that this user may write to"
_PROBE: Final = bytes(4096)
_LONGEST_PATH: Final = 4096
# "/zerotune-<28>/zero_stage_3/optimizer/rank<N>/<id>_gradient_<offset>_<length>.tensor.swp" with
# every number as long as a 64-bit integer can be (names in DeepSpeed 0.19.8, swap_tensor/).
_ROOM_FOR_SWAP_FILES: Final = 224


@attrs.frozen(kw_only=True)
class RootChoice:
    """A folder to swap to and who asked for it."""

    path: str
    """As given."""
    key: str
    """Setting it came from (``"OffloadManager.root"``)."""
    fallback: bool = False
    """Whether nobody asked for it, so that zerotune took the temporary folder."""


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
    decisions: tuple[Decision, ...] = ()
    """How it was chosen and what to know of its file system."""


def choose_root(
    target: Target,
    *,
    arguments: Mapping[Target, str | None],
    plan_paths: Mapping[str, str | None],
    environ: Mapping[str, str],
) -> RootChoice:
    """Where ``target`` is swapped to: argument, else plan, else environment, else temporary.

    Optimizer states go where parameters go unless something names a folder of their own.

    Args:
        target: What is swapped.
        arguments: ``OffloadManager``'s ``root`` (``"param"``) and ``optimizer_root``.
        plan_paths: The plan's NVMe paths; blank and ``"none"`` (which launchers write for a
            missing path) count as not given.
        environ: Environment variables.
    """
    names: dict[Target, str] = {"param": "root", "optimizer": "optimizer_root"}
    order: tuple[Target, ...] = ("param",) if target == "param" else ("optimizer", "param")
    for name in order:
        argument = arguments.get(name)
        if argument is not None:
            return RootChoice(path=argument, key=f"OffloadManager.{names[name]}")
    for name in dict.fromkeys((target, "param", "optimizer")):
        path = (plan_paths.get(name) or "").strip()
        if path and path.lower() != "none":
            return RootChoice(path=path, key=f"zero_optimization.offload_{name}.nvme_path")
    if environ.get(ROOT_VARIABLE):
        return RootChoice(path=environ[ROOT_VARIABLE], key=ROOT_VARIABLE)
    return RootChoice(path=_temporary_root(), key="offload.root", fallback=True)


def _temporary_root() -> str:
    try:
        # The user's id keeps two users of one machine out of each other's folder.
        return str(Path(tempfile.gettempdir()) / f"zerotune-swap-{os.getuid()}")
    except FileNotFoundError as error:
        raise OffloadError(
            "no swap root was given and no temporary folder can be written",
            key="OffloadManager.root",
            fix=_FIX,
        ) from error


def check_root(choice: RootChoice) -> SwapRoot:
    """Make the folder if needed and prove that swap files can be written to it.

    Raises:
        OffloadError: It cannot be made, is no folder, cannot be written, is full, or its path
            leaves no room for the names of swap files.
    """
    try:
        path = _make(choice)
        _write_probe(path)
        space = os.statvfs(path)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OffloadError):
            raise
        # RuntimeError: a loop of symlinks (before Python 3.13); ValueError: a NUL in the path.
        raise _unusable(choice, f"cannot be used ({_say(error)})") from error
    kind = filesystem_kind(path)
    free = space.f_bavail * space.f_frsize
    return SwapRoot(
        path=path,
        filesystem=kind,
        free_bytes=free,
        free_inodes=space.f_favail,
        decisions=(_chosen(choice, path, kind, free), *_remarks(path, kind)),
    )


def _make(choice: RootChoice) -> Path:
    given = Path(choice.path).expanduser()
    if given.is_symlink() and not given.exists():
        raise _unusable(choice, "is a symbolic link to nothing; is its disk mounted?")
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
    probe = path / f".zerotune-probe-{secrets.token_hex(6)}"
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
    if choice.fallback:
        reason = (
            f"nothing names a swap root (argument root, nvme_path, {ROOT_VARIABLE}), so the "
            "temporary folder is used"
        )
    return Decision(
        key="offload.root",
        before=None if choice.fallback else choice.path,
        after=str(path),
        reason=f"{reason}; {kind or 'unknown file system'}, {gibibytes(free)} free",
        severity="warning" if choice.fallback else "note",
    )


def _remarks(path: Path, kind: str | None) -> tuple[Decision, ...]:
    if kind in MEMORY_FILESYSTEMS:
        reason = f"{kind} lives in RAM, so swapping to it frees no memory"
    elif kind == "overlay":
        reason = (
            "overlay is a container's writable layer: it may be slow, small, or kept in RAM; "
            "mount a volume of a local disk"
        )
    elif kind is not None and kind not in LOCAL_FILESYSTEMS:
        reason = (
            f"{kind} is not known as a local file system: its locks may not reach other "
            "machines, so give each machine a root of its own"
        )
    else:
        return ()
    return (
        Decision(
            key="offload.filesystem",
            before=None,
            after=str(path),
            reason=reason,
            severity="warning",
        ),
    )


def _unusable(choice: RootChoice, reason: str) -> OffloadError:
    return OffloadError(reason, key=choice.key, value=choice.path, fix=_FIX)


def _say(error: Exception) -> Any:
    return getattr(error, "strerror", None) or error


def gibibytes(count: int) -> str:
    """Bytes as a short text for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
