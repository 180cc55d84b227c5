"""Expected and measured memory of a run, and errors that suggest a plan when memory runs out."""

from __future__ import annotations

import functools
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import psutil
import torch

from zerotune._util.proc import status_field
from zerotune._util.text import format_size
from zerotune.backend.accelerator import accelerator_for, accelerator_of, current_accelerator
from zerotune.errors import NothingFitsError, OutOfMemoryError, PlanError
from zerotune.plan.memory.estimate import CONTEXT
from zerotune.plan.memory.items import DURING, EMAPlace, Workload
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.plan.values import AUTO
from zerotune.platform import detect_platform

if TYPE_CHECKING:
    from zerotune.plan.memory.items import Place
    from zerotune.plan.plan import Advice, MemoryEstimate, ResolvedPlan
    from zerotune.plan.work import ActivationFacts, ArithmeticFacts


_TRIAL_BYTES: Final = 16 * 2**20
"""Bytes to page-lock for testing how the system counts them."""


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
    """Estimate a running plan's memory per rank and component.

    Args:
        plan: A plan that was resolved with its model.
        emas: Storage location of each ``EMAShadow``: ``"host"``, ``"device"`` or ``"nvme"``.
        activations: Activation memory of a forward and backward pass; ``None`` if unknown.
        arithmetic: Compute cost of a forward and backward pass, from which the step time is
            predicted.
        size: Height and width of the images in pixels.
        frames: Frames per clip.
        gradient_checkpointing: Whether blocks are recomputed.

    Raises:
        UnresolvedPlanError: The plan was resolved without a model.
    """
    places = list(emas)
    height, width = size or (None, None)
    if plan.model is not None and activations is not None:
        model = attrs.evolve(plan.model, activations=activations, arithmetic=arithmetic)
        plan = attrs.evolve(plan, model=model)
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


_counted_apart_here: Final = functools.cache(lambda: counted_apart(host_now))


def host_peak() -> int:
    """Return the peak RAM of this process in bytes, including page-locked memory."""
    locked = locked_peak()
    return _resident_peak() + (locked if locked and _counted_apart_here() else 0)


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
    """Return the RAM that this process uses now, in bytes."""
    return int(psutil.Process().memory_info().rss)


def locked_peak() -> int:
    """Return the peak number of bytes that torch has page-locked in this process."""
    return current_accelerator().page_locked("peak") or 0


def counted_apart(
    count: Callable[[], int],
    *,
    lock: Callable[[int], object] = lambda n: torch.ones(n, dtype=torch.uint8).pin_memory(),
) -> bool:
    """Return whether the system's memory figure for this process omits page-locked memory.

    The result depends on the driver. The figure omits page-locked memory that the driver maps as
    device memory, but includes memory that it maps as shared or anonymous pages. The test
    page-locks 16 MiB.

    Args:
        count: Function that returns the system's memory figure for this process in bytes.
        lock: Function that allocates the given number of bytes as page-locked memory.
    """
    before = count()
    block = lock(_TRIAL_BYTES)
    grown = count() - before
    del block
    return grown < _TRIAL_BYTES // 2


def device_peak(device: torch.device) -> int | None:
    """Return this process's peak device memory in bytes; ``None`` if training uses host memory.

    The value includes the device's context and all libraries, so the run needs a device with at
    least this much memory.
    """
    memory = accelerator_of(device).memory()
    return None if memory is None else memory.peak


# -- Out of memory: the expected and the available memory, and a plan that fits.


_OUT_OF_MEMORY: Final = re.compile(
    r"out of memory|can.t allocate memory|cannot allocate memory|not enough memory|ALLOC_FAILED",
    re.IGNORECASE,
)
_ON_DEVICE: Final = re.compile(r"\b(CUDA|HIP|XPU|MPS|CUDNN|CUBLAS)", re.IGNORECASE)
_BY_THE_DRIVER: Final = re.compile(r"\b(CUDA|HIP) error: out of memory", re.IGNORECASE)
"""Driver message for a failed page-locked allocation; torch's device allocator reports more detail.
On a full device, the message may also come from the context or a library."""
_PAGE_LOCKED: Final = "a page-locked allocation failed: "


