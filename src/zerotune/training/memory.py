"""What a run needs of memory, by the plan's own model, and what the process holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import psutil
import torch

from zerotune._util.proc import status_field
from zerotune.plan.memory.model import EMAPlace, Workload

if TYPE_CHECKING:
    from zerotune.plan.api import MemoryEstimate, ResolvedPlan
    from zerotune.plan.model import ActivationFacts


def expected_memory(
    plan: ResolvedPlan,
    *,
    emas: Iterable[EMAPlace] = (),
    activations: ActivationFacts | None = None,
    size: tuple[int, int] | None = None,
    gradient_checkpointing: bool = False,
) -> MemoryEstimate:
    """What a run needs, per rank and by component: ``DeepSpeedPlan.estimate`` for a running plan.

    Args:
        plan: A resolved plan with its model known.
        emas: Where each ``EMAShadow`` that runs along keeps its copy.
        activations: What a pass keeps; left out when not known.
        size: Height and width of the images in pixels.
        gradient_checkpointing: Whether blocks are recomputed.

    Raises:
        UnresolvedPlanError: The plan was resolved without a model.
    """
    places = list(emas)
    height, width = size or (None, None)
    if plan.model is not None and activations is not None:
        plan = attrs.evolve(plan, model=attrs.evolve(plan.model, activations=activations))
    workload = Workload(
        batch=plan.micro_batch_size,
        height=height,
        width=width,
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
    """Most RAM this process has ever held, bytes."""
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


def device_peak(device: torch.device) -> int | None:
    """Most GPU memory torch has allocated in this process, bytes; ``None`` without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
