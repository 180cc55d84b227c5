"""Page-locked host memory, kept at the size that is needed."""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch

from zerotune._util.environment import held
from zerotune._util.text import format_size
from zerotune.backend.ops import building
from zerotune.backend.proof import why_unproven
from zerotune.decisions import Decision
from zerotune.plan.model import ResolvedPlan, pins
from zerotune.plan.resolve import ROUNDING, SETTING, THRESHOLD, pins_natively
from zerotune.platform.detect import MachineProbe, first_line, host_memory

PINNING_KEY: Final = f"torch.{SETTING}"
_BACKEND: Final = "DS_PIN_MEMORY_BACKEND"
_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_PROBE: Final = 3 * 1024**2
"""Bytes; a power of two would be 4 MiB."""
_lock = threading.Lock()


def pin_exactly(
    plan: ResolvedPlan, *, resources: ExitStack, environ: Mapping[str, str] | None = None
) -> tuple[Decision, ...]:
    """Keep page-locked blocks from being rounded up to powers of two.

    torch is told so for this process; where it cannot be, DeepSpeed page-locks memory itself. What
    the user wrote into ``PYTORCH_ALLOC_CONF`` stands, and so does
    ``DS_PIN_MEMORY_BACKEND=native``, which does not round either.

    Args:
        plan: The plan about to start.
        resources: Receives what has to end with the engine.
        environ: Environment variables; this process's by default.
    """
    zero = plan.plan.zero_optimization
    sections = (zero.offload_optimizer, zero.offload_param) if zero is not None else ()
    rounds = plan.platform.accelerator in ROUNDING and plan.uses_deepspeed
    if not rounds or not any(map(pins, sections)):
        return ()
    environ = os.environ if environ is None else environ
    if environ.get(_BACKEND, "").strip().lower() == "native":
        return (_pinned(None, f"{_BACKEND}=native page-locks exact sizes itself"),)
    for variable in _VARIABLES:
        written = _setting_in(environ.get(variable, ""))
        if written is not None:
            return (_pinned(written, f"{variable} says so"),)
    why = _set_and_verify()
    if why is None:
        reason = "torch rounds page-locked blocks up to powers of two; from this size on no more"
        return (_pinned(THRESHOLD, reason),)
    return (_natively(plan, resources, why),)


def _setting_in(settings: str) -> str | None:
    pairs = (pair.partition(":") for pair in settings.split(","))
    return next((value.strip() for name, _, value in pairs if name.strip() == SETTING), None)


def _set_and_verify() -> str | None:
    """Change torch's setting; why it rounds all the same, if it does."""
    private: Any = torch._C
    read = getattr(private, "_accelerator_getAllocatorSettings", None)
    write = getattr(private, "_accelerator_setAllocatorSettings", None)
    if read is None or write is None:
        return "this torch has no such setting"
    with _lock:
        current = read() or ""
        if _setting_in(current) is None:
            try:
                # Setting one key alone would put the others back to their defaults.
                write(",".join(filter(None, (current, f"{SETTING}:{THRESHOLD}"))))
            except (RuntimeError, ValueError) as error:
                return f"torch refused the setting: {str(error).splitlines()[0]}"
    taken = _pinned_bytes_of(_PROBE)
    if taken is not None and taken >= 4 * 1024**2:
        return "torch took the setting and rounds all the same"
    return None


def _natively(plan: ResolvedPlan, resources: ExitStack, why: str) -> Decision:
    """Have DeepSpeed page-lock its buffers itself while the engine lives, where it can."""
    obstacle = _native_obstacle(plan)
    if obstacle is not None:
        return Decision(
            key=PINNING_KEY,
            before=None,
            after=None,
            reason=f"{why}, {obstacle}, so page-locked blocks take up to twice their size; "
            f"{_BACKEND}=native page-locks exact sizes",
            severity="warning",
        )
    resources.enter_context(held(_BACKEND, "native"))
    _refuse_in_time(resources)
    return _pinned(
        "native",
        f"{why}, so DeepSpeed page-locks its buffers to the byte itself, {_BACKEND}=native",
    )


def _native_obstacle(plan: ResolvedPlan) -> str | None:
    if not pins_natively(plan.platform):
        return "DeepSpeed itself needs no limit on locked memory (ulimit -l)"
    unproven = why_unproven("native page-locking", accelerator=plan.platform.accelerator)
    if unproven is not None:
        return f"DeepSpeed's own page-locking is not proven here ({unproven})"
    try:
        with building():
            importlib.import_module("deepspeed.utils.pin_memory").get_native_pinned_memory()
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        cause = error.__cause__ or error
        return f"DeepSpeed's op pin_memory cannot be built ({first_line(cause)})"
    return None


def _refuse_in_time(resources: ExitStack) -> None:
    """Raise where too little memory is left: there DeepSpeed's op ends the process (assertion)."""
    manager = importlib.import_module("deepspeed.utils.pin_memory").get_native_pinned_memory()
    lock = getattr(manager, "_new_locked", None)
    if lock is None:
        return

    def locked(example: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        wanted = math.prod(map(int, shape)) * example.element_size()
        # What others would be swapped out for may be taken too.
        free = host_memory(MachineProbe(), with_swap=True).available
        if wanted > free:
            raise MemoryError(
                f"not enough memory: {format_size(wanted)} are to be page-locked, "
                f"{format_size(free)} are free"
            )
        taken: torch.Tensor = lock(example, shape)
        return taken

    manager._new_locked = locked
    resources.callback(vars(manager).pop, "_new_locked", None)


def _pinned_bytes_of(nbytes: int) -> int | None:
    """What page-locking ``nbytes`` takes; ``None`` where torch does not tell."""
    statistics = getattr(torch.cuda, "host_memory_stats", None)
    if statistics is None or not torch.cuda.is_available():
        return None
    # A block of that size may be in the cache, which would look as if none were taken.
    before = int(statistics().get("allocated_bytes.allocated", 0))
    block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    taken = int(statistics().get("allocated_bytes.allocated", 0)) - before
    del block
    return taken


def _pinned(value: Any, reason: str) -> Decision:
    return Decision(key=PINNING_KEY, before=None, after=value, reason=reason)