@attrs.frozen(kw_only=True)
class Situation:
    """Plan and current activity of a run, for an out-of-memory error's message."""

    plan: ResolvedPlan
    doing: str
    """Current activity, such as ``"forward of optimizer step 12"`` or ``"starting the engine"``."""
    estimate: MemoryEstimate | None = None
    """Expected memory; by default the plan's estimate without activations."""
    limits: Limits | None = None
    """Available memory; measured by default."""

    def _error(self, error: BaseException) -> OutOfMemoryError:
        estimate = self.estimate
        if estimate is None and self.plan.model is not None:
            estimate = expected_memory(self.plan)
        limits = self.limits or Limits.now(self.plan)
        place = limits._exhausted_place(error)
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if place == "host" and _BY_THE_DRIVER.search(said):
            said = _PAGE_LOCKED + said
        parts = [f"{place} memory ran out in {self.doing} ({said[:160]})"]
        if estimate is not None:
            peak = estimate.peak(_place_counted(self.plan, place))
            parts.append(f"the plan expected {format_size(peak.nbytes)} {DURING[peak.phase]}")
        parts.append(limits.words(place))
        advice, plan = limits._what_would_fit(self.plan, estimate, place)
        return OutOfMemoryError(
            "; ".join(parts), key=f"memory.{place}", fix=advice, original=error, plan=plan
        )


