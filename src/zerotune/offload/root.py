"""Choose and check a run's swap root."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import attrs

from zerotune._util.proc import filesystem_kind, locality_of
from zerotune._util.text import format_size
from zerotune.decisions import Decision
from zerotune.errors import OffloadError

if TYPE_CHECKING:
    from zerotune.plan.plan import ResolvedPlan

Target = Literal["param", "optimizer"]
"""Kind of swapped data: parameters or optimizer states."""

ROOT_VARIABLE: Final = "ZEROTUNE_SWAP_ROOT"
PATH_VARIABLES: Final[Mapping[Target, str]] = {
    "param": "ZEROTUNE_OFFLOAD_PARAM_PATH",
    "optimizer": "ZEROTUNE_OFFLOAD_OPTIMIZER_PATH",
}
_FIX: Final = "use a folder on a local disk that this user may write to"


def _as_text(path: str | os.PathLike[str] | None) -> str | None:
    text = None if path is None else os.fspath(path)
    if text is not None and not text.strip():
        # As with an unset variable: the swap files would silently go to the temporary folder.
        raise OffloadError("is blank", f"{_FIX}, or omit it", "OffloadManager.root", text)
    return text


@attrs.frozen(kw_only=True)
class Roots:
    """Paths that were passed to ``OffloadManager``; ``None`` for a missing path."""

    root: str | None = attrs.field(default=None, converter=_as_text)
    param: str | None = attrs.field(default=None, converter=_as_text)
    optimizer: str | None = attrs.field(default=None, converter=_as_text)

    def _named(
        self, target: Target, resolved: ResolvedPlan, environ: Mapping[str, str]
    ) -> Iterator[tuple[str, str | None, bool]]:
        """Yield settings, their paths and whether they apply to ``target``; the first path wins."""
        order: tuple[Target, ...] = (target,) if target == "param" else ("optimizer", "param")
        # A setting for no target ranks between this target's own setting and the other's.
        levels = (target, None, *order[1:])
        for part in levels:
            if part is None:
                yield "OffloadManager.root", self.root, True
            else:
                path = getattr(self, part)
                yield f"OffloadManager.offload_{part}_path", path, part == target
        launch = resolved.requested.launch
        for part in order:
            path = getattr(launch, f"offload_{part}_path", None)
            yield f"offload_{part}_path", path, part == target
        for part in dict.fromkeys((target, "param", "optimizer")):
            key = f"zero_optimization.offload_{part}.nvme_path"
            yield key, resolved.nvme_paths.get(part), part == target
        for part in levels:
            name = ROOT_VARIABLE if part is None else PATH_VARIABLES[part]
            yield name, environ.get(name), part in (None, target)


@attrs.frozen(kw_only=True)
class RootChoice:
    """A chosen swap root, and how it was chosen."""

    path: str
    """The path as the user wrote it."""
    key: str
    """Name of the setting that contains the path, such as ``"OffloadManager.root"``."""
    fallback: bool = False
    """Whether zerotune chose a temporary folder because no setting names a root."""
    passed_over: tuple[str, ...] = ()
    """Overridden settings, each as ``setting = path``."""

    def _make(self) -> Path:
        given = Path(self.path).expanduser()
        if given.is_symlink():
            if not given.exists():
                raise self._unusable(
                    "is a symbolic link to a missing target, whose disk may not be mounted"
                )
            # A user who may change the link could point the next run's clean-up at any folder.
            raise self._unusable(
                f"is a symbolic link (to {given.readlink()}), but a swap root must be a folder",
                fix=f"write the path of the folder, {given.resolve()}",
            )
        if given.exists() and not given.is_dir():
            raise self._unusable("is a file, not a folder")
        path = given.resolve()
        length = len(os.fsencode(path)) + _ROOM_FOR_SWAP_FILES
        if length > _MOST_PATH_BYTES:
            raise self._unusable(
                f"is too long: the paths of swap files would have {length} bytes, but the "
                f"system allows {_MOST_PATH_BYTES}"
            )
        given.mkdir(parents=True, exist_ok=True, mode=0o700 if self.fallback else 0o777)
        if self.fallback:
            # In a shared temporary folder, another user may have created this name.
            facts = given.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
                raise self._unusable("belongs to another user")
        return path

    def _made(self, path: Path, kind: str | None, free: int) -> Decision:
        reason = f"taken from {self.key}"
        if self.passed_over:
            reason = f"{reason}, which overrides {' and '.join(self.passed_over)}"
        if self.fallback:
            asked = ", ".join((ROOT_VARIABLE, *PATH_VARIABLES.values()))
            reason = (
                "no swap root is set (argument root, offload_param_path, nvme_path, "
                f"{asked}), so a temporary folder is used"
            )
        return Decision(
            "offload.root",
            None if self.fallback else self.path,
            str(path),
            f"{reason}; {kind or 'unknown file system'}, {format_size(free)} free",
            "warning" if self.fallback else "note",
        )

    def _unusable(self, reason: str, *, fix: str = _FIX) -> OffloadError:
        return OffloadError(reason, fix, self.key, self.path)


def choose_root(
    target: Target, *, arguments: Roots, resolved: ResolvedPlan, environ: Mapping[str, str]
) -> RootChoice:
    """Choose a swap root from arguments, configuration and environment, or use a temporary folder.

    If no setting names a root for optimizer states, they use the root for parameters. A blank path
    counts as missing, and so does ``"none"``, which launchers write for a missing path.

    Args:
        target: Kind of swapped data.
        arguments: Paths that were passed to ``OffloadManager``.
        resolved: The plan. ``offload_param_path`` in the trainer's configuration overrides
            DeepSpeed's ``nvme_path``.
        environ: Environment variables.
    """
    named = [
        (key, path, speaks_of_target)
        for key, path, speaks_of_target in arguments._named(target, resolved, environ)
        if path is not None and path.strip() and path.strip().lower() != "none"
    ]
    if not named:
        try:
            # The user's id keeps two users of one machine out of each other's folder.
            path = str(Path(tempfile.gettempdir()) / f"zerotune-swap-{os.getuid()}")
        except FileNotFoundError as error:
            raise OffloadError(
                "no swap root is set, and no temporary folder is writable",
                _FIX,
                "OffloadManager.root",
            ) from error
        return RootChoice(path=path, key="offload.root", fallback=True)
    key, path, _ = named[0]
    others = (
        f"{k} = {p}" for k, p, speaks_of_target in named[1:] if speaks_of_target and p != path
    )
    return RootChoice(path=path, key=key, passed_over=tuple(others))


# -- Whether a root can be used.

_MOST_PATH_BYTES: Final = 4096
# "/zerotune-<28>/zero_stage_3/optimizer/rank<N>/<id>_gradient_<offset>_<length>.tensor.swp" with
# every number as long as a 64-bit integer can be (names in DeepSpeed 0.19.8, swap_tensor/).
_ROOM_FOR_SWAP_FILES: Final = 224


@attrs.frozen(kw_only=True)
class SwapRoot:
    """A swap root that exists and is writable."""

    path: Path
    """Absolute path without symbolic links."""
    filesystem: str | None
    """Type of the file system, as named by the kernel; ``None`` outside Linux."""
    decisions: tuple[Decision, ...] = ()
    """Decisions about the choice of the root and about its file system."""


def check_root(choice: RootChoice) -> SwapRoot:
    """Create the root if it is missing, and verify that swap files can be written to it."""
    try:
        path = choice._make()
        _write_probe(path)
        space = os.statvfs(path)
        facts = path.stat()
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OffloadError):
            raise
        # RuntimeError: a loop of symlinks (before Python 3.13); ValueError: a NUL in the path.
        reason = getattr(error, "strerror", None) or error
        raise choice._unusable(f"cannot be used ({reason})") from error
    kind = filesystem_kind(path)
    free = space.f_bavail * space.f_frsize
    remarks: dict[str, str | None] = {
        "offload.filesystem": _about_filesystem(kind),
        "offload.owner": _about_owner(facts),
    }
    return SwapRoot(
        path=path,
        filesystem=kind,
        decisions=(
            choice._made(path, kind, free),
            *(
                Decision(key, None, str(path), reason, "warning")
                for key, reason in remarks.items()
                if reason is not None
            ),
        ),
    )


def _write_probe(path: Path) -> None:
    # Permission bits prove nothing: root bypasses them, read-only mounts and quotas ignore them.
    with tempfile.TemporaryFile(dir=path, buffering=0) as probe:
        if probe.write(bytes(4096)) != 4096:
            raise OSError("only part of a 4096-byte probe could be written")
        os.fsync(probe.fileno())


def _about_filesystem(kind: str | None) -> str | None:
    return {
        "memory": f"{kind} stores its files in RAM, so swapping frees no memory; use a root on a "
        "disk",
        "overlay": "overlay is a container's writable layer, which may be slow, small, or stored "
        "in RAM; mount a local disk as a volume",
        "network": f"{kind} is a shared file system, and other machines may not see its locks, so "
        "this machine never cleans up other machines' files; use a separate root for each machine",
        "unknown": kind
        and f"{kind} may not be a local file system, and other machines may not see its locks; "
        "use a separate root for each machine",
    }.get(locality_of(kind))


def _about_owner(facts: os.stat_result) -> str | None:
    if facts.st_uid not in (os.getuid(), 0):
        return f"belongs to user {facts.st_uid}, who may delete its contents"
    if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
        return (
            "other users may write to this root and could delete this run's folder; set the "
            "sticky bit with chmod +t"
        )
    return None
