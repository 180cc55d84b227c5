"""File access for the page: the root folder, the plan file and opened configurations."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from zerotune._util.files import fix_of
from zerotune.builder.forms import FormState, check_content, droppable_settings
from zerotune.builder.preview import message_data, notable_decisions
from zerotune.builder.setup import STARTING_SETUP
from zerotune.decisions import Decision, Log
from zerotune.errors import (
    InvalidValueError,
    PlanConflictError,
    PlanFileError,
    PlanSyntaxError,
    ZeroTuneError,
)
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.plan import raised
from zerotune.plan.read import plan_from_mapping, read_whole
from zerotune.plan.source import parse_any, read_text, tolerated, with_named_files, wrapper_of
from zerotune.plan.write import format_of, launchable

LARGEST_FILE: Final = 1 << 20
"""Maximum size of a configuration file, in bytes."""
_LONGEST_PART: Final = 255
"""Maximum length of a file name in bytes, on all common file systems."""
_TYPICAL: Final = (
    *("zero_optimization", "optimizer", "bf16", "fp16"),
    *("train_batch_size", "train_micro_batch_size_per_gpu"),
)
"""A mapping with any of these keys is a DeepSpeed configuration."""


# -- The only folder that the page may access.


@attrs.frozen(kw_only=True)
class Root:
    """The only folder that the page may access; paths are checked with symbolic links resolved."""

    folder: Path
    """Absolute path without symbolic links."""

    def inside(self, written: Any, *, key: str) -> Path:
        """Resolve the path that the user typed; a relative path starts at the root."""
        if not isinstance(written, str) or not written.strip() or "\0" in written:
            raise InvalidValueError("is not a path", "write a path", key, written)
        try:
            path = (self.folder / Path(written.strip()).expanduser()).resolve()
            path.exists()  # Raises an error for a path that the system considers too long.
            if any(len(os.fsencode(part)) > _LONGEST_PART for part in path.parts):
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidValueError(
                f"is not a path ({error})", "write another path", key, written
            ) from None
        if not path.is_relative_to(self.folder):
            raise InvalidValueError(
                f"lies outside {self.folder}, the only folder that the builder may access",
                "choose a path inside this folder, or start the builder with another --root",
                key,
                written,
            )
        return path


# -- Opening a configuration that was pasted, uploaded or named.


@attrs.frozen(kw_only=True)
class OpenedConfig:
    """A configuration that was opened as a form, with the messages from reading it."""

    state: FormState
    messages: tuple[Decision, ...]
    source: str


def open_file(written: Any, root: Root) -> OpenedConfig:
    """Open a configuration file, which must lie inside the root."""
    path = root.inside(written, key="path")
    try:
        size = path.stat().st_size if path.is_file() else 0
    except OSError as error:
        raise PlanFileError(f"cannot be read ({error})", fix_of(error), "path", str(path)) from None
    if size > LARGEST_FILE:
        raise PlanFileError(
            "is too large for a configuration", "choose another file", "path", str(path)
        )
    return open_text(read_text(path, key="path"), name=str(path), root=root, folder=path.parent)


def open_text(text: str, *, name: str, root: Root, folder: Path | None = None) -> OpenedConfig:
    """Open a configuration that is given as text.

    A configuration with invalid settings is still opened, so that the user can correct them in the
    form. Text that is not JSON, YAML or a configuration raises an error.

    Args:
        text: JSON or accelerate's YAML.
        name: Name of the file; messages show it, and its suffix selects the format.
        root: Folder that must contain every file that the text names.
        folder: Folder that relative paths in the text start from; by default the root.
    """
    content, sentences = parse_any(text, source=name)
    check_content(content)
    if not isinstance(content, Mapping):
        raise InvalidValueError(
            "is not a configuration", "open a JSON object of settings", name, content
        )
    here = folder or root.folder
    content = with_named_files(content, lambda key, path: root.inside(str(here / path), key=key))

    def read(log: Log) -> DeepSpeedPlan:
        tolerated(sentences, name, log)
        plan = plan_from_mapping(content, log, source=name, folder=folder)
        return raised(DeepSpeedPlan, plan)

    try:
        plan = read_whole(read)
    except (PlanFileError, PlanSyntaxError):
        raise
    except ZeroTuneError as error:
        if wrapper_of(content) is not None or not any(key in content for key in _TYPICAL):
            raise
        config = {str(key): value for key, value in content.items()}
        wrong = tuple(map(Decision.of, error.each()))
        return OpenedConfig(state=FormState(config=config), messages=wrong, source=name)
    messages = tuple(notable_decisions(plan.decisions))
    state = FormState.of_plan(plan)
    return OpenedConfig(state=state, messages=messages, source=name)


# -- The plan file.


ApplyCallback = Callable[[DeepSpeedPlan], object]
ABSENT: Final = "absent"
"""Version string that stands for a file that does not exist."""


def default_plan() -> DeepSpeedPlan:
    """Return the plan of an empty form: ZeRO-2, CPU offload, bf16, AdamW, warm-up."""
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-4, "warmup_num_steps": 500}
    return DeepSpeedPlan.build(
        stage=2,
        offload="cpu",
        precision="bf16",
        optimizer={"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        scheduler={"type": "WarmupLR", "params": warmup},
    )


class Session:
    """The plan file, shared by all browser tabs."""

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

    @property
    def can_apply(self) -> bool:
        """Whether *Apply* has a target: a plan file or a trainer."""
        return self.plan_file is not None or self._on_apply is not None

    def start_data(self) -> dict[str, Any]:
        """Return the data that a newly opened page needs."""
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
        return {
            "state": state.data(),
            "defaults": self._initial.data(),
            "setup": STARTING_SETUP,
            "messages": messages,
            "version": version,
            "plan_file": None if self.plan_file is None else str(self.plan_file),
            "can_apply": self.can_apply,
        }

    def apply(
        self,
        plan: DeepSpeedPlan,
        *,
        version: str | None,
        processes: int = 1,
    ) -> dict[str, Any]:
        """Write the plan file, then pass the plan to the trainer that mounted the builder.

        Args:
            plan: Plan to apply.
            processes: Number of processes for accelerate's launcher if the plan does not set it.
            version: Expected version of the plan file; ``None`` overwrites any version.
        """
        if not self.can_apply:
            raise PlanConflictError(
                "has no target: the builder was started without a plan file",
                "start the builder with --plan FILE, or save to a file",
                "apply",
            )
        written: dict[str, Any] = {"version": None, "paths": [], "backups": [], "decisions": []}
        with self._lock:
            if self.plan_file is not None:
                written = self._write(plan, self.plan_file, version=version, processes=processes)
            answer = None if self._on_apply is None else self._on_apply(plan)
        return {**written, "answer": answer if isinstance(answer, str) else None}

    def save(
        self,
        plan: DeepSpeedPlan,
        path: Path,
        *,
        version: str | None,
        processes: int = 1,
    ) -> dict[str, Any]:
        """Write a file inside the root; its suffix chooses the format.

        Args:
            plan: Plan to write.
            processes: Number of processes for accelerate's launcher if the plan does not set it.
            path: File to write, already checked by ``Root.inside``.
            version: Expected version of the file; ``None`` overwrites any version.
        """
        with self._lock:
            return self._write(plan, path, version=version, processes=processes)

    def _write(
        self,
        plan: DeepSpeedPlan,
        path: Path,
        *,
        version: str | None,
        processes: int,
    ) -> dict[str, Any]:
        here = version_of(path)
        if version not in (None, here):
            new = version == ABSENT
            raise PlanConflictError(
                "already exists" if new else "has changed since this page read it",
                f"{'choose a different name' if new else 'open the file again'}, or overwrite "
                "the file",
                str(path),
            )
        if format_of(path) == "accelerate":
            plan = launchable(plan, processes=processes)
        saved = plan.save(path, lossy=droppable_settings(plan))
        return {
            "version": version_of(path),
            "paths": [str(each) for each in saved.paths],
            "backups": [str(each) for each in saved.backups],
            "decisions": [str(decision) for decision in saved.decisions],
        }


def version_of(path: Path) -> str:
    """Return the version of a file: a hash of its content."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ABSENT
