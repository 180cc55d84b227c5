"""Lazy imports of a package's names, which are listed in its stub."""

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
    """Return ``__all__``, ``__dir__`` and ``__getattr__`` of a package, according to its stub.

    Type checkers and editors read the same stub, ``__init__.pyi`` beside ``__init__.py``. A name
    that it imports is imported here on first access.

    Args:
        package: ``__name__`` of the package.
        file: ``__file__`` of the package.
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