@contextmanager
def advising(situation: Callable[[], Situation]) -> Iterator[None]:
    """If the block runs out of memory, raise an error that suggests a plan that fits."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        cause = out_of_memory(error)
        if cause is None or isinstance(error, OutOfMemoryError):
            raise
        raise situation()._error(cause) from error


def out_of_memory(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error in an exception's chain of causes, or ``None``.

    zerotune's own errors are ignored, because their messages already describe the shortage.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, MemoryError | torch.OutOfMemoryError):
            return current
        ours = type(current).__module__.startswith("zerotune.")
        plain = isinstance(current, RuntimeError | OSError) and not ours
        if plain and _OUT_OF_MEMORY.search(str(current)):
            return current
        current = current.__cause__ or current.__context__
    return None


def _place_counted(plan: ResolvedPlan, place: Place) -> Place:
    return "host" if plan.platform.accelerator == "cpu" else place


@attrs.frozen(kw_only=True)
class Limits:
    """Memory limits of this process and of all ranks on this machine."""

    device: int | None
    """Device memory available to this process in bytes; ``None`` without a device."""
    device_free: int | None = None
    allocated: int | None = None
    """Peak device bytes held by torch."""
    host: int
    """RAM available to all ranks on this machine, in bytes."""
    host_free: int

    @classmethod
    def now(cls, plan: ResolvedPlan) -> Limits:
        """Measure the limits of this process and machine."""
        device = free = allocated = None
        figures = accelerator_for(plan.platform.accelerator).memory()
        if figures is not None:
            free, allocated = figures.free, figures.allocated_peak
            # Memory of other processes is not available; this process's context is in the estimate.
            others = figures.total - free - figures.reserved - CONTEXT
            device = figures.total - max(0, others)
        elif plan.platform.vram is not None:
            device = plan.platform.vram
        memory = detect_platform(log=False).host_memory
        held = host_now()
        host = min(memory.limit, memory.available + held * plan.world_size)
        process = _process_limit()
        if process is not None:
            host = min(host, process * plan.world_size)
        left = memory.available if process is None else min(memory.available, process - held)
        return cls(
            device=device, device_free=free, allocated=allocated, host=host, host_free=max(0, left)
        )

    def words(self, place: Place) -> str:
        """Describe used and free memory.

        Args:
            place: ``"host"`` or ``"device"``.
        """
        if place == "device" and self.device is not None:
            held = "" if self.allocated is None else f"torch held {format_size(self.allocated)}; "
            free = "" if self.device_free is None else f", {format_size(self.device_free)} is free"
            return f"{held}this process can use up to {format_size(self.device)}{free}"
        peak, free = format_size(host_peak()), format_size(self.host_free)
        return f"this process used up to {peak}, and {free} of host memory is free"

    def _exhausted_place(self, error: BaseException) -> Place:
        if isinstance(error, torch.OutOfMemoryError):
            return "device"
        if _BY_THE_DRIVER.search(str(error)):
            room = self.device_free is None or self.device_free > CONTEXT
            return "host" if room else "device"
        return "device" if _ON_DEVICE.search(str(error)) else "host"

    def _what_would_fit(
        self, plan: ResolvedPlan, estimate: MemoryEstimate | None, place: Place
    ) -> tuple[str, DeepSpeedPlan | None]:
        if estimate is None or plan.model is None:
            return "use DeepSpeedPlan.advise(model) to find a plan that fits", None
        counted = _place_counted(plan, place)
        has = self.host // plan.world_size if counted == "host" else self.device or 0
        peak = estimate.peak(counted).nbytes
        if peak < has // 2:
            return (
                f"the plan needs only {format_size(peak)} of the {format_size(has)} available "
                "to this rank; check whether the rest is used by other processes, the objective, "
                "the batch, or tensors kept between steps"
            ), None
        # The plan that failed does not fit, whatever its estimate: look for a smaller one.
        if counted == "device":
            smaller = {"device": min(self.device or estimate.device, estimate.device)}
        else:
            host = min(self.host, estimate.host * plan.world_size)
            smaller = {"device": self.device or 0, "host": host}
        less = attrs.evolve(self, **smaller)
        free_disk = 0
        with suppress(OSError):
            free_disk = shutil.disk_usage(Path(tempfile.gettempdir())).free
        failure: PlanError | None = None
        for disk in (0, free_disk):
            try:
                fitting = less._fitting(plan, estimate, disk=disk)
            except PlanError as error:
                failure = error
            else:
                # The fastest plan would fill the device again, which has just been too small.
                least = next(one for one in fitting.candidates if one.fits and one.streamed is None)
                fitting = attrs.evolve(fitting, chosen=least)
                return _advice_words(fitting), fitting.plan
        fix = failure.fix if isinstance(failure, NothingFitsError) else None
        return f"no plan fits this machine: {fix or failure}; or reduce the batch size", None

    def _fitting(self, plan: ResolvedPlan, estimate: MemoryEstimate, *, disk: int) -> Advice:
        work, model = estimate.workload, estimate.resolved.model
        return DeepSpeedPlan.advise(
            model,
            vram=self.device,
            ram=self.host,
            nvme=disk,
            batch=plan.micro_batch_size,
            resolution=None
            if work.height is None or work.width is None
            else (work.height, work.width),
            # Models without frames_per_latent take no frames; their activations were counted at
            # this very size.
            frames=None if model is None or model.frames_per_latent is None else work.frames,
            world_size=plan.world_size,
            precision=plan.precision,
            gradient_accumulation_steps=plan.gradient_accumulation_steps,
            optimizer=_optimizer_argument(plan.plan) or "AdamW",
            ema=work.ema,
            frozen_bytes=work.frozen_bytes,
            model_in_memory=work.model_in_memory,
            streamed=False,
            platform=plan.platform,
        )


def _process_limit() -> int | None:
    """Return the ``ulimit`` on a process's memory in bytes; ``None`` without a limit."""
    try:
        import resource
    except ImportError:
        return None
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    finite = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(finite, default=None)


def _advice_words(advice: Advice) -> str:
    more = ", gradient_checkpointing=True" if advice.gradient_checkpointing else ""
    if advice.activation_offload:
        more = ", activations=ActivationOffload()"
    needs = ", ".join(
        f"{format_size(nbytes)} {where}"
        for where, nbytes in (("device", advice.estimate.device), ("host", advice.estimate.host))
        if nbytes
    )
    plan = f"DeepSpeedPlan.from_dict({advice.plan.to_dict()!r})"
    return f"{advice.chosen.title} needs {needs} per rank: Trainer(plan={plan}{more})"


def _optimizer_argument(plan: DeepSpeedPlan) -> str | dict[str, Any] | None:
    """Return the optimizer for ``advise``, without ``"auto"`` values."""
    written = plan.optimizer
    if written is None or not isinstance(written.type, str):
        return None
    params = {key: value for key, value in (written.params or {}).items() if value != AUTO}
    return {"type": written.type, "params": params} if params else written.type
