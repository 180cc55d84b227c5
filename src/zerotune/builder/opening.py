"""Opening a configuration: the one folder the page may look into, and what is read there."""

from __future__ import annotations

import base64
import binascii
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.files import fix_of
from zerotune._util.text import format_size
from zerotune.builder.forms import FormState, check_content
from zerotune.builder.preview import told_of
from zerotune.decisions import Decision, Log
from zerotune.errors import InvalidValueError, PlanFileError, PlanSyntaxError, ZeroTuneError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.read import plan_from_mapping, read_whole
from zerotune.plan.source import (
    WRAPPERS,
    YAML_SUFFIXES,
    is_off,
    parse_file,
    parse_json,
    parse_yaml,
    read_text,
    tolerated,
    undashed,
)

_OWN_SUFFIXES: Final = (*YAML_SUFFIXES, ".hjson", ".toml")
_LARGEST: Final = 1 << 20
_LONGEST_NAME: Final = 255
"""Bytes of a name inside a folder, on every file system in use."""
_TYPICAL: Final = (
    *("zero_optimization", "optimizer", "bf16", "fp16"),
    *("train_batch_size", "train_micro_batch_size_per_gpu"),
)
"""A mapping with any of these keys is a DeepSpeed configuration."""


# -- The one folder the page may look into.


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
            path.exists()  # The system refuses what is too long for it, where it looks at all.
            if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
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
    if facts.exists and not facts.folder:
        return "This is a file; swap files need a folder."
    if not facts.writable:
        there = "The folder is there" if facts.exists else "The folder does not exist"
        return f"{there}, and this user may not write to it."
    there = "The folder is there" if facts.exists else "The folder will be made"
    return f"{there}; {format_size(facts.free)} free of {format_size(facts.total)}."


# -- What somebody pasted, uploaded or named: anything the readers of a plan accept.


@attrs.frozen(kw_only=True)
class Opened:
    """What was opened: as a form, and what reading it changed."""

    state: FormState
    messages: tuple[Decision, ...]
    source: str


def open_file(written: Any, root: Root) -> Opened:
    """Open a file inside the root.

    Raises:
        PlanError: As ``open_text``; also a file that is missing, too large or outside the root.
    """
    path = root.inside(written, key="path")
    try:
        size = path.stat().st_size if path.is_file() else 0
    except OSError as error:
        raise PlanFileError(
            f"cannot be read ({error})", key="path", value=str(path), fix=fix_of(error)
        ) from None
    if size > _LARGEST:
        raise PlanFileError(
            "is too large to be a configuration", key="path", value=str(path), fix="name another"
        )
    return open_text(read_text(path, key="path"), name=str(path), root=root, folder=path.parent)


def open_text(text: str, *, name: str, root: Root, folder: Path | None = None) -> Opened:
    """Open the text of a configuration.

    A configuration that says something impossible opens all the same, to be repaired in the
    form; only what is no JSON or YAML, or no configuration at all, is refused.

    Args:
        text: JSON or accelerate's YAML.
        name: Name of the file, for messages and for its suffix.
        root: Where files that the text names may lie.
        folder: Where relative ones are looked up.

    Raises:
        PlanSyntaxError: With line and column.
        PlanError: It holds no configuration, or names a file outside the root.
    """
    content, sentences = _parsed(text, name)
    check_content(content)
    if not isinstance(content, Mapping):
        raise InvalidValueError(
            "holds no configuration", key=name, value=content, fix="open an object of settings"
        )
    content = _inside(content, root, folder or root.folder)

    def read(log: Log) -> DeepSpeedPlan:
        tolerated(sentences, name, log)
        return plan_from_mapping(content, log, source=name, folder=folder)

    try:
        plan = read_whole(read)
    except (PlanFileError, PlanSyntaxError):
        raise
    except ZeroTuneError as error:
        config = _repairable(content)
        if config is None:
            raise
        wrong = tuple(map(Decision.of, error.each()))
        return Opened(state=FormState(config=config), messages=wrong, source=name)
    messages = tuple(told_of(plan.decisions))
    return Opened(state=FormState.of_plan(plan), messages=messages, source=name)


def _parsed(text: str, name: str) -> tuple[Any, list[str]]:
    if Path(name).suffix.lower() in _OWN_SUFFIXES:
        return parse_file(text, Path(name))
    try:
        return parse_json(text, source=name)
    except PlanSyntaxError as error:
        if text.lstrip("\ufeff \t\r\n").startswith(("{", "[", "/")):
            raise
        # Pasted text has no suffix; what does not look like JSON may be accelerate's YAML.
        content = parse_yaml(text, source=name)
        if isinstance(content, Mapping):
            return content, []
        raise error from None


def _repairable(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration as it stands, if it is not wrapped in something else."""
    if any(undashed(key) in WRAPPERS for key in content):
        return None
    if not any(key in content for key in _TYPICAL):
        return None
    return {str(key): value for key, value in content.items()}


def _inside(content: Mapping[str, Any], root: Root, folder: Path) -> dict[str, Any]:
    """``content`` with every file it names made absolute, or refused when outside the root."""
    safe = dict(content)
    for key, value in content.items():
        if undashed(key) not in WRAPPERS:
            continue
        if isinstance(value, str) and not is_off(value):
            safe[key] = _named(value, root, folder, str(key))
        elif isinstance(value, Mapping):
            safe[key] = _inside(value, root, folder)
    return safe


def _named(written: str, root: Root, folder: Path, key: str) -> str:
    if written.lstrip().startswith("{") or _is_encoded(written):
        return written
    return str(root.inside(str(folder / written), key=key))


def _is_encoded(written: str) -> bool:
    try:
        return base64.urlsafe_b64decode(written).lstrip().startswith(b"{")
    except (binascii.Error, ValueError):
        return False
