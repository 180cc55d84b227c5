"""What a run needs of memory, by the plan's own model, and what the process holds."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import psutil
import torch

from zerotune._util.proc import status_field
from zerotune.plan.memory.estimate import EMAPlace, Workload

if TYPE_CHECKING:
    from zerotune.plan.memory.estimate import MemoryEstimate
    from zerotune.plan.model import ActivationFacts, ArithmeticFacts, ResolvedPlan

_PROBE: Final = 16 * 2**20
"""Bytes that are page-locked to see where they are counted."""


def expected_memory(
    plan: ResolvedPlan,
    *,
    emas: Iterable[EMAPlace] = (),
    activations: ActivationFacts | None = None,
    arithmetic: ArithmeticFacts | None = None,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    gradient_checkpointing: bool = False,
) -> MemoryEstimate:
    """What a run needs, per rank and by component: ``DeepSpeedPlan.estimate`` for a running plan.

    Args:
        plan: A resolved plan with its model known.
        emas: Where each ``EMAShadow`` that runs along keeps its copy.
        activations: What a pass keeps; left out when not known.
        arithmetic: What a pass computes, so that its time can be predicted.
        size: Height and width of the images in pixels.
        frames: Of clips.
        gradient_checkpointing: Whether blocks are recomputed.

    Raises:
        UnresolvedPlanError: The plan was resolved without a model.
    """
    places = list(emas)
    height, width = size or (None, None)
    if plan.model is not None and activations is not None:
        known = attrs.evolve(plan.model, activations=activations, arithmetic=arithmetic)
        plan = attrs.evolve(plan, model=known)
    workload = Workload(
        batch=plan.micro_batch_size,
        height=height,
        width=width,
        frames=frames,
        gradient_checkpointing=gradient_checkpointing,
        ema=places[0] if places else "none",
    )
    estimate = plan.estimate(workload)
    further = [
        item
        for place in places[1:]
        for item in plan.estimate(attrs.evolve(workload, ema=place)).items
        if item.component == "EMA"
    ]
    return attrs.evolve(estimate, items=(*estimate.items, *further))


def host_peak() -> int:
    """Most RAM this process has ever held, bytes, page-locked memory included."""
    locked = locked_peak()
    apart = bool(locked) and _counted_apart_here()
    return _resident_peak() + (locked if apart else 0)


def _resident_peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would report the peak of the process this one was forked from.
        kilobytes = status_field(status.read_text(), "VmHWM")
        if kilobytes is not None:
            return int(kilobytes) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_now() -> int:
    """RAM this process holds now, bytes."""
    return int(psutil.Process().memory_info().rss)


def locked_peak() -> int:
    """Most host memory torch has page-locked for a GPU in this process, bytes."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def counted_apart(count: Callable[[], int], *, lock: Callable[[int], object] | None = None) -> bool:
    """Whether page-locked memory is missing from what the system says of this process.

    Some drivers map it as a device's memory, which belongs to nobody; others as shared or
    anonymous pages. Page-locks 16 MiB to see which.

    Args:
        count: The system's figure, bytes.
        lock: Page-locks and fills so many bytes; torch does by default.
    """
    before = count()
    block = (lock or _lock)(_PROBE)
    grown = count() - before
    del block
    return grown < _PROBE // 2


def _lock(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8).pin_memory()


@functools.cache
def _counted_apart_here() -> bool:
    return counted_apart(host_now)


@attrs.frozen(kw_only=True)
class DeviceFigures:
    """What the driver and torch's allocator say of one device, bytes."""

    total: int
    free: int
    """Of the whole device, now."""
    reserved: int
    """What torch's allocator holds now."""
    most_reserved: int
    """What it has held at most."""
    others: int = 0
    """What other processes hold, as far as the driver tells."""

    @classmethod
    def now(cls, device: torch.device) -> DeviceFigures:
        """Ask both."""
        free, total = torch.cuda.mem_get_info(device)
        return cls(
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(device),
            most_reserved=torch.cuda.max_memory_reserved(device),
            others=_others(device),
        )

    @property
    def beside(self) -> int:
        """What this process holds beside torch's allocator: context, kernels, libraries.

        It only grows: cuBLAS, cuDNN and NCCL load when they are first used.
        """
        return max(0, self.total - self.free - self.reserved - self.others)

    @property
    def peak(self) -> int:
        """The most this process has taken of the device."""
        return self.most_reserved + self.beside


@functools.cache
def _others(device: torch.device) -> int:
    """Asked once: a step must not wait for it."""
    try:
        pynvml = importlib.import_module("pynvml")
        handle = torch.cuda._get_pynvml_handler(device)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # noqa: BLE001 - a library that may be missing, of a driver that may not tell
        return 0
    held = {one.pid: one.usedGpuMemory or 0 for one in running}
    # In a container the driver may number processes as the machine does: then none is known to be
    # another's, and nothing is taken off.
    return sum(held.values()) - held[os.getpid()] if os.getpid() in held else 0


def device_peak(device: torch.device) -> int | None:
    """Most GPU memory this process has taken, bytes; ``None`` without a GPU.

    With the context and all libraries, as the driver counts them now: what a card must have.
    """
    return DeviceFigures.now(device).peak if device.type == "cuda" else None
