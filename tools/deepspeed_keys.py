"""Keys that the installed DeepSpeed reads one by one, extracted from its source.

``get_scalar_param(section, NAME, NAME_DEFAULT)`` and ``section.get(NAME, NAME_DEFAULT)`` name a key
and its default by module constants, so the source is the list. ``zerotune schema`` reads the list
from a file that ``python -m tools.deepspeed_keys`` writes.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import zerotune
from zerotune.backend.schema import READ, is_json, module_or_none, plain
from zerotune.backend.upstream import require_deepspeed

FILE: Final = Path(zerotune.__file__).parent / "backend" / "data" / "keys.json"
_READERS: Final = frozenset({"get_scalar_param", "get_list_param", "get_dict_param"})


def deepspeed_keys() -> dict[str, Any]:
    """Return each key, its default, and the constants of both, by module and variable."""
    deepspeed = require_deepspeed(accelerator="cpu")
    modules: dict[str, dict[str, Any]] = {}
    for name, variable in READ:
        module = module_or_none(name)
        if module is not None:
            tree = ast.parse(inspect.getsource(module))
            modules.setdefault(name, {})[variable] = dict(_reads(tree, module, variable))
    return {"deepspeed": deepspeed.__version__, "modules": modules}


def render(keys: dict[str, Any]) -> str:
    """Return the file's text."""
    return json.dumps(keys, indent=1, allow_nan=False) + "\n"


def _reads(tree: ast.AST, module: ModuleType, variable: str) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        where, arguments = _where(node)
        if where != variable or not arguments:
            continue
        key = _value(arguments[0], module)
        if isinstance(key, str):
            yield key, _entry(arguments, module)


def _where(call: ast.Call) -> tuple[str | None, list[ast.expr]]:
    """Return the dict a call reads from, and the call's other arguments."""
    function = call.func
    if isinstance(function, ast.Name) and function.id in _READERS and call.args:
        return ast.unparse(call.args[0]), call.args[1:]
    if isinstance(function, ast.Attribute) and function.attr == "get":
        return ast.unparse(function.value), call.args
    return None, []


def _entry(arguments: list[ast.expr], module: ModuleType) -> dict[str, Any]:
    key, *rest = arguments
    entry: dict[str, Any] = {"name": key.id} if isinstance(key, ast.Name) else {}
    default = _value(rest[0], module) if rest else None
    entry["default"] = plain(default) if is_json(default) else None
    if rest and isinstance(rest[0], ast.Name):
        entry["default_name"] = rest[0].id
    return entry


def _value(node: ast.expr, module: ModuleType) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return getattr(module, node.id, None)
    return {} if isinstance(node, ast.Dict) and not node.keys else None


if __name__ == "__main__":
    FILE.write_text(render(deepspeed_keys()), encoding="utf-8")
