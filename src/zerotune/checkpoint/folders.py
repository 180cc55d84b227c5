"""Names and locks of checkpoint and export folders.

A checkpoint is written as ``<name>.tmp-<id>`` and renamed when it is complete. An existing
checkpoint of the same name is first renamed to ``<name>.old-<id>`` and deleted last. While a
checkpoint is replaced, a complete one always exists under one of these three names;
``find_checkpoint`` checks all of them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Final

import attrs
from typing_extensions import override

from zerotune._util import ownership
from zerotune._util.closing import Closable
from zerotune._util.files import exchange, of_system, open_regular, sync, system_errors
from zerotune._util.ownership import OwnerRecord, new_run_id, try_lock
from zerotune._util.proc import ProcessIdentity, filesystem_kind
from zerotune._util.text import format_size, json_of, listing
from zerotune.backend.stored import read_header
from zerotune.checkpoint.manifest import MANIFEST, FileRecord, Manifest
from zerotune.checkpoint.tensors import hash_of
from zerotune.decisions import Decision, Severity
from zerotune.errors import CheckpointCorruptError, CheckpointError

logger = logging.getLogger("zerotune")

_NUMBERED: Final = re.compile(r"(?:step|checkpoint)[-_](\d+)", re.ASCII)
"""Names of checkpoints that ``prune`` may delete."""
_LEFTOVER: Final = re.compile(r"(.+)\.(tmp|old|trash)-([0-9a-f]{12})", re.ASCII)
_SAVED_FILE: Final = re.compile(
    r"(weights|optimizer\..+|shadow\..+|rank)-\d{5}-of-\d{5}\.safetensors", re.ASCII
)
"""Names of the files that saving creates, whether or not a manifest lists them."""
_MARK_ENTRY: Final = "zerotune"
"""Metadata key of an export's mark in a safetensors header."""
_FREE_MARGIN: Final = 2**24
"""Bytes to leave free for the file system's own bookkeeping."""


def step_folder(root: str | os.PathLike[str], step: int) -> Path:
    """Return the checkpoint folder of an optimizer step, such as ``<root>/step-00001234``.

    Args:
        root: Folder that contains the run's checkpoints.
        step: Number of optimizer steps taken.
    """
    return Path(root) / f"step-{step:08d}"


def checked_path(directory: str | os.PathLike[str]) -> Path:
    """Return the absolute path, or raise an error if the path is not valid for a checkpoint."""
    path = Path(os.path.abspath(directory))  # noqa: PTH100 - Path.absolute keeps "..".
    with system_errors(CheckpointError, path, "cannot be the name of a checkpoint"):
        linked = path.is_symlink()
    if linked:
        raise CheckpointError(
            "is a symbolic link, but a checkpoint must be a folder",
            f"pass the folder that the link points to, {os.path.realpath(path)}",
            str(path),
        )
    if not path.name or "\0" in str(path) or _LEFTOVER.fullmatch(path.name):
        raise CheckpointError(
            "cannot be the name of a checkpoint", "choose a different name", str(path)
        )
    return path


class Staging:
    """A folder with a temporary name that will become the checkpoint ``final``.

    The creator locks the folder. To other processes, an unlocked temporary folder is the leftover
    of a killed process.
    """

    def __init__(self, final: Path) -> None:
        self._check(final)
        self._final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        self.path = _temporary_name(final, "tmp")
        self.path.mkdir()
        self._lock = _lock_folder(self.path)

    def publish(self) -> None:
        """Rename the folder to its final name, and then delete the previous checkpoint."""
        sync(self.path)
        former = self._take_place()
        sync(self._final.parent)
        self._release()
        if former is not None:
            _retire(former, self._final)
        remove_leftovers(self._final.parent, name=self._final.name)

    def abandon(self) -> None:
        """Delete the folder and everything in it."""
        self._release()
        if self.path.exists():
            _remove(self.path)

    def _check(self, final: Path) -> None:
        if not final.exists():
            return
        if not final.is_dir() or (any(final.iterdir()) and not (final / MANIFEST).is_file()):
            raise CheckpointError(
                "exists and is not a checkpoint, so it is not overwritten",
                "choose a different folder, or remove this one yourself",
                str(final),
            )

    def _take_place(self) -> Path | None:
        """Take the final name, and return the new path of a folder that had it before."""
        former = _temporary_name(self._final, "old") if self._final.exists() else None
        if former is not None:
            self._final.rename(former)
        self.path.rename(self._final)
        return former

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class ExportStaging(Staging):
    """A folder with a temporary name that will become the export ``final``.

    If the file system can exchange two folders atomically, the new export replaces the old export
    in one operation. Readers then always find an export under its final name.
    """

    @override
    def _check(self, final: Path) -> None:
        check_replaceable(final)

    @override
    def _take_place(self) -> Path | None:
        if not self._final.exists():
            return super()._take_place()
        former = _temporary_name(self._final, "old")
        # Rename first: if a kill follows the exchange, the former folder then has its .old name.
        self.path.rename(former)
        try:
            exchange(former, self._final)
        except OSError:
            former.rename(self.path)
            return super()._take_place()
        return former


