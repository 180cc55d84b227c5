"""The YAML of ``accelerate config``, read as a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotune.errors import InvalidValueError, PlanSyntaxError
from zerotune.plan.accelerate_block import plan_from_settings
from zerotune.plan.deepspeed_plan import DeepSpeedPlan
from zerotune.plan.reading import read_text


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
    return plan_from_settings(content, source=str(file), folder=file.parent)


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
