"""The files a page may touch: one folder, the plan file in it, and what is opened there."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.files import fix_of
from zerotune._util.text import format_size
from zerotune.builder.forms import FormState, check_content, read_plan, told_as_lost
from zerotune.builder.preview import message_data, told_of
from zerotune.decisions import Decision, Log
from zerotune.errors import (
    InvalidValueError,
    PlanConflictError,
    PlanFileError,
    PlanSyntaxError,
    ZeroTuneError,
)
from zerotune.plan import DeepSpeedPlan, plan_document
from zerotune.plan.read import plan_from_mapping, read_whole
from zerotune.plan.source import parse_any, read_text, tolerated, with_named_files, wrapper_of
from zerotune.plan.write import format_of, launchable

LARGEST_FILE: Final = 1 << 20
"""Bytes of a configuration that is opened."""
_LONGEST_PART: Final = 255
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

    @classmethod
    def of(cls, path: Path) -> PathFacts:
        """Facts about ``path`` for somebody who wants swap files there."""
        exists = path.exists()
        nearest = next(each for each in (path, *path.parents) if each.exists())
        writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
        usage = shutil.disk_usage(nearest)
        if exists and not path.is_dir():
            sentence = "This is a file; swap files need a folder."
        elif not writable:
            there = "is there" if exists else "does not exist"
            sentence = f"The folder {there}, and this user may not write to it."
        else:
            there = "is there" if exists else "will be made"
            free, total = format_size(usage.free), format_size(usage.total)
            sentence = f"The folder {there}; {free} free of {total}."
        return cls(
            path=str(path),
            exists=exists,
            folder=path.is_dir(),
            writable=writable,
            free=usage.free,
            total=usage.total,
            sentence=sentence,
        )


@attrs.frozen(kw_only=True)
class Root:
    """A folder that paths of the page must lie in, symbolic links followed."""

    folder: Path
    """Absolute, symbolic links resolved."""

    def inside(self, written: Any, *, key: str) -> Path:
        """The path ``written``, absolute and resolved; a relative one is taken from the root."""
        if not isinstance(written, str) or not written.strip() or "\0" in written:
            raise InvalidValueError("is no path", key=key, value=written, fix="write a path")
        try:
            path = (self.folder / Path(written.strip()).expanduser()).resolve()
            path.exists()  # The system refuses what is too long for it, where it looks at all.
            if any(len(os.fsencode(part)) > _LONGEST_PART for part in path.parts):
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
        """Facts about a path inside."""
        path = self.inside(written, key=key)
        try:
            return PathFacts.of(path)
        except (OSError, ValueError) as error:
            raise InvalidValueError(
                f"cannot be looked at ({error})", key=key, value=written, fix="write another path"
            ) from None


# -- What somebody pasted, uploaded or named: anything the readers of a plan accept.


@attrs.frozen(kw_only=True)
class Opened:
    """What was opened: as a form, and what reading it changed."""

    state: FormState
    messages: tuple[Decision, ...]
    source: str


def open_file(written: Any, root: Root) -> Opened:
    """Open a file inside the root, as ``open_text``."""
    path = root.inside(written, key="path")
    try:
        size = path.stat().st_size if path.is_file() else 0
    except OSError as error:
        raise PlanFileError(
            f"cannot be read ({error})", key="path", value=str(path), fix=fix_of(error)
        ) from None
    if size > LARGEST_FILE:
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
    """
    content, sentences = parse_any(text, source=name)
    check_content(content)
    if not isinstance(content, Mapping):
        raise InvalidValueError(
            "holds no configuration", key=name, value=content, fix="open an object of settings"
        )
    here = folder or root.folder
    content = with_named_files(content, lambda key, path: root.inside(str(here / path), key=key))

    def read(log: Log) -> DeepSpeedPlan:
        tolerated(sentences, name, log)
        return plan_from_mapping(content, log, source=name, folder=folder)

    try:
        plan = read_whole(read)
    except (PlanFileError, PlanSyntaxError):
        raise
    except ZeroTuneError as error:
        if wrapper_of(content) is not None or not any(key in content for key in _TYPICAL):
            raise
        config = {str(key): value for key, value in content.items()}
        wrong = tuple(map(Decision.of, error.each()))
        return Opened(state=FormState(config=config), messages=wrong, source=name)
    messages = tuple(told_of(plan.decisions))
    state = FormState.of_plan(plan, like=_unwrapped(content))
    return Opened(state=state, messages=messages, source=name)


