"""Reads the keys of a DeepSpeed configuration from its JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from zerotune.plan.schema import HANDLING
from zerotune.plan.section import join


@attrs.frozen(kw_only=True)
class Parameter:
    """One key of a DeepSpeed configuration."""

    path: str
    """Dotted path (``"zero_optimization.stage"``)."""
    types: tuple[str, ...]
    """Allowed JSON types; empty if every type is allowed."""
    default: Any = None
    """DeepSpeed's default."""
    doc: str = ""
    deprecated: bool = False
    replaced_by: str | None = None
    """Key that replaces it."""
    modelled: bool = False
    """Whether zerotune models the key; otherwise, the key is passed through to DeepSpeed."""
    stages: tuple[int, ...] = ()
    """ZeRO stages at which the key has an effect; empty if unknown, or if it has an effect at all
    stages."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]


def schema_parameters(schema: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """Return every key of ``schema``; a section precedes its keys."""
    return tuple(_walk(schema, ""))


def known_paths(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the path of every key in ``schema``.

    Pass the paths to ``DeepSpeedPlan.from_dict(also_known=…)`` to accept the keys of a newer
    DeepSpeed.
    """
    return frozenset(parameter.path for parameter in schema_parameters(schema))


def _walk(schema: Mapping[str, Any], path: str) -> Iterator[Parameter]:
    for name, entry in _properties(schema).items():
        here = join(path, name)
        handling = entry.get(HANDLING, {})
        yield Parameter(
            path=here,
            types=_types(entry),
            default=entry.get("default"),
            doc=entry.get("description", ""),
            deprecated=entry.get("deprecated", False),
            replaced_by=handling.get("replaced_by"),
            modelled=handling.get("modelled", False),
            stages=tuple(handling.get("stages", ())),
        )
        yield from _walk(entry, here)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found: dict[str, Any] = dict(schema.get("properties", {}))
    for branch in schema.get("anyOf", ()):
        found.update(_properties(branch))
    return found


def _types(entry: Mapping[str, Any]) -> tuple[str, ...]:
    written = entry.get("type", ())
    types = [written] if isinstance(written, str) else list(written)
    for branch in entry.get("anyOf", ()):
        types.extend(_types(branch))
    if "enum" in entry or "const" in entry:
        types.append("string")
    return tuple(dict.fromkeys(types))
