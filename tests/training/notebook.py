"""What rich asks of a notebook's kernel."""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest


class ZMQInteractiveShell:
    """The class name by which rich detects a kernel."""


class Output:
    """ipywidgets' ``Output``, which keeps its last output."""

    shown: list[Output] = []
    """All open outputs of the page."""

    def __init__(self) -> None:
        self.holds: list[str] = []

    def __enter__(self) -> Output:
        Output.shown.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        Output.shown.pop()

    def clear_output(self, *, wait: bool = False) -> None:  # noqa: ARG002
        self.holds.clear()


displayed: list[Any] = []


def display(*objects: Any) -> None:
    """Display like IPython: in the open output, else in the cell."""
    for each in objects:
        if Output.shown:
            Output.shown[-1].holds.append(_plain(each))
        else:
            displayed.append(each)


def page() -> str:
    """Return everything shown at the moment, as text."""
    return "\n".join(
        "\n".join(each.holds) if isinstance(each, Output) else _plain(each) for each in displayed
    )


def _plain(shown: Any) -> str:
    return shown._repr_mimebundle_(None, None)["text/plain"]


@contextlib.contextmanager
def kernel(*, widgets: bool):
    """Emulate a kernel, with or without ipywidgets."""
    parts: dict[str, Any] = {"IPython": {}, "IPython.display": {"display": display}}
    if widgets:
        parts["ipywidgets"] = {"Output": Output}
    displayed.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
        patch.setitem(sys.modules, "ipywidgets", None)
        for name, holds in parts.items():
            module = ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            vars(module).update(holds)
            patch.setitem(sys.modules, name, module)
        yield
