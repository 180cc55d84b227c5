"""The one folder the page may look into, and what is to know of a path inside it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import attrs

from zerotune.errors import InvalidValueError


@attrs.frozen(kw_only=True)
class PathFacts:
    """What a path field shows."""

    path: str
    """Absolute, symbolic links resolved."""
    exists: bool
    folder: bool
    """Whether it is a folder."""
    writable: bool
    """Whether files can be made in it, or, where it does not exist, whether it can be made."""
    free: int
    """Bytes an unprivileged user may still write there."""
    total: int
    sentence: str
    """All of this in words."""


def _resolved(folder: str | os.PathLike[str]) -> Path:
    return Path(folder).resolve()


@attrs.frozen(kw_only=True)
class Root:
    """A folder that paths of the page must lie in, symbolic links followed."""

    folder: Path = attrs.field(converter=_resolved)

    def inside(self, written: Any, *, key: str) -> Path:
        """The path ``written``, absolute and resolved; a relative one is taken from the root.

        Raises:
            InvalidValueError: It is no path, or it lies elsewhere.
        """
        if not isinstance(written, str) or not written.strip() or "\0" in written:
            raise InvalidValueError("is no path", key=key, value=written, fix="write a path")
        try:
            path = (self.folder / Path(written.strip()).expanduser()).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidValueError(
                f"is no path ({error})", key=key, value=written, fix="write another one"
            ) from None
        if not path.is_relative_to(self.folder):
            raise InvalidValueError(
                f"lies outside {self.folder}, which is all the builder may touch",
                key=key,
                value=written,
                fix="name a path inside it, or start the builder with another --root",
            )
        return path

    def facts(self, written: Any, *, key: str = "path") -> PathFacts:
        """What is to know of a path.

        Raises:
            InvalidValueError: As ``inside``; also a path the system does not let us look at.
        """
        path = self.inside(written, key=key)
        try:
            return _facts(path)
        except (OSError, ValueError) as error:
            raise InvalidValueError(
                f"cannot be looked at ({error})", key=key, value=written, fix="write another path"
            ) from None


def _facts(path: Path) -> PathFacts:
    exists = path.exists()
    nearest = next(each for each in (path, *path.parents) if each.exists())
    usage = shutil.disk_usage(nearest)
    holder = nearest if nearest.is_dir() else nearest.parent
    facts = PathFacts(
        path=str(path),
        exists=exists,
        folder=path.is_dir(),
        writable=nearest.is_dir() and os.access(holder, os.W_OK | os.X_OK),
        free=usage.free,
        total=usage.total,
        sentence="",
    )
    return attrs.evolve(facts, sentence=_sentence(facts))


def _sentence(facts: PathFacts) -> str:
    from zerotune.plan.memory.sizes import format_size

    if facts.exists and not facts.folder:
        return "This is a file; swap files need a folder."
    if not facts.writable:
        there = "The folder is there" if facts.exists else "The folder does not exist"
        return f"{there}, and this user may not write to it."
    there = "The folder is there" if facts.exists else "The folder will be made"
    return f"{there}; {format_size(facts.free)} free of {format_size(facts.total)}."
