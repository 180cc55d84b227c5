"""Page-locked host memory of exactly the size that is needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, Final

import torch

from zerotune.decisions import Decision
from zerotune.plan.pinning import ROUNDING, SETTING, THRESHOLD
from zerotune.plan.resolved import ResolvedPlan

KEY: Final = f"torch.{SETTING}"
_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_PROBE: Final = 3 * 1024**2
"""Bytes; a power of two would be 4 MiB."""
_lock = threading.Lock()


def pin_exactly(
    plan: ResolvedPlan, *, environ: Mapping[str, str] | None = None
) -> tuple[Decision, ...]:
    """Keep torch from rounding page-locked blocks up to powers of two, for this process.

    What the user wrote into ``PYTORCH_ALLOC_CONF`` stands, and so does
    ``DS_PIN_MEMORY_BACKEND=native``, which does not round either.

    Args:
        plan: The plan about to start.
        environ: Environment variables; this process's by default.

    Returns:
        What was done and found; nothing for a plan that pins nothing.
    """
    if not _pins(plan):
        return ()
    environ = os.environ if environ is None else environ
    if environ.get("DS_PIN_MEMORY_BACKEND", "").strip().lower() == "native":
        return (_decision(None, "DS_PIN_MEMORY_BACKEND=native page-locks exact sizes itself"),)
    for variable in _VARIABLES:
        written = _written(environ.get(variable, ""))
        if written is not None:
            return (_decision(written, f"{variable} says so"),)
    return (_set_and_verify(),)


def _pins(plan: ResolvedPlan) -> bool:
    if plan.platform.accelerator not in ROUNDING or not plan.uses_deepspeed:
        return False
    zero = plan.plan.zero_optimization
    sections = (zero.offload_optimizer, zero.offload_param) if zero is not None else ()
    return any(section is not None and section.pin_memory is True for section in sections)


def _written(settings: str) -> str | None:
    pairs = (pair.partition(":") for pair in settings.split(","))
    return next((value.strip() for name, _, value in pairs if name.strip() == SETTING), None)


def _set_and_verify() -> Decision:
    private: Any = torch._C
    read = getattr(private, "_accelerator_getAllocatorSettings", None)
    write = getattr(private, "_accelerator_setAllocatorSettings", None)
    if read is None or write is None:
        return _rounded("this torch has no such setting")
    with _lock:
        current = read() or ""
        if _written(current) is None:
            try:
                # Setting one key alone would put the others back to their defaults.
                write(",".join(filter(None, (current, f"{SETTING}:{THRESHOLD}"))))
            except (RuntimeError, ValueError) as error:
                return _rounded(f"torch refused the setting: {str(error).splitlines()[0]}")
    taken = _pinned_bytes_of(_PROBE)
    if taken is not None and taken >= 4 * 1024**2:
        return _rounded("torch took the setting and rounds all the same")
    return _decision(
        THRESHOLD, "torch rounds page-locked blocks up to powers of two; from this size on no more"
    )


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


def _rounded(why: str) -> Decision:
    return Decision(
        key=KEY,
        before=None,
        after=None,
        reason=f"{why}, so page-locked blocks take up to twice their size; "
        "DS_PIN_MEMORY_BACKEND=native page-locks exact sizes",
        severity="warning",
    )


def _decision(value: Any, reason: str) -> Decision:
    return Decision(key=KEY, before=None, after=value, reason=reason)
