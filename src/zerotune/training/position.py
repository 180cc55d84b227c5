"""Where a process is in its work, found on its stacks only when somebody asks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, Final

import attrs
import torch

_HOLDERS: Final = ("self", "module", "sub_module", "param")
"""Local names under which torch and DeepSpeed hold the module or parameter they work for."""


@attrs.frozen(kw_only=True)
class Position:
    """Step, phase and module of one rank."""

    step: int
    """The optimizer step under way, counted from 1."""
    phase: str | None
    """``"data"``, ``"forward"``, ``"backward"``, ``"optimizer"``, ``"ema"``; ``None``: none."""
    module: str | None
    """Dotted name of the innermost module at work; ``None``: none is."""
    line: str = ""
    """File, line and function where Python is."""

    def __str__(self) -> str:
        if self.phase is None:
            words = f"is between the phases of step {self.step}"
        elif self.module is None:
            words = f"is in {self.phase} at step {self.step}"
        else:
            words = f"is in {self.phase} of {self.module} at step {self.step}"
        return f"{words} ({self.line})" if self.line else words


def names_of(model: torch.nn.Module) -> dict[int, str]:
    """Dotted name by ``id`` of each module, and for each parameter the name of its module.

    The root has the name of its class.
    """
    names = {}
    for name, module in model.named_modules():
        names[id(module)] = name or type(model).__name__
        for parameter in module.parameters(recurse=False):
            names[id(parameter)] = names[id(module)]
    return names


def look(
    names: Mapping[int, str], *, step: int, phase: str | None, thread: int
) -> tuple[Position, int]:
    """Where a thread is, and a number that changes whenever it moves on.

    Costs nothing until it is called: the stacks of all threads are read once. A backward pass on
    a GPU runs in threads of its own; their modules count too.

    Args:
        names: As ``names_of`` gave them.
        step: The optimizer step under way.
        phase: The phase under way.
        thread: ``ident`` of the thread that trains.
    """
    frames = sys._current_frames()
    own = threading.get_ident()
    stack = list(_outwards(frames.get(thread)))
    module = _module(stack, names)
    for ident, frame in frames.items():
        if module is None and ident not in (thread, own):
            module = _module(list(_outwards(frame)), names)
    position = Position(step=step, phase=phase, module=module, line=_line(stack))
    return position, hash(tuple((frame.f_code, frame.f_lasti) for frame in stack))


def look_back(
    error: BaseException, names: Mapping[int, str], *, step: int, phase: str | None
) -> Position:
    """Where an exception came from."""
    trace: TracebackType | None = error.__traceback__
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    inwards = frames[::-1]
    return Position(step=step, phase=phase, module=_module(inwards, names), line=_line(inwards))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(stack: list[FrameType], names: Mapping[int, str]) -> str | None:
    for frame in stack:
        held: Mapping[str, Any] = frame.f_locals
        for name in _HOLDERS:
            found = names.get(id(held.get(name)))
            if found is not None:
                return found
    return None


def _line(stack: list[FrameType]) -> str:
    if not stack:
        return ""
    frame = stack[0]
    file = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
