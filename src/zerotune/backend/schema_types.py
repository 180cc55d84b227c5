"""From DeepSpeed's pydantic models and zerotune's kinds to JSON Schema."""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zerotune.plan import kinds
from zerotune.plan.schema import HANDLING, attribute_docs

Schema = dict[str, Any]

AUTO: Final = {"const": kinds.AUTO}

_PLAIN: Final[Mapping[Any, Schema]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Path: {"type": "string"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    type(None): {"type": "null"},
}
_BOUNDS: Final = {
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "lt": "exclusiveMaximum",
    "le": "maximum",
}


def of_type(annotation: Any) -> Schema:
    """The schema of a type annotation; empty (anything) for one JSON has no word for."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any_of(*map(of_type, arguments))
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (list, tuple, dict):
        items = {"items": of_type(arguments[0])} if origin is list and arguments else {}
        return {**_PLAIN[origin], **items}
    if isinstance(annotation, type):
        if issubclass(annotation, enum.Enum):
            # Enums may give one value two names.
            return {"enum": list(dict.fromkeys(member.value for member in annotation))}
        if hasattr(annotation, "model_fields"):
            return of_model(annotation)
    return dict(_PLAIN.get(annotation, {}))


def any_of(*schemas: Schema) -> Schema:
    """Any of several schemas; anything when one of them is."""
    if not all(schemas):
        return {}
    return {"anyOf": list(schemas)} if len(schemas) > 1 else schemas[0]


def of_model(model: Any) -> Schema:
    """The schema of a pydantic model: DeepSpeed forbids further keys and drops ``"auto"``."""
    docs = attribute_docs(model)
    properties: Schema = {}
    for name, field in model.model_fields.items():
        entry = _of_field(field, docs.get(name))
        properties[field.alias or name] = entry
        if field.alias:
            # `populate_by_name`: DeepSpeed takes both spellings.
            properties[name] = {**entry, HANDLING: {"alias_of": field.alias}}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _of_field(field: Any, doc: str | None) -> Schema:
    bounds = {
        keyword: plain(getattr(limit, name))
        for limit in field.metadata
        for name, keyword in _BOUNDS.items()
        if getattr(limit, name, None) is not None
    }
    schema = with_auto({**of_type(field.annotation), **bounds})
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if is_json(default):
        schema["default"] = plain(default)
    if doc or field.description:
        schema["description"] = doc or field.description
    extra = field.json_schema_extra
    if isinstance(extra, Mapping) and extra.get("deprecated"):
        schema["deprecated"] = True
        if extra.get("new_param"):
            schema[HANDLING] = {"replaced_by": extra["new_param"]}
    return schema


def with_auto(schema: Schema) -> Schema:
    """``schema``, or ``"auto"``; sections and what takes anything stay as they are."""
    if not schema or "properties" in schema:
        return schema
    branches = schema.get("anyOf", [schema])
    if any("properties" in branch for branch in branches):
        return schema
    return {"anyOf": [*branches, AUTO]}


def of_kind(kind: Any) -> Schema:
    """The schema of a kind of zerotune's own settings."""
    if isinstance(kind, kinds.Boolean):
        schema: Schema = {"type": "boolean"}
    elif isinstance(kind, kinds.Integer | kinds.Number):
        schema = {"type": "integer" if isinstance(kind, kinds.Integer) else "number"}
        schema["minimum"] = kind.minimum
        if math.isfinite(kind.maximum):
            schema["maximum"] = kind.maximum
    elif isinstance(kind, kinds.Choice):
        return {"enum": list(kind.choices)}
    elif isinstance(kind, kinds.Text | kinds.Folder):
        return {"type": "string"}
    else:
        return {"type": "object"}
    return with_auto(schema) if kind.auto else schema


def of_default(value: Any) -> Schema:
    """The schema of a key of which only the default is known."""
    if value is None or value == kinds.AUTO:
        return {"default": value}
    if isinstance(value, Mapping):
        properties = {key: {**of_default(item)} for key, item in value.items()}
        return {"type": "object", "properties": properties} if properties else {"type": "object"}
    # A whole number may be the default of a real one.
    kind = "number" if type(value) is float else _PLAIN.get(type(value), {}).get("type")
    schema: Schema = {"type": kind} if kind else {}
    return {**schema, "default": plain(value)} if is_json(value) else schema


def is_json(value: Any) -> bool:
    """Whether JSON can hold ``value``."""
    from zerotune.errors import InvalidValueError

    try:
        kinds.check_json(plain(value), "default")
    except InvalidValueError:
        return False
    return True


def plain(value: Any) -> Any:
    """``value`` without subclasses (DeepSpeed's ``pp_int``) and enums."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if hasattr(value, "model_dump"):
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value
