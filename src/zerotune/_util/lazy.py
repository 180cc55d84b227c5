"""Names of a package that are loaded on first use, from one list: the package's stub."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def exports(
    package: str, file: str
) -> tuple[list[str], Callable[[], list[str]], Callable[[str], Any]]:
    """A package's ``__all__``, ``__dir__`` and ``__getattr__``, as its stub says.

    The stub, ``__init__.pyi`` beside ``__init__.py``, is what type checkers and editors read; a
    name it imports is imported here when somebody first asks for it.

    Args:
        package: The package's ``__name__``.
        file: Its ``__file__``.
    """
    homes: dict[str, str] = {}
    declared: list[str] = []
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            homes |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            declared.append(node.target.id)
    names = [*homes, *declared]

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return names, lambda: sorted(names), load
