"""``ForeignUses``: let weights wait for a step where torch cannot intercept their use.

The class of a held tensor intercepts every torch function. Two kinds of code use weights otherwise:
compiled code, whose guards read the weights first, and kernels that a module calls with the
weights' addresses.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any, Final

import torch

from zerotune._util.modules import ModelParts
from zerotune.backend.step.awaited import wait_for

CALL_COMPILED: Final = (
    "a module's __call__ is compiled, and its guards read the weights before zerotune can wait; "
    "instead, use the trainer's compile=True or module.forward = torch.compile(module.forward)"
)
COMPILED: Final = (
    "a compiled function may use the weights, and its guards read them before zerotune can wait"
)
VIEWED: Final = (
    "views of the weights outside the model (parameter.detach(), .data, an array) would show the "
    "values from before the step"
)


class ForeignUses:
    """Let compiled code and foreign kernels wait for the weights of a model.

    Args:
        parts: The parts of the model.
        compiling: Function that is called when a compilation begins that may use the weights.
    """

    def __init__(self, parts: ModelParts, *, compiling: Callable[[], None]) -> None:
        self._parts, self._compiling = parts, compiling
        self._hooks: list[Any] = []
        self._watch: CompilerWatch | None = None
        self._compiled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def wait_before_kernels(self, written: Collection[int]) -> None:
        """Make modules outside torch wait for their weights before their forward.

        Such modules may call kernels that are not torch functions and use the weights' addresses.

        Args:
            written: Ids of the parameters that steps update.
        """
        self._parts.refresh()
        for module in self._parts.modules:
            if type(module).__module__.startswith("torch."):
                continue
            if any(id(each) in written for each in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(_wait_for_direct, prepend=True))

    def wait_for_compiled(self) -> bool:
        """Make compiled forward methods wait for updates; return whether all of them can."""
        # Do not import the compiler, which takes seconds; if code is compiled, it is imported
        # already.
        if self._watch is None and "torch._dynamo" in sys.modules:
            self._watch = CompilerWatch(self._compiling)
        self._parts.refresh()
        for module in self._parts.modules:
            attributes = vars(module)
            if (
                attributes.get("_compiled_call_impl") is not None
                or "_orig_mod" in attributes["_modules"]
            ):
                # The call itself is compiled, and its guards read the weights before any hook runs.
                return False
            if "forward" in attributes and hasattr(
                attributes["forward"], "_torchdynamo_orig_callable"
            ):
                if module not in self._compiled:
                    self._hooks += [
                        module.register_forward_pre_hook(_enter_compiled, prepend=True),
                        module.register_forward_hook(_leave_compiled, always_call=True),
                    ]
                self._compiled.add(module)
        return True

    def close(self) -> None:
        """Remove all hooks, and stop detecting compilations."""
        if self._watch is not None:
            self._watch.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class CompilerWatch:
    """Detect when torch starts a compilation that ``_enter_compiled`` has not announced.

    When such a compilation starts, ``call`` runs before torch reads the code and the weights.
    """

    _inside = threading.local()

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._handler = sys.modules["torch._dynamo"].callback.callback_handler
        self._handler.register_start_callback(self._begins)

    def end(self) -> None:
        """Stop detecting compilations."""
        self._handler.remove_start_callback(self._begins)

    @classmethod
    def enter(cls, by: int) -> None:
        """Count the calls in progress whose compiled code itself waits until weights are updated.

        Args:
            by: 1 before the call, -1 after it.
        """
        cls._inside.depth = getattr(cls._inside, "depth", 0) + by

    def _begins(self, _arguments: Any) -> None:
        if not getattr(self._inside, "depth", 0):
            self._call()


def _enter_compiled(module: torch.nn.Module, _inputs: Any) -> None:
    """Wait for the weights of a module whose forward is compiled."""
    if not torch.compiler.is_compiling():
        for parameter in module.parameters():
            wait_for(parameter)
        CompilerWatch.enter(1)


def _leave_compiled(_module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
    if not torch.compiler.is_compiling():
        CompilerWatch.enter(-1)


def _wait_for_direct(module: torch.nn.Module, _inputs: Any) -> None:
    # A compilation that contains this module has already settled the step.
    if not torch.compiler.is_compiling():
        for parameter in module.parameters(recurse=False):
            wait_for(parameter)
