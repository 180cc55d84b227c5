"""What one running builder knows: the plan file, what was applied last, and how to apply."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from zerotune.builder.forms import FormState, read_plan, told_as_lost
from zerotune.builder.opening import Root, open_file
from zerotune.builder.preview import message_data
from zerotune.errors import PlanConflictError, ZeroTuneError
from zerotune.plan import DeepSpeedPlan, plan_document
from zerotune.plan.write import SavedPlan, format_of, launchable

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
                    self._remember(state)
        return {
            "state": state.data(),
            "defaults": self._initial.data(),
            "messages": messages,
            "version": version,
            "plan_file": None if self.plan_file is None else str(self.plan_file),
            "can_apply": self.can_apply,
        }

    def apply(
        self, plan: DeepSpeedPlan, *, version: str | None, processes: int = 1
    ) -> dict[str, Any]:
        """Write the plan file, then tell the trainer that mounted the builder.

        Args:
            plan: What to apply.
            processes: What accelerate's launcher is to start, where the plan does not say it.
            version: Version of the plan file that the page started from; ``None`` overwrites.

        Raises:
            PlanConflictError: The file was changed since, or there is nothing to apply to.
            PlanError: It cannot be written.
        """
        if not self.can_apply:
            raise PlanConflictError(
                "there is nothing to apply to",
                key="apply",
                fix="start the builder with --plan FILE, or save to a file",
            )
        with self._lock:
            saved = None
            if self.plan_file is not None:
                refuse_changed(self.plan_file, version)
                saved = save_inside(plan, self.plan_file, self.root, processes=processes)
            answer = None if self._on_apply is None else self._on_apply(plan)
            self.applied = plan
        return {
            "version": None if self.plan_file is None else version_of(self.plan_file),
            "answer": answer if isinstance(answer, str) else None,
            **saved_data(saved),
        }

    def save(
        self,
        plan: DeepSpeedPlan,
        path: Path,
        *,
        format_: str | None,
        version: str | None,
        processes: int = 1,
    ) -> dict[str, Any]:
        """Write a file inside the root.

        Args:
            plan: What to write.
            processes: What accelerate's launcher is to start, where the plan does not say it.
            path: The file, already found to be inside the root.
            format_: As in ``DeepSpeedPlan.save``.
            version: Version it must still have; ``None`` overwrites.

        Raises:
            PlanConflictError: The file was changed since.
            PlanError: It cannot be written.
        """
        with self._lock:
            refuse_changed(path, version)
            saved = save_inside(plan, path, self.root, format_=format_, processes=processes)
            if path == self.plan_file:
                self.applied = plan
        return {"version": version_of(path), **saved_data(saved)}

    def _remember(self, state: FormState) -> None:
        self.applied = read_plan(state).plan or self.applied


def save_inside(
    plan: DeepSpeedPlan,
    path: Path,
    root: Root,
    *,
    format_: str | None = None,
    processes: int = 1,
) -> SavedPlan:
    """Save a plan, and no file outside the root: a trainer's file may name another one.

    Raises:
        PlanError: As ``DeepSpeedPlan.save``; also a file outside the root.
    """
    chosen = format_ or format_of(path)
    if chosen == "accelerate":
        plan = launchable(plan, processes=processes)
    existing = path if chosen == "trainer" and path.exists() else None
    lossy = told_as_lost(plan)
    for beside in plan_document(plan, chosen, existing=existing, lossy=lossy).beside:
        root.inside(str(beside.resolve()), key="deepspeed_config")
    return plan.save(path, format=chosen, lossy=lossy)


def version_of(path: Path) -> str:
    """A name for what a file holds now."""
    try:
        return version_of_content(path.read_bytes())
    except OSError:
        return ABSENT


def version_of_content(content: bytes) -> str:
    """A name for some content."""
    return hashlib.sha256(content).hexdigest()[:16]


def refuse_changed(path: Path, version: str | None) -> None:
    """Raise when a file is no longer the one a page knows.

    Raises:
        PlanConflictError: It is not.
    """
    if version is None or version_of(path) == version:
        return
    if version == ABSENT:
        raise PlanConflictError(
            "is there already", key=str(path), fix="choose another name, or save over it on purpose"
        )
    raise PlanConflictError(
        "was changed by somebody else since this page read it",
        key=str(path),
        fix="open it again, or save over it on purpose",
    )


def saved_data(saved: SavedPlan | None) -> dict[str, Any]:
    """What saving did, for the page."""
    if saved is None:
        return {"paths": [], "backups": [], "decisions": []}
    return {
        "paths": [str(path) for path in saved.paths],
        "backups": [str(path) for path in saved.backups],
        "decisions": [str(decision) for decision in saved.decisions],
    }