def check_space(folder: Path, nbytes: int) -> None:
    """Check that ``nbytes`` more bytes fit on the disk that contains ``folder``."""
    free = shutil.disk_usage(folder).free
    if free < nbytes + _FREE_MARGIN:
        raise CheckpointError(
            f"needs {format_size(nbytes)} of disk space, but only {format_size(free)} are free",
            "free disk space, keep fewer checkpoints (prune), or save to a different disk",
            str(folder),
        )


def find_checkpoint(directory: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    """Return a checkpoint's folder and its manifest.

    The folder is usually ``directory`` itself. If a process was killed while replacing the
    checkpoint, the newest complete checkpoint under a temporary name is returned.
    """
    path = checked_path(directory)
    if (located := _located(path)) is not None:
        return located
    fix = "pass the folder of one checkpoint, such as <root>/step-00001234"
    if path.is_dir() and ((path / "latest").exists() or any(path.glob("*zero_pp_rank*"))):
        fix = "convert DeepSpeed's checkpoint with the recipe convert.py (docs/recipes.md)"
    elif path.is_dir() and (newest := latest_checkpoint(path)) is not None:
        fix = f"did you mean {newest}?"
    raise CheckpointError(f"is not a checkpoint (contains no {MANIFEST})", fix, str(path))


def _located(path: Path) -> tuple[Path, Manifest] | None:
    """Find like ``find_checkpoint``; return ``None`` if something else has that name."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return None
        (path / MANIFEST).lstat()
        return path, Manifest.read(path)
    except (FileNotFoundError, NotADirectoryError):
        if path.exists():
            return None
    except OSError as error:
        raise CheckpointCorruptError(
            f"cannot be read ({error.strerror})", "use a different checkpoint", str(path)
        ) from error
    beside = _leftovers(path.parent, name=path.name, kinds=("tmp", "old"))
    for sibling in sorted(beside, key=_manifest_time, reverse=True):
        if (manifest := _whole_manifest(sibling)) is not None:
            logger.warning("%s was not completely saved; using %s instead", path, sibling)
            return sibling, manifest
    raise CheckpointError(
        "does not exist",
        "use an existing checkpoint; latest_checkpoint(root) finds the newest in a folder",
        str(path),
    )


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in ``root`` with the largest number of steps.

    The manifest gives the number; the folder may have any name. Of several checkpoints of a step,
    the newest is returned. A checkpoint is complete if its manifest is intact and every file has
    the recorded size. File contents are verified only when the checkpoint is loaded. Incomplete or
    unreadable folders and symbolic links are skipped with a warning.

    Returns:
        The path of the checkpoint; ``None`` if ``root`` contains no complete checkpoint.

    Raises:
        CheckpointError: ``root`` cannot be read.
    """
    return next((path for path, _ in whole_checkpoints(Path(root))), None)


def whole_checkpoints(root: Path) -> Iterator[tuple[Path, Manifest]]:
    """Return paths and manifests of the complete checkpoints in ``root``, newest first.

    Incomplete or unreadable folders and symbolic links are skipped with a warning.
    """
    for path, outcome in _checkpoints(root):
        if isinstance(outcome, Manifest):
            yield path, outcome
        else:
            logger.warning("skipping an incomplete checkpoint: %s", outcome)


def prune(root: str | os.PathLike[str], *, keep: int) -> tuple[Path, ...]:
    """Delete older numbered checkpoints and the temporary folders of killed processes.

    A numbered checkpoint is named like ``step-1000`` or ``checkpoint_500``. The ``keep`` complete
    ones of the largest step are kept; checkpoints with other names (``best``) are never deleted.

    Not collective: call ``prune`` on one rank after saving a checkpoint. Incomplete folders are
    kept for inspection, and symbolic links are ignored.

    Args:
        root: Folder that contains the checkpoints.
        keep: Number of checkpoints to keep, at least 1.

    Returns:
        Paths of the deleted checkpoints.

    Raises:
        CheckpointError: ``keep`` is below 1, or a checkpoint cannot be deleted.
    """
    if keep < 1:
        raise CheckpointError("must be a whole number, 1 or more", key="keep", value=keep)
    folder, removed = Path(root), []
    with system_errors(CheckpointError, folder, "older checkpoints cannot be deleted"):
        whole = [
            path
            for path, outcome in _checkpoints(folder)
            if isinstance(outcome, Manifest) and _NUMBERED.fullmatch(path.name)
        ]
        for path in whole[keep:]:
            if _is_folder(path):
                trash = _temporary_name(path, "trash")
                path.rename(trash)
                _remove(trash)
                removed.append(path)
                continue
            # No folder has the final name; delete its .tmp and .old folders that are not in use.
            for beside in _leftovers(path.parent, name=path.name, kinds=("tmp", "old")):
                with _held_if_unused(beside) as unused:
                    if unused:
                        _remove(beside)
                        removed.append(path)
        if folder.is_dir():
            remove_leftovers(folder)
    return tuple(dict.fromkeys(removed))


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file of the manifest exists and has the recorded size."""
    for record in manifest.files:
        path = folder / record.name
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointCorruptError(
                f"is missing ({error.strerror})", "use a different checkpoint", str(path)
            ) from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointCorruptError(
                "is not a regular file", "use a different checkpoint", str(path)
            )
        nbytes = status.st_size
        if nbytes != record.nbytes:
            raise CheckpointCorruptError(
                f"has {nbytes} bytes instead of {record.nbytes}",
                "use a different checkpoint",
                str(path),
            )


def remove_leftovers(parent: Path, *, name: str | None = None) -> None:
    """Delete temporary folders that killed processes left in ``parent``.

    Folders in use are kept. If a checkpoint is missing, a complete temporary folder of this
    checkpoint is kept and serves as the checkpoint. A folder that cannot be deleted causes a
    warning.

    Args:
        parent: Folder that contains the checkpoints.
        name: Name of the checkpoint whose temporary folders are deleted; by default, the temporary
            folders of all checkpoints are deleted.
    """
    for path in _leftovers(parent, name=name):
        base = parent / _base(path)
        trash = path.name.startswith(f"{base.name}.trash-")
        if not trash and not _is_folder(base) and (_whole_manifest(path) or files_of_export(path)):
            continue
        try:
            with _held_if_unused(path) as unused:
                if unused:
                    _retire(path, base)
        except (OSError, CheckpointError) as error:
            # Usually another user's leftovers in a shared folder, which must not end this run.
            logger.warning("leftovers of a killed save cannot be deleted: %s (%s)", path, error)


def _checkpoints(root: Path) -> Iterator[tuple[Path, Manifest | CheckpointError]]:
    """Yield the paths of checkpoints and their manifests, newest first.

    Folders that have only the name of a checkpoint, or an unreadable manifest, come with the error.
    """
    found: list[tuple[tuple[int, int, int], Path, Manifest | CheckpointError]] = []
    for path in {root / _base(entry) for entry in _entries(root)}:
        named = _NUMBERED.fullmatch(path.name)
        number = int(named[1]) if named else -1
        try:
            # Not find_checkpoint, whose suggestions search for checkpoints themselves.
            located = _located(checked_path(path))
            if located is None and named is not None:
                raise CheckpointError(f"does not contain {MANIFEST}", key=str(path))
        except CheckpointError as error:
            if named is not None or os.path.lexists(path / MANIFEST):
                found.append(((number, number, 0), path, error))
            continue
        if located is not None:
            folder, manifest = located
            age = (manifest.state.global_step, number, _manifest_time(folder))
            found.append((age, path, _checked(folder, manifest)))
    for _, path, outcome in sorted(found, key=itemgetter(0), reverse=True):
        yield path, outcome


def _checked(folder: Path, manifest: Manifest) -> Manifest | CheckpointError:
    try:
        check_files(folder, manifest)
    except CheckpointError as error:
        return error
    return manifest


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a folder; none if the folder does not exist."""
    try:
        return list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(
            f"cannot be read ({error.strerror})",
            "give this user permission to read the folder, or pass a different folder",
            str(folder),
        ) from error


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _base(path: Path) -> str:
    match = _LEFTOVER.fullmatch(path.name)
    return match[1] if match else path.name


def _leftovers(
    parent: Path, *, name: str | None = None, kinds: tuple[str, ...] = ("tmp", "old", "trash")
) -> list[Path]:
    return [
        path
        for path in _entries(parent)
        if (match := _LEFTOVER.fullmatch(path.name))
        and match[2] in kinds
        and name in (None, match[1])
        and _is_folder(path)
    ]


def _manifest_time(folder: Path) -> int:
    """Return the mtime of a folder's manifest in nanoseconds; 0 if it has none."""
    try:
        return (folder / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def _whole_manifest(folder: Path) -> Manifest | None:
    try:
        manifest = Manifest.read(folder)
        check_files(folder, manifest)
    except CheckpointError:
        return None
    return manifest


def _temporary_name(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(6)}")


def _remove(folder: Path) -> None:
    # Without a manifest, a half-removed folder is not mistaken for a checkpoint.
    (folder / MANIFEST).unlink(missing_ok=True)
    try:
        shutil.rmtree(folder)
    except RecursionError:  # Before Python 3.13, rmtree is recursive.
        raise OSError(errno.ELOOP, "has too deeply nested folders", str(folder)) from None


def _retire(former: Path, successor: Path) -> None:
    """Remove a replaced checkpoint; move files that are not part of it to its successor."""
    if former.name.startswith(f"{successor.name}.old-") and _is_folder(successor):
        for path in _foreign(former):
            target = successor / path.relative_to(former)
            if os.path.lexists(target):
                target = target.with_name(f"{target.name}.former-{secrets.token_hex(6)}")
            logger.info("keeping %s, which does not belong to the replaced files", target)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    _remove(former)


def _foreign(folder: Path) -> list[Path]:
    """Return the entries in a checkpoint's or export's folder that are not part of it."""
    exported = files_of_export(folder)
    if exported is not None:
        return list(_besides(folder, exported))
    try:
        listed = frozenset(record.name for record in Manifest.read(folder).files)
    except CheckpointError:
        listed = frozenset()
    others = _besides(folder, listed | {MANIFEST})
    return [path for path in others if not _SAVED_FILE.fullmatch(path.name)]


def _besides(folder: Path, names: frozenset[str]) -> Iterator[Path]:
    """Yield all entries except ``names``; a folder without any of them is yielded as one entry."""
    for path in _entries(folder):
        start = f"{path.name}/"
        inside = frozenset(name.removeprefix(start) for name in names if name.startswith(start))
        if inside and _is_folder(path):
            yield from _besides(path, inside)
        elif path.name not in names:
            yield path


def _lock_folder(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed or this process ends.

    Returns:
        The lock's descriptor; ``None`` if another process holds the lock or locking fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    locked = False
    try:
        with suppress(OSError):
            locked = try_lock(descriptor, exclusive=True)
    finally:
        if not locked:
            os.close(descriptor)
    return descriptor if locked else None


@contextmanager
def _held_if_unused(folder: Path) -> Iterator[bool]:
    """Lock a folder inside the block; yield ``False`` if another process uses it."""
    try:
        descriptor = _lock_folder(folder)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        descriptor = None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


# -- Exports: which files are ours, so that a later export may take their place.


@attrs.frozen(kw_only=True)
class Mark:
    """Metadata in the headers of weight files, by which zerotune recognises its exports.

    Equal exports have equal marks, because a mark contains neither a time nor a version.
    """

    files: Mapping[str, str | None]
    """SHA-256 (hex) of each file, by path relative to the export's top folder; ``None`` for weight
    files, which contain the mark."""

    @property
    def metadata(self) -> dict[str, str]:
        """Return the metadata for the header of a weight file."""
        return {_MARK_ENTRY: json.dumps({"files": self.files}, sort_keys=True)}

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Mark | None:
        """Return the mark in a header's metadata; ``None`` if there is no valid mark."""
        try:
            files = json_of(metadata[_MARK_ENTRY])["files"]
        except (KeyError, TypeError, ValueError):
            return None
        return cls(files=files) if isinstance(files, dict) else None

    def changed(self, top: Path) -> str | None:
        """Return the path of a file in ``top`` that has changed since the export, or ``None``."""
        for name, sha256 in self.files.items():
            file = top / name
            if os.path.lexists(file) and not self._holds(file, sha256):
                return name
        return None

    def _holds(self, file: Path, sha256: str | None) -> bool:
        if not file.is_file() or file.is_symlink():
            return False
        return _mark_in(file) == self if sha256 is None else hash_of(file) == sha256


def check_replaceable(path: Path) -> None:
    """Check that ``path`` is missing, an output folder, or an unchanged earlier export.

    An output folder is empty, or contains only checkpoints and logs. Replacing keeps them.
    """
    if not os.path.lexists(path) or (_is_folder(path) and all(map(_is_by_product, _entries(path)))):
        return
    changed: str | None = None
    for mark in _marks(path):
        changed = None if path.is_file() else mark.changed(path)
        if changed is None:
            return
    reason = "zerotune did not write it"
    if changed is not None:
        reason = f"{changed} has changed since zerotune wrote it"
    raise CheckpointError(
        f"exists and is not replaced: {reason}",
        "choose a different name, or remove the existing file or folder yourself",
        str(path),
    )


def _is_by_product(path: Path) -> bool:
    """Whether a training script writes such an entry into its output folder."""
    return _is_folder(path) and (path.name == "logs" or (path / MANIFEST).is_file())


def check_apart(path: Path, base: Path) -> None:
    """Check that an export does not replace the folder that it reads from."""
    if path.resolve() == base.resolve():
        raise CheckpointError(
            "exists and is not replaced, because the export is made from it",
            "choose a different name for the export",
            str(path),
        )


def files_of_export(folder: Path) -> frozenset[str] | None:
    """Return the paths of an export's files; ``None`` if the folder has no complete export."""
    whole = [mark.files for mark in _marks(folder) if mark.changed(folder) is None]
    return frozenset(name for files in whole for name in files) if whole else None


def _marks(path: Path) -> Iterator[Mark]:
    """Yield the marks of a possible export; a pipeline also contains those of earlier exports."""
    if path.is_file():
        mark = None if path.is_symlink() else _mark_in(path)
        if mark is not None:
            yield mark
        return
    for file in sorted((*path.glob("*.safetensors"), *path.glob("*/*.safetensors"))):
        mark = _mark_in(file)
        if mark is not None and file.relative_to(path).as_posix() in mark.files:
            yield mark


def _mark_in(file: Path) -> Mark | None:
    try:
        return Mark.of(read_header(file)[1])
    except CheckpointCorruptError:
        return None


# -- Ownership of a folder of checkpoints: one run saves at a time; others get an error.


OWNER_LOCK: Final = ".zerotune-owner.lock"
OWNER_RECORD: Final = ".zerotune-owner.json"

_NOT_TAKEN: Final = "cannot be used for saving checkpoints, but may be readable"
_LEAVING_S: Final = 0.5
"""Seconds allowed to a run that is just leaving."""


class _Saver(OwnerRecord):
    @classmethod
    @override
    def damaged(cls, text: str, reason: str) -> CheckpointError:
        return CheckpointError(reason, key=OWNER_RECORD, value=text)


class RootHold(Closable):
    """Lock on a checkpoint folder, so that only this process saves and prunes checkpoints in it.

    Without the lock, a job that is started twice would delete its own checkpoints. Reading,
    resuming and exporting need no lock. The lock of a killed process is replaced. If file locks are
    not visible to other machines, the lock of a job that is running on another machine may be
    replaced too. That job's next save then fails, because it calls ``confirm``.

    Not collective: create a ``RootHold`` on rank 0. One process may lock the same folder several
    times::

        with RootHold("checkpoints"):
            ...

    Args:
        root: The checkpoint folder, which is created if it is missing.

    Attributes:
        decisions: Decisions about the previous owner of the lock.

    Raises:
        CheckpointError: A living process has locked the folder, or the folder is not writable.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(os.path.abspath(root))  # noqa: PTH100 - Path.absolute keeps "..".
        self._hold: _Hold | None = _Hold.of(self._root)
        self.decisions: tuple[Decision, ...] = self._hold.decisions

    def confirm(self) -> None:
        """Check before a save that no other run has replaced this process's lock.

        Raises:
            CheckpointError: Another run has locked the folder, or the lock cannot be read.
        """
        if self._hold is not None:
            self._hold.confirm()

    @override
    def close(self) -> None:
        """Unlock the folder. May be called repeatedly."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.part()


_holds: dict[Path, _Hold] = {}


class _Hold:
    """This process's lock on one folder, shared by all its users."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._users = 0
        self._lock: int | None = None
        self._record = _Saver.for_this_process(
            run_id=new_run_id(), filesystem=filesystem_kind(root)
        )
        self.decisions: tuple[Decision, ...] = ()

    @classmethod
    def of(cls, root: Path) -> _Hold:
        """Return this process's lock on a folder, and lock the folder if necessary."""
        with system_errors(CheckpointError, root, _NOT_TAKEN):
            root.mkdir(parents=True, exist_ok=True)
            root = root.resolve()
            hold = _holds.get(root)
            if hold is None:
                hold = cls(root)
                hold._take()
        hold._users += 1
        return hold

    def confirm(self) -> None:
        with system_errors(CheckpointError, self._root, _NOT_TAKEN):
            if self._mine():
                return
            # The record was removed. Take the folder again, which fails if another run owns it.
            self.leave()
            self._take()

    def part(self) -> None:
        """Release one use of the lock, and unlock the folder after the last use."""
        self._users -= 1
        if self._users or self._lock is None:
            return
        # Files that cannot be removed do no harm: they are unlocked, so the next run takes over.
        with suppress(OSError, CheckpointError):
            if self._mine():
                (self._root / OWNER_RECORD).unlink()
                (self._root / OWNER_LOCK).unlink()
        self.leave()

    def leave(self) -> None:
        """Release the lock."""
        _holds.pop(self._root, None)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _mine(self) -> bool:
        """Return whether the record is still this process's; ``False`` if there is none."""
        try:
            record = _Saver.read(self._root / OWNER_RECORD)
        except FileNotFoundError:
            return False
        if record != self._record:
            raise _other_saves(self._root, record, "has taken it over")
        return True

    def _take(self) -> None:
        self._lock = self._locked()
        ownership.keep_from_children(self)
        try:
            self._judge()
            self._record.write_to(self._root / OWNER_RECORD)
        except BaseException:
            self.leave()
            raise
        _holds[self._root] = self

    def _locked(self) -> int:
        """Return a descriptor of the lock file, locked if the file system supports locks."""
        path = self._root / OWNER_LOCK
        while True:
            lock = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            try:
                self._lock_file(lock)
                # A run that left meanwhile may have removed the opened file; then try again.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), path.lstat()):
                        return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _lock_file(self, lock: int) -> None:
        try:
            locked = ownership.try_lock(lock, exclusive=True, patience=_LEAVING_S)
        except OSError as error:
            if not ownership.lacks_locks(error):
                raise
            self._note(
                "this file system does not support file locks, so starting the same job twice may "
                "be detected only at the next save"
            )
            return
        if not locked:
            record = None
            with suppress(FileNotFoundError, CheckpointError):
                record = _Saver.read(self._root / OWNER_RECORD)
            raise _other_saves(self._root, record, "is still running")

    def _judge(self) -> None:
        """Check the former owner, because a free lock may not prove that it has ended."""
        try:
            former = _Saver.read(self._root / OWNER_RECORD)
        except FileNotFoundError:
            return
        except CheckpointError as error:
            self._note(f"the folder's owner record {error.reason}, and the folder is not locked")
            return
        if former.owner == ProcessIdentity.current():
            return
        if former.owner.visible() and former.owner.alive():
            raise _other_saves(self._root, former, "is still running")
        doubt = former.doubt(filesystem_kind(self._root))
        if doubt is None:
            self._note(
                f"{_saver_words(former)} has ended, so this process takes over the folder",
                severity="note",
            )
        else:
            self._note(
                f"taken over from {_saver_words(former)}, although {doubt}; if that process is "
                "still alive, its next save fails with an error"
            )

    def _note(self, reason: str, *, severity: Severity = "warning") -> None:
        decision = Decision("checkpoints.owner", None, str(self._root), reason, severity)
        self.decisions += (decision,)


def _saver_words(record: _Saver) -> str:
    return f"process {record.owner.pid} on {record.owner.host} (since {record.created})"


def _other_saves(root: Path, record: _Saver | None, state: str) -> CheckpointError:
    who = "another process" if record is None else _saver_words(record)
    return CheckpointError(
        f"{who} saves checkpoints in this folder and {state}",
        "if the same job was started twice, end one of the two processes; otherwise use a "
        "separate folder for each job",
        str(root),
    )


# -- Is a checkpoint on disk what was written?


_THREADS: Final = 4
"""Number of files hashed concurrently; four cores together hash about as fast as a good disk reads.
"""


def verify_checkpoint(directory: str | os.PathLike[str]) -> Manifest:
    """Verify the size and hash of every file in the checkpoint ``directory``. Not collective.

    Raises:
        CheckpointError: ``directory`` is not a checkpoint.
        CheckpointCorruptError: A file is missing, truncated or altered; the message names the file.
    """
    folder, manifest = find_checkpoint(directory)
    for damage in find_damage(folder, manifest):
        raise damage
    return manifest


def finite_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint in ``root`` that has no NaN or infinity.

    Not collective.
    """
    for path, manifest in whole_checkpoints(root):
        if not manifest.not_finite:
            return path
        names = listing(manifest.not_finite, most=3)
        logger.warning("skipping %s: NaN or infinity in %s", path, names)
    return None


def find_damage(folder: Path, manifest: Manifest) -> tuple[CheckpointCorruptError, ...]:
    """Check the files of a checkpoint, and return all errors."""

    def check(record: FileRecord) -> None:
        check_files(folder, attrs.evolve(manifest, files=[record]))
        check_hash(folder, record)

    return _damages(check, manifest.files)


def check_hashes(folder: Path, records: Sequence[FileRecord]) -> None:
    """Check the hashes of several files concurrently."""
    for damage in _damages(partial(check_hash, folder), records):
        raise damage


def _damages(
    check: Callable[[FileRecord], None], records: Sequence[FileRecord]
) -> tuple[CheckpointCorruptError, ...]:
    """Return the damage that ``check`` finds, in the files' order; checks run in parallel."""

    def judged(record: FileRecord) -> CheckpointCorruptError | None:
        try:
            check(record)
        except CheckpointCorruptError as damage:
            return damage
        return None

    # hashlib releases the GIL; more threads than this rank has cores would not help.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(min(_THREADS, cores or 1, max(1, len(records)))) as pool:
        return tuple(damage for damage in pool.map(judged, records) if damage)


def check_hash(folder: Path, record: FileRecord) -> None:
    """Check that a file's content has the recorded hash."""
    path = folder / record.name
    try:
        same = hash_of(path) == record.sha256
    except OSError as error:
        raise of_system(CheckpointCorruptError, error, path, "cannot be read") from error
    if not same:
        raise CheckpointCorruptError(
            "was changed after it was written (its hash differs)",
            "use a different checkpoint",
            str(path),
        )
