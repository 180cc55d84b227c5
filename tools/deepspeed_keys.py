"""Keys that the installed DeepSpeed reads one by one, found in its source.

``get_scalar_param(section, NAME, NAME_DEFAULT)`` and ``section.get(NAME, NAME_DEFAULT)`` name a key
and its default by module constants, so the source is the list.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

from zerotune.errors import InvalidValueError
from zerotune.plan.values import check_json

_READERS: Final = frozenset({"get_scalar_param", "get_list_param", "get_dict_param"})


def keys_read_by(module: str, *variables: str) -> dict[str, Any]:
    """Return the keys that a module reads from dictionaries in these variables, with defaults.

    A default that is not a constant is ``None``. The result is empty if this release lacks the
    module.
    """
    installed = module_or_none(module)
    if installed is None:
        return {}
    tree = ast.parse(inspect.getsource(installed))
    return {key: d for variable in variables for key, d in _reads(tree, installed, variable)}


def module_or_none(name: str) -> ModuleType | None:
    """Import a module of DeepSpeed; return ``None`` if this release lacks it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def is_json(value: Any) -> bool:
    """Return whether JSON can represent a value."""
    try:
        check_json(plain(value), "default")
    except InvalidValueError:
        return False
    return True


def plain(value: Any) -> Any:
    """Convert enums and instances of subclasses (such as DeepSpeed's ``pp_int``) to plain types."""
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


def _reads(tree: ast.AST, module: ModuleType, variable: str) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        where, arguments = _where(node)
        if where != variable or not arguments:
            continue
        key, *rest = arguments
        name, default = _value(key, module), _value(rest[0], module) if rest else None
        if isinstance(name, str):
            yield name, plain(default) if is_json(default) else None


def _where(call: ast.Call) -> tuple[str | None, list[ast.expr]]:
    """Return the dict a call reads from, and the call's other arguments."""
    function = call.func
    if isinstance(function, ast.Name) and function.id in _READERS and call.args:
        return ast.unparse(call.args[0]), call.args[1:]
    if isinstance(function, ast.Attribute) and function.attr == "get":
        return ast.unparse(function.value), call.args
    return None, []


def _value(node: ast.expr, module: ModuleType) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return getattr(module, node.id, None)
    return {} if isinstance(node, ast.Dict) and not node.keys else None
