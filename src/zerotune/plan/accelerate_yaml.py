"""The YAML of ``accelerate config``, read as a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, PlanConflictError, PlanSyntaxError
from zerotune.plan import known_keys
from zerotune.plan.deepspeed_plan import DeepSpeedPlan
from zerotune.plan.json_text import parse_json
from zerotune.plan.reading import (
    fill_from_launch,
    find_file,
    plan_from_mapping,
    read_launch,
    read_text,
    tolerated,
)
from zerotune.plan.section import modelled, unknown_key
from zerotune.plan.sections import LaunchSection

_BLOCK = "deepspeed_config"
_FILE = "deepspeed_config_file"
_DEEPSPEED_IN_BLOCK = {"gradient_accumulation_steps", "gradient_clipping"}
_ZERO_IN_BLOCK = {
    "zero_stage",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
}


def plan_from_yaml(path: str | os.PathLike[str]) -> DeepSpeedPlan:
    """Read an accelerate YAML; see ``DeepSpeedPlan.from_yaml``."""
    file = Path(path)
    content = parse_yaml(read_text(file), source=str(file))
    if not isinstance(content, Mapping):
        raise InvalidValueError(
            f"{file} must hold the settings of `accelerate config`",
            value=content,
            fix="make one with `accelerate config`",
        )
    block = content.get(_BLOCK)
    if not isinstance(block, Mapping):
        raise InvalidValueError(
            f"{file} has no DeepSpeed settings",
            key=_BLOCK,
            value=block,
            fix=f"add a {_BLOCK} block with a zero_stage, or choose DeepSpeed in"
            " `accelerate config`",
        )
    around = {key: value for key, value in content.items() if key != _BLOCK}
    decisions: list[Decision] = []
    launched, config, source = _split(block, file, decisions)
    _check_known(around)
    launch = read_launch({**around, **launched}, decisions)
    plan = plan_from_mapping(config, source=source or str(file), folder=file.parent)
    plan = attrs.evolve(plan, decisions=(*decisions, *plan.decisions))
    return fill_from_launch(plan, launch)


def parse_yaml(text: str, *, source: str) -> Any:
    """Parse YAML text, refusing duplicated keys, which PyYAML overwrites in silence.

    Raises:
        PlanSyntaxError: Not YAML.
    """
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise PlanSyntaxError(
            f"is not YAML: {error.problem or error.context}",
            source=source,
            line=mark.line + 1 if mark else 1,
            column=mark.column + 1 if mark else 1,
            fix="check indentation, colons and quotes at this place",
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PlanSyntaxError(
            f"is not YAML: {error}", source=source, line=1, column=1, fix="save it as plain YAML"
        ) from None
    _refuse_duplicates(node, source)
    return content


def _refuse_duplicates(root: Any, source: str) -> None:
    pending, visited = [root], set()
    while pending:
        node = pending.pop()
        if node is None or id(node) in visited or isinstance(node.value, str):
            continue
        visited.add(id(node))
        if node.id == "sequence":
            pending.extend(node.value)
            continue
        seen: set[str] = set()
        for key, value in node.value:
            name = key.value if isinstance(key.value, str) else ""
            if name and name in seen:
                raise PlanSyntaxError(
                    f"has the key {name!r} twice in one block",
                    source=source,
                    line=key.start_mark.line + 1,
                    column=key.start_mark.column + 1,
                    fix="keep one of the two",
                )
            seen.add(name)
            pending.extend((key, value))


def _split(
    block: Mapping[Any, Any], file: Path, decisions: list[Decision]
) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """Launch settings, DeepSpeed configuration and the file it came from."""
    launched: dict[str, Any] = {}
    config: dict[str, Any] = {}
    inline: dict[str, Any] = {}
    for key, value in block.items():
        if key in _DEEPSPEED_IN_BLOCK:
            config[key] = value
        elif key in known_keys.ACCELERATE_BLOCK:
            if key not in _ZERO_IN_BLOCK:
                launched[key] = value
        else:
            inline[key] = value
    source = None
    if block.get(_FILE) not in (None, "none", ""):
        _refuse_beside_file(block)
        config, source = _from_file(block[_FILE], file, decisions)
    elif _ZERO_IN_BLOCK & block.keys():
        config["zero_optimization"] = _zero_from_block(block)
    if inline:
        config = _with_inline(config, inline, decisions)
    return launched, config, source


def _refuse_beside_file(block: Mapping[Any, Any]) -> None:
    beside = sorted(
        key
        for key in block
        if key in _ZERO_IN_BLOCK | _DEEPSPEED_IN_BLOCK or key == "zero3_save_16bit_model"
    )
    if beside:
        raise PlanConflictError(
            f"accelerate refuses other settings beside the file: {', '.join(beside)}",
            key=f"{_BLOCK}.{_FILE}",
            value=block[_FILE],
            fix="write them in the file, and remove them here",
        )


def _from_file(written: Any, file: Path, decisions: list[Decision]) -> tuple[dict[str, Any], str]:
    key = f"{_BLOCK}.{_FILE}"
    if not isinstance(written, str):
        raise InvalidValueError("must be a path", key=key, value=written, fix="write a path")
    path = find_file(written, file.parent, key=key)
    value, sentences = parse_json(read_text(path, key=key), source=str(path))
    decisions.extend(tolerated(sentences, str(path)))
    if not isinstance(value, Mapping):
        raise InvalidValueError(
            "must name a file with a DeepSpeed configuration",
            key=key,
            value=written,
            fix="write an object in that file",
        )
    return dict(value), str(path)


def _zero_from_block(block: Mapping[Any, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": block.get("zero_stage", 2)}
    for part in ("optimizer", "param"):
        section = {
            name: block[f"offload_{part}_{name}"]
            for name in ("device", "nvme_path")
            if f"offload_{part}_{name}" in block
        }
        if section:
            zero[f"offload_{part}"] = section
    return zero


def _with_inline(
    config: dict[str, Any], inline: dict[str, Any], decisions: list[Decision]
) -> dict[str, Any]:
    merged = dict(config)
    for key, value in inline.items():
        if not isinstance(key, str):
            raise InvalidValueError(
                "has a key that is not text", key=_BLOCK, value=key, fix="write it in quotes"
            )
        if key not in _plan_keys():
            raise unknown_key(
                key, value, f"{_BLOCK}.{key}", known_keys.ACCELERATE_BLOCK | _plan_keys()
            )
        if key in merged and merged[key] != value:
            raise PlanConflictError(
                "is written both in accelerate's form and in DeepSpeed's own",
                key=f"{_BLOCK}.{key}",
                value=value,
                fix="keep one of the two forms",
            )
        merged[key] = value
    decisions.append(
        Decision(
            key=_BLOCK,
            before=f"DeepSpeed's own keys {', '.join(inline)}",
            after="kept",
            reason="accelerate would discard them in silence",
            severity="warning",
        )
    )
    return merged


def _plan_keys() -> frozenset[str]:
    names = {attribute.name for attribute in modelled(DeepSpeedPlan)}
    return frozenset(names | DeepSpeedPlan.passed_through | DeepSpeedPlan.aliases.keys())


def _check_known(around: Mapping[Any, Any]) -> None:
    known = {attribute.name for attribute in modelled(LaunchSection)} | known_keys.LAUNCH
    for key, value in around.items():
        name = key if isinstance(key, str) else repr(key)
        if name not in known and name not in LaunchSection.aliases:
            raise unknown_key(name, value, name, known)
