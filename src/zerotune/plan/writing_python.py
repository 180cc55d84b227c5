"""A plan as Python source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from zerotune.plan.section import Section, modelled

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan

_WIDTH: Final = 88
_STEP: Final = "    "


def python_expression(plan: DeepSpeedPlan) -> str:
    """An expression that is equal to ``plan`` where the names of ``zerotune.plan`` are known."""
    return _call(plan, "")


def python_script(plan: DeepSpeedPlan) -> str:
    """A script that builds ``plan`` under the name ``plan``."""
    names = ", ".join(sorted(_names(plan)))
    single = f"from zerotune.plan import {names}"
    if len(single) > _WIDTH:
        listed = "".join(f"{_STEP}{name},\n" for name in sorted(_names(plan)))
        single = f"from zerotune.plan import (\n{listed})"
    return f"{single}\n\nplan = {python_expression(plan)}\n"


def _names(section: Section) -> set[str]:
    found = {type(section).__name__}
    for _, value in _arguments(section):
        if isinstance(value, Section):
            found |= _names(value)
    return found


def _arguments(section: Section) -> list[tuple[str, Any]]:
    names = [attribute.name for attribute in modelled(type(section))]
    pairs = [(name, getattr(section, name, None)) for name in (*names, "launch")]
    written = [(name, value) for name, value in pairs if value is not None]
    extra = getattr(section, "extra", None)
    return [*written, ("extra", dict(extra))] if extra else written


def _call(section: Section, indent: str) -> str:
    name = type(section).__name__
    inner = indent + _STEP
    arguments = [f"{key}={_value(value, inner)}" for key, value in _arguments(section)]
    single = f"{name}({', '.join(arguments)})"
    if len(single) <= _WIDTH - len(indent) and "\n" not in single:
        return single
    return f"{name}(\n" + "".join(f"{inner}{each},\n" for each in arguments) + f"{indent})"


def _value(value: Any, indent: str) -> str:
    if isinstance(value, Section):
        return _call(value, indent)
    single = repr(value)
    if len(single) <= _WIDTH - len(indent) or not isinstance(value, dict | list) or not value:
        return single
    inner = indent + _STEP
    if isinstance(value, dict):
        lines = [f"{key!r}: {_value(item, inner)}" for key, item in value.items()]
        return "{\n" + "".join(f"{inner}{line},\n" for line in lines) + indent + "}"
    lines = [_value(item, inner) for item in value]
    return "[\n" + "".join(f"{inner}{line},\n" for line in lines) + indent + "]"
