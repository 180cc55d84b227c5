"""Writers: a plan as text of one of the formats that plans are read from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, PlanFileError, PlanSyntaxError
from zerotune.plan.files import write_whole
from zerotune.plan.section import as_tuple

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

FORMATS: Final = ("deepspeed", "accelerate", "trainer", "python")
_YAML_SUFFIXES: Final = (".yaml", ".yml")


@attrs.frozen(kw_only=True)
class PlanDocument:
    """A plan as text, and what the format made of it."""

    format: str
    """``"deepspeed"``, ``"accelerate"``, ``"trainer"`` or ``"python"``."""
    text: str
    decisions: tuple[Decision, ...] = attrs.field(default=(), converter=as_tuple)
    """What had to be said in another way, and what the format has no place for."""
    beside: Mapping[Path, str] = attrs.field(factory=dict)
    """Further files that the text refers to, with what belongs in them."""


@attrs.frozen(kw_only=True)
class SavedPlan:
    """What saving a plan did."""

    format: str
    paths: tuple[Path, ...]
    """The files that now hold the plan."""
    backups: tuple[Path, ...]
    """Copies of what was replaced; none where nothing changed."""
    decisions: tuple[Decision, ...]
    """As in ``PlanDocument``."""


def plan_document(
    plan: DeepSpeedPlan,
    format: str = "deepspeed",  # noqa: A002
    *,
    existing: Path | None = None,
) -> PlanDocument:
    """A plan as text of one format.

    Args:
        plan: The plan.
        format: ``"deepspeed"`` (its JSON), ``"accelerate"`` (YAML), ``"trainer"`` (a
            ``config.json`` that holds ``deepspeed_config``) or ``"python"`` (a script).
        existing: A trainer's file to keep everything else of.

    Raises:
        InvalidValueError: There is no such format.
        PlanError: ``existing`` cannot be read, or holds no object.
    """
    if format == "deepspeed":
        return _deepspeed(plan)
    if format == "accelerate":
        from zerotune.plan.writing_accelerate import accelerate_document

        return accelerate_document(plan)
    if format == "trainer":
        from zerotune.plan.writing_trainer import trainer_document

        return trainer_document(plan, existing=existing)
    if format == "python":
        from zerotune.plan.writing_python import python_script

        return PlanDocument(format=format, text=python_script(plan))
    raise InvalidValueError(
        "is no format a plan can be written in",
        key="format",
        value=format,
        fix="write one of " + ", ".join(repr(name) for name in FORMATS),
    )


def save_plan(
    plan: DeepSpeedPlan,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002
) -> SavedPlan:
    """Write a plan to a file; see ``DeepSpeedPlan.save``."""
    target = Path(path)
    format = format or format_of(target)  # noqa: A001
    existing = target if format == "trainer" and target.exists() else None
    document = plan_document(plan, format, existing=existing)
    files = {**document.beside, target: document.text}
    backups = [_replace(each, text) for each, text in files.items()]
    return SavedPlan(
        format=format,
        paths=tuple(files),
        backups=tuple(backup for backup in backups if backup is not None),
        decisions=document.decisions,
    )


def format_of(path: Path) -> str:
    """The format a file of this name should have, by its suffix and by what is there already."""
    suffix = path.suffix.lower()
    if suffix in _YAML_SUFFIXES:
        return "accelerate"
    if suffix == ".py":
        return "python"
    if not path.exists():
        return "deepspeed"
    from zerotune.plan.accelerate_block import is_accelerate
    from zerotune.plan.json_text import parse_json
    from zerotune.plan.reading import read_text, wrapper_of

    try:
        content, _ = parse_json(read_text(path), source=str(path))
    except PlanSyntaxError:
        return "deepspeed"
    if not isinstance(content, Mapping) or wrapper_of(content) is None:
        return "deepspeed"
    if is_accelerate(content):
        raise PlanFileError(
            "holds the settings of accelerate as JSON, which zerotune reads but does not write",
            key=str(path),
            fix="save to a .yaml, or name a format",
        )
    return "trainer"


def lost(plan: DeepSpeedPlan, keys: Mapping[str, Any], where: str) -> list[Decision]:
    """One decision for each launch setting that a format has no place for."""
    return [
        Decision(
            key=f"launch.{key}",
            before=value,
            after=None,
            reason=f"{where} has no place for it",
            severity="warning",
        )
        for key, value in keys.items()
        if plan.launch is not None
    ]


def _deepspeed(plan: DeepSpeedPlan) -> PlanDocument:
    launched = plan.launch.to_dict() if plan.launch else {}
    for where_read in ("distributed_type", "deepspeed_config_file"):
        launched.pop(where_read, None)
    text = json.dumps(plan.to_deepspeed(), indent=2, allow_nan=False) + "\n"
    decisions = lost(plan, launched, "DeepSpeed's own configuration")
    return PlanDocument(format="deepspeed", text=text, decisions=decisions)


def _replace(path: Path, text: str) -> Path | None:
    """Write ``text`` and keep a copy of what was there, unless it is the same."""
    content = text.encode()
    try:
        before = path.read_bytes() if path.exists() else None
    except OSError as error:
        raise PlanFileError(
            f"cannot be read ({error.strerror or error})",
            key=str(path),
            fix="name a file that you may read and write",
        ) from error
    if before == content:
        return None
    backup = None
    if before is not None:
        backup = write_whole(path.with_name(f"{path.name}.bak"), before)
    write_whole(path, content)
    return backup
