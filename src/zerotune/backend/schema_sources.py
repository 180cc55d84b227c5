"""Where DeepSpeed keeps the keys that no pydantic model declares: calls in its own code.

``get_scalar_param(section, NAME, NAME_DEFAULT)`` and ``section.get(NAME, NAME_DEFAULT)`` name a key
and its default by constants of the module, so the code itself is the list.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

_READERS: Final = frozenset({"get_scalar_param", "get_list_param", "get_dict_param"})
_UNKNOWN: Final = object()


def module_or_none(name: str) -> ModuleType | None:
    """A module of DeepSpeed; ``None`` where this release does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def read_keys(module: ModuleType | None, *sections: str) -> dict[str, Any]:
    """Keys that a module reads from dicts held in variables of these names, with defaults.

    A default that is not a constant is ``None``.
    """
    if module is None:
        return {}
    tree = ast.parse(inspect.getsource(module))
    return dict(_reads(tree, module, frozenset(sections)))


def _reads(
    tree: ast.AST, module: ModuleType, sections: frozenset[str]
) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        where, arguments = _where(node)
        if where not in sections or not arguments:
            continue
        key = _constant(arguments[0], module)
        default = _constant(arguments[1], module) if len(arguments) > 1 else None
        if isinstance(key, str):
            yield key, None if default is _UNKNOWN else default


def _where(call: ast.Call) -> tuple[str | None, list[ast.expr]]:
    """The dict a call reads from, and its other arguments."""
    function = call.func
    if isinstance(function, ast.Name) and function.id in _READERS and call.args:
        return ast.unparse(call.args[0]), call.args[1:]
    if isinstance(function, ast.Attribute) and function.attr == "get":
        return ast.unparse(function.value), call.args
    return None, []


def _constant(node: ast.expr, module: ModuleType) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return getattr(module, node.id, _UNKNOWN)
    return {} if isinstance(node, ast.Dict) and not node.keys else _UNKNOWN
