"""A plan inside a trainer's ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError
from zerotune.plan.json_text import parse_json
from zerotune.plan.reading import TRAINER_KEYS, read_named, read_text, undashed, wrapper_of
from zerotune.plan.writing import PlanDocument, lost

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

_WRAPPER: Final = "deepspeed_config"
_NEW_KEYS: Final = {
    **{setting: setting for setting in TRAINER_KEYS.values()},
    "gradient_clipping": "max_grad_norm",
}
"""Launch setting to the key written when the file has none yet."""


def trainer_document(plan: DeepSpeedPlan, *, existing: Path | None = None) -> PlanDocument:
    """A trainer's file that holds the plan.

    Everything else of ``existing`` is kept, and so is the form in which it holds its
    configuration: an object, JSON text, or the path of a file; its key with dashes or without.
    The settings beside it that a plan knows (precision, accumulation, clipping) are changed only
    where the plan says something else.

    Raises:
        PlanError: ``existing`` cannot be read, or holds no object.
    """
    decisions: list[Decision] = []
    text = None if existing is None else read_text(existing)
    before, sentences = ({}, []) if text is None else parse_json(text, source=str(existing))
    if not isinstance(before, Mapping):
        raise InvalidValueError(
            f"{existing} must hold an object",
            value=before,
            fix="name a trainer's config.json, or a new file",
        )
    content = dict(before)
    wrapper = wrapper_of(content) or _WRAPPER
    beside = _put_config(plan, content, wrapper, existing)
    dashes = wrapper[: len(wrapper) - len(undashed(wrapper))]
    _put_launch(plan, content, dashes, decisions)
    if text is None or content != before:
        text = _json(content, indent=2)
        decisions += _lost_comments(sentences, existing)
    return PlanDocument(format="trainer", text=text, decisions=decisions, beside=beside)


def _lost_comments(sentences: list[str], existing: Path | None) -> list[Decision]:
    if not sentences:
        return []
    return [
        Decision(
            key=str(existing),
            before="; ".join(sentences),
            after=None,
            reason="JSON cannot hold it, so it is only in the .bak",
            severity="warning",
        )
    ]


def _put_config(
    plan: DeepSpeedPlan, content: dict[str, Any], wrapper: str, existing: Path | None
) -> dict[Path, str]:
    """Put the configuration where ``content`` has it; return the files it lies in."""
    config = plan.to_deepspeed()
    written = content.get(wrapper)
    if not isinstance(written, str):
        content[wrapper] = config
        return {}
    if written.lstrip().startswith("{"):
        content[wrapper] = _json(config, indent=None).rstrip()
        return {}
    folder = existing.parent if existing is not None else None
    named = read_named(written, folder, key=wrapper)
    if named.folder is None:  # base64 of JSON, which JSON text says more plainly
        content[wrapper] = _json(config, indent=None).rstrip()
        return {}
    return {Path(named.source): _json(config, indent=2)}


def _put_launch(
    plan: DeepSpeedPlan, content: dict[str, Any], dashes: str, decisions: list[Decision]
) -> None:
    launched = plan.launch.to_dict() if plan.launch else {}
    for where_read in ("distributed_type", "deepspeed_config_file"):
        launched.pop(where_read, None)
    for setting, new_key in _NEW_KEYS.items():
        if setting not in launched:
            continue
        value = launched.pop(setting)
        value = "no" if value == "fp32" else value
        present = [key for key in content if TRAINER_KEYS.get(undashed(key)) == setting]
        for key in present or [f"{dashes}{new_key}"]:
            if content.get(key) == value and type(content.get(key)) is type(value):
                continue
            if key in content:
                decisions.append(
                    Decision(key=key, before=content[key], after=value, reason="the plan says so")
                )
            content[key] = value
    decisions.extend(lost(plan, launched, "a trainer's file"))


def _json(value: Any, *, indent: int | None) -> str:
    return json.dumps(value, indent=indent, allow_nan=False) + "\n"