def _unwrapped(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration inside a trainer's file, where it stands there as an object."""
    inside = content.get(wrapper_of(content) or "")
    return inside if isinstance(inside, Mapping) else content


# -- The plan file, and the plan applied last.


ApplyCallback = Callable[[DeepSpeedPlan], object]
ABSENT: Final = "absent"
"""Version of a file that does not exist."""


def default_plan() -> DeepSpeedPlan:
    """What an empty form says: the common case, optimizer and warm-up written out."""
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-4, "warmup_num_steps": 500}
    return DeepSpeedPlan.build(
        stage=2,
        offload="cpu",
        precision="bf16",
        optimizer={"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        scheduler={"type": "WarmupLR", "params": warmup},
    )


class Session:
    """The plan file and the plan applied last; shared by all tabs."""

    def __init__(
        self,
        *,
        root: Root,
        plan: DeepSpeedPlan | None = None,
        plan_file: Path | None = None,
        on_apply: ApplyCallback | None = None,
    ) -> None:
        self.root = root
        self.plan_file = None if plan_file is None else root.inside(str(plan_file), key="--plan")
        self._on_apply = on_apply
        self._lock = threading.Lock()
        self._initial = FormState.of_plan(plan or default_plan())
        self.applied = plan

    @property
    def can_apply(self) -> bool:
        """Whether there is anything to apply to."""
        return self.plan_file is not None or self._on_apply is not None

    def opening(self) -> dict[str, Any]:
        """What a fresh page shows."""
        state, messages = self._initial, []
        version = None
        if self.plan_file is not None:
            version = version_of(self.plan_file)
            if version != ABSENT:
                try:
                    opened = open_file(str(self.plan_file), self.root)
                except ZeroTuneError as error:
                    messages = [{"severity": "error", "key": "", "text": str(error)}]
                else:
                    state, messages = opened.state, [message_data(one) for one in opened.messages]
                    self.applied = read_plan(state).plan or self.applied
        return {
            "state": state.data(),
            "defaults": self._initial.data(),
            "messages": messages,
            "version": version,
            "plan_file": None if self.plan_file is None else str(self.plan_file),
            "can_apply": self.can_apply,
        }

    def apply(
        self,
        plan: DeepSpeedPlan,
        *,
        like: Mapping[str, Any],
        version: str | None,
        processes: int = 1,
    ) -> dict[str, Any]:
        """Write the plan file, then tell the trainer that mounted the builder.

        Args:
            plan: What to apply.
            like: The configuration as the form holds it, whose order of keys is kept.
            processes: What accelerate's launcher is to start, where the plan does not say it.
            version: Version of the plan file that the page started from; ``None`` overwrites.
        """
        if not self.can_apply:
            raise PlanConflictError(
                "there is nothing to apply to",
                key="apply",
                fix="start the builder with --plan FILE, or save to a file",
            )
        written: dict[str, Any] = {"version": None, "paths": [], "backups": [], "decisions": []}
        with self._lock:
            if self.plan_file is not None:
                written = self._write(
                    plan, self.plan_file, like=like, version=version, processes=processes
                )
            answer = None if self._on_apply is None else self._on_apply(plan)
            self.applied = plan
        return {**written, "answer": answer if isinstance(answer, str) else None}

    def save(
        self,
        plan: DeepSpeedPlan,
        path: Path,
        *,
        like: Mapping[str, Any],
        format_: str | None,
        version: str | None,
        processes: int = 1,
    ) -> dict[str, Any]:
        """Write a file inside the root.

        Args:
            plan: What to write.
            like: As in ``apply``.
            processes: What accelerate's launcher is to start, where the plan does not say it.
            path: The file, already found to be inside the root.
            format_: As in ``DeepSpeedPlan.save``.
            version: Version it must still have; ``None`` overwrites.
        """
        with self._lock:
            written = self._write(
                plan, path, like=like, version=version, processes=processes, format_=format_
            )
            if path == self.plan_file:
                self.applied = plan
        return written

    def _write(
        self,
        plan: DeepSpeedPlan,
        path: Path,
        *,
        like: Mapping[str, Any],
        version: str | None,
        processes: int,
        format_: str | None = None,
    ) -> dict[str, Any]:
        """Save a plan, and no file outside the root: a trainer's file may name another one."""
        here = version_of(path)
        if version not in (None, here):
            new = version == ABSENT
            raise PlanConflictError(
                "is there already" if new else "was changed since this page read it",
                key=str(path),
                fix=f"{'choose another name' if new else 'open it again'}, or save over it on"
                " purpose",
            )
        chosen = format_ or format_of(path)
        if chosen == "accelerate":
            plan = launchable(plan, processes=processes)
        existing = path if chosen == "trainer" and path.exists() else None
        lossy = told_as_lost(plan)
        for beside in plan_document(plan, chosen, existing=existing, lossy=lossy).beside:
            self.root.inside(str(beside.resolve()), key="deepspeed_config")
        saved = plan.save(path, format=chosen, lossy=lossy, like=like)
        return {
            "version": version_of(path),
            "paths": [str(each) for each in saved.paths],
            "backups": [str(each) for each in saved.backups],
            "decisions": [str(decision) for decision in saved.decisions],
        }


def version_of(path: Path) -> str:
    """A name for what a file holds now."""
    try:
        return version_of_content(path.read_bytes())
    except OSError:
        return ABSENT


def version_of_content(content: bytes) -> str:
    """A name for some content."""
    return hashlib.sha256(content).hexdigest()[:16]
