"""Inspect and apply stored schemas of DeepSpeed's keys; DeepSpeed is not needed.

``passed_schema`` returns the stored schema of the sections that plans pass through. ``faults``
validates values as DeepSpeed's pydantic models do, which accept ``"5"`` and ``5.0`` for 5.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from zerotune._util.text import as_number, did_you_mean
from zerotune.decisions import Decision
from zerotune.errors import REMOVAL, UNSET, InvalidValueError, UnknownKeyError, writes
from zerotune.plan.section import join
from zerotune.plan.values import is_auto

HANDLING: Final = "x-zerotune"
"""Schema keyword that describes how zerotune handles a key."""


# -- Validation of a value against a schema.


_DATA: Final = Path(__file__).parent / "data"


def whole_schema() -> str:
    """Return every parameter of the newest tested DeepSpeed as JSON Schema (draft 2020-12).

    Each key has its type, ``default``, ``description`` and ``deprecated``, as far as they are
    known. Under ``x-zerotune``, a key may have ``modelled``, ``stages``, ``replaced_by`` and
    ``alias_of``. ``modelled`` says whether zerotune reads and fills the key; all other keys are
    passed through. ``stages`` lists the ZeRO stages at which the key has an effect, if they are
    known. The types are those of DeepSpeed, plus ``"auto"`` where zerotune or DeepSpeed accepts it.
    ``zerotune.plan`` also accepts looser spellings. ``python -m tools.plan_schema`` regenerates it.
    """
    return (_DATA / "schema.json").read_text(encoding="utf-8")


@cache
def passed_schema() -> Mapping[str, Any]:
    """Return the stored schema of the keys that plans pass through.

    ``python -m tools.deepspeed_schema`` regenerates the stored schema.
    """
    text = (_DATA / "deepspeed.json").read_text(encoding="utf-8")
    properties: Mapping[str, Any] = json.loads(text)["properties"]
    return properties


_REFUSED: Final = "DeepSpeed rejects this value"


def _fault(path: str, value: Any, schema: Mapping[str, Any], reason: str = _REFUSED) -> Decision:
    edits = writes(*_suggestions(schema))
    fix = f"write {_words(schema)}"
    return Decision.of(InvalidValueError(reason, fix, path, value, edits=edits))


def faults(value: Any, schema: Mapping[str, Any], path: str) -> list[Decision]:
    """Return the errors that DeepSpeed would raise for ``value``; empty if it is valid."""
    branches = schema.get("anyOf")
    if branches is None:
        return list(_faults(value, schema, path))
    found = [faults(value, {**branch, **_bounds(schema)}, path) for branch in branches]
    if [] in found:
        return []
    if isinstance(value, Mapping):
        inside = [each for each in found if all(fault.key != path for fault in each)]
        if inside:
            return inside[0]
    return [_fault(path, value, schema)]


def _bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in _COMPARED if key in schema}


_COMPARED: Final[Mapping[str, tuple[str, Callable[[Any, Any], bool]]]] = {
    "minimum": ("at least", lambda value, bound: value >= bound),
    "maximum": ("at most", lambda value, bound: value <= bound),
    "exclusiveMinimum": ("more than", lambda value, bound: value > bound),
    "exclusiveMaximum": ("less than", lambda value, bound: value < bound),
}
_TRUTHS: Final = frozenset(
    ("0", "1", "off", "on", "f", "t", "false", "true", "n", "y", "no", "yes")
)


def _faults(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[Decision]:
    if "const" in schema:
        allowed = value == schema["const"] or (schema["const"] == "auto" and is_auto(value))
    elif "enum" in schema:
        word = value.lower() if schema.get(HANDLING) and isinstance(value, str) else value
        allowed = any(word == each and type(word) is type(each) for each in schema["enum"])
    elif "type" in schema:
        written = schema["type"]
        types = [written] if isinstance(written, str) else written
        allowed = any(_is_of_type(value, each) for each in types)
    else:
        allowed = True
    if not allowed:
        yield _fault(path, value, schema)
        return
    number = as_number(int(value) if isinstance(value, bool) else value)
    for keyword, (_, within) in _COMPARED.items():
        if keyword in schema and number is not None and not within(number, schema[keyword]):
            yield _fault(path, value, schema, "is outside DeepSpeed's range")
    yield from _faults_inside(value, schema, path)


def _faults_inside(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[Decision]:
    if isinstance(value, list | tuple) and "items" in schema:
        for index, item in enumerate(value):
            yield from faults(item, schema["items"], f"{path}[{index}]")
    if not isinstance(value, Mapping) or "properties" not in schema:
        return
    known = schema["properties"]
    for name, item in value.items():
        if name in known:
            yield from faults(item, known[name], join(path, name))
        elif schema.get("additionalProperties") is False:
            guesses = did_you_mean(name, sorted(known), count=2)
            words = " or ".join(map(repr, guesses))
            yield Decision.of(
                UnknownKeyError(
                    "DeepSpeed has no such key here",
                    f"did you mean {words}?" if guesses else None,
                    join(path, name),
                    item,
                    edits=[*({"": UNSET, join(path, each): item} for each in guesses), REMOVAL],
                )
            )


def _is_of_type(value: Any, kind: str) -> bool:
    """Whether pydantic accepts ``value``, including its lenient conversions."""
    if kind in ("integer", "number"):
        number = as_number(int(value) if isinstance(value, bool) else value)
        return number is not None and (kind == "number" or number == int(number))
    if kind == "boolean":
        word = str(value).lower() if isinstance(value, str) else value
        return word in _TRUTHS if isinstance(word, str) else word in (True, False)
    types: Mapping[str, tuple[type, ...]] = {
        "string": (str,),
        "array": (list, tuple),
        "object": (Mapping,),
        "null": (type(None),),
    }
    return isinstance(value, types[kind])


_TYPE_WORDS: Final = {
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def _suggestions(schema: Mapping[str, Any]) -> list[Any]:
    """Return values to offer instead of an invalid one; a negative bound has a special meaning."""
    if "anyOf" in schema:
        branches = ({**each, **_bounds(schema)} for each in schema["anyOf"])
        return [value for each in branches for value in _suggestions(each)]
    types = schema.get("type", ())
    bounds = [schema[key] for key in ("minimum", "maximum") if schema.get(key, -1) >= 0]
    if "integer" in types and "exclusiveMinimum" in schema:
        bounds.append(schema["exclusiveMinimum"] + 1)
    const = [schema["const"]] if "const" in schema else []
    listed = dict.fromkeys(schema.get("enum", ()))
    return [*const, *listed, *([True, False] if "boolean" in types else []), *bounds]


def _words(schema: Mapping[str, Any]) -> str:
    """Return the allowed values in words, as in "an integer of more than 0, or "auto""."""
    if "anyOf" in schema:
        return ", or ".join(_words({**each, **_bounds(schema)}) for each in schema["anyOf"])
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(json.dumps(each) for each in schema["enum"])
    written = schema.get("type", ())
    types = [written] if isinstance(written, str) else written
    bounds = [f"{words} {schema[key]}" for key, (words, _) in _COMPARED.items() if key in schema]
    names = " or ".join(_TYPE_WORDS[each] for each in types) or "something else"
    return f"{names} of {' and '.join(bounds)}" if bounds else names
