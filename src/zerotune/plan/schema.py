"""Reading the JSON Schema that ``zerotune.plan_schema`` makes, without DeepSpeed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from zerotune.plan.model import join

HANDLING: Final = "x-zerotune"
"""Keyword of the schema that tells what zerotune does with a key."""


@attrs.frozen(kw_only=True)
class Parameter:
    """One key of a DeepSpeed configuration."""

    path: str
    """Dotted path (``"zero_optimization.stage"``)."""
    types: tuple[str, ...]
    """JSON types it may have; empty: anything."""
    default: Any = None
    """DeepSpeed's default."""
    doc: str = ""
    deprecated: bool = False
    replaced_by: str | None = None
    """The key to write instead."""
    modelled: bool = False
    """Whether zerotune models it; otherwise it is passed through."""
    stages: tuple[int, ...] = ()
    """ZeRO stages where it has an effect; empty: not known, or all."""

    @property
    def name(self) -> str:
        """The key itself."""
        return self.path.rpartition(".")[2]


def schema_parameters(schema: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """Every key of a schema, sections before what is in them."""
    return tuple(_walk(schema, ""))


def known_paths(schema: Mapping[str, Any]) -> frozenset[str]:
    """The paths of a schema's keys, for ``DeepSpeedPlan.from_dict(also_known=…)``.

    Lets a plan hold the keys of a DeepSpeed newer than the one zerotune knows.
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


def attribute_docs(cls: type) -> dict[str, str]:
    """The docstrings under the attributes of a class, base classes included.

    Empty for a class whose source is not there.
    """
    docs: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(each))
        except (OSError, TypeError):
            continue
        body = ast.parse(source).body[0]
        if isinstance(body, ast.ClassDef):
            docs.update(_documented(body))
    return docs


def _documented(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        value = after.value if isinstance(after, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield field.target.id, " ".join(value.value.split())
