"""Sizes that an earlier start read, so that files are decoded once and not at every start."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from zerotune._util.environment import user_cache
from zerotune._util.files import write_atomically
from zerotune._util.ownership import has_locks, try_lock
from zerotune._util.text import is_reproducible, json_of
from zerotune.decisions import Decision

Numbers = tuple[int, ...]
"""What is kept of a file: width and height, of a clip also its frames."""
Stamp = list[list[int]]
"""Of each file that belongs to a name: when it changed, in nanoseconds, and its bytes."""

_VERSION: Final = 1
_BETWEEN_WRITES_S: Final = 60.0
_logger: Final = logging.getLogger("zerotune")


class SizeIndex:
    """A file of the user's cache that holds what was read of files which have not changed since.

    One process at a time reads what is missing, and the others of the machine wait for what it
    writes: each file is decoded once, by one rank. A place that cannot be written does no harm.

    Args:
        parts: What the sizes depend on beside their files: the folder, how closely the files are
            looked at, … Nothing is kept without any, and where the ``repr`` of one differs
            between processes.
        count: Numbers of each.
    """

    def __init__(self, *parts: object, count: int = 2) -> None:
        self._path = _place(parts) if parts else None
        self._count = count
        self._stored: dict[str, Any] = {}
        self._stamps: Mapping[str, Stamp | None] = {}
        self._new = self._reused = 0
        self._written = time.monotonic()
        self._refusal: OSError | None = None

    @contextmanager
    def open(self, stamps: Mapping[str, Stamp | None]) -> Iterator[SizeIndex]:
        """Look names up inside the block, and keep what is new at its end.

        Args:
            stamps: Of every name (``stamp_of``); what has none is read each time.
        """
        self._stamps, self._stored = stamps, self._read()
        if self._path is None or all(self._known(name) for name in stamps):
            yield self
            return
        with self._alone(self._path):
            self._stored = self._read()
            try:
                yield self
            finally:
                self._write(self._path)

    def get(self, name: str, read: Callable[[], Numbers]) -> Numbers:
        """What is known of a name, or else what ``read`` finds."""
        known = self._known(name)
        if known is not None:
            self._reused += 1
            return known
        numbers, stamp = read(), self._stamps.get(name)
        if stamp is not None:
            self._stored[name] = [stamp, list(numbers)]
            self._new += 1
            if self._path is not None and time.monotonic() - self._written > _BETWEEN_WRITES_S:
                self._write(self._path)
        return numbers

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was not read anew, or could not be kept."""
        found = []
        if self._reused:
            found.append(
                Decision(
                    key="data.sizes",
                    before="read from each file",
                    after=f"{self._reused} of an earlier start",
                    reason=f"these files have not changed since; delete {self._path} to read all",
                )
            )
        if self._refusal is not None:
            found.append(
                Decision(
                    key="data.sizes",
                    before="kept for the next start",
                    after="read again by every rank and at the next start",
                    reason=f"{self._path} cannot be written ({self._refusal.strerror}); "
                    "XDG_CACHE_HOME names another place",
                )
            )
        return tuple(found)

    def _known(self, name: str) -> Numbers | None:
        entry = self._stored.get(name)
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] != self._stamps[name]:
            return None
        numbers = entry[1]
        if not isinstance(numbers, list) or len(numbers) != self._count:
            return None
        return tuple(numbers) if all(type(n) is int and n > 0 for n in numbers) else None

    def _read(self) -> dict[str, Any]:
        try:
            found = json_of(self._path.read_bytes()) if self._path is not None else {}
        except (OSError, ValueError):
            return {}
        known = isinstance(found, dict) and found.get("version") == _VERSION
        sizes = found.get("sizes") if known else None
        return sizes if isinstance(sizes, dict) else {}

    def _write(self, path: Path) -> None:
        self._written = time.monotonic()
        if not self._new:
            return
        # Files that are gone are left out.
        sizes = {name: self._stored[name] for name in self._stamps if name in self._stored}
        content = json.dumps({"version": _VERSION, "sizes": sizes}, separators=(",", ":"))
        try:
            write_atomically(path, content.encode())
        except OSError as error:
            self._refusal = error
        else:
            self._new = 0

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        """Hold the lock of the index, where the place and the system have locks."""
        descriptor = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if has_locks():
                descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
                if not try_lock(descriptor, exclusive=True):
                    _logger.info("another process reads the sizes of these files; waiting for it")
                    try_lock(descriptor, exclusive=True, patience=math.inf)
        except OSError as error:
            self._refusal = error
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)


def stamp_of(files: Iterable[Path]) -> Stamp | None:
    """When files were changed and how long they are; ``None`` where one cannot be asked."""
    try:
        known = [file.stat() for file in files]
    except (OSError, ValueError):
        return None
    return [[each.st_mtime_ns, each.st_size] for each in known]


def _place(parts: Iterable[object]) -> Path | None:
    written = [repr(part) for part in parts]
    if not all(map(is_reproducible, written)):
        return None
    digest = hashlib.sha256("\0".join(written).encode(errors="surrogateescape")).hexdigest()
    try:
        return user_cache() / "sizes" / f"{digest[:32]}.json"
    except RuntimeError:  # There is no home.
        return None
