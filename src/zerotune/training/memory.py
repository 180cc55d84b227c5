"""What a run's memory should be, by the plan's own model, and what was measured."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import attrs
import psutil
import torch

from zerotune._util.sizes import format_size
from zerotune.decisions import Decision
from zerotune.diffusion.activations import ActivationOffload
from zerotune.diffusion.data import BucketedDataset
from zerotune.diffusion.profiling import activation_peak, example_inputs
from zerotune.errors import (
    InvalidValueError,
    NothingFitsError,
    OutOfMemoryError,
    PlanError,
    ZeroTuneError,
)
from zerotune.plan.advise import Advice
from zerotune.plan.api import DeepSpeedPlan
from zerotune.plan.memory.estimate import CONTEXT, estimate_resolved
from zerotune.plan.memory.model import EMAPlace, Workload
from zerotune.plan.model import AUTO, ActivationCost, ActivationFacts
from zerotune.plan.text import DURING
from zerotune.plan.write import python_expression
from zerotune.platform import detect_platform

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.plan.api import ResolvedPlan
    from zerotune.plan.memory.model import MemoryEstimate, Place
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
    estimate = estimate_resolved(plan, workload)
    further = [
        item
        for place in places[1:]
        for item in estimate_resolved(plan, attrs.evolve(workload, ema=place)).items
        if item.component == "EMA"
    ]
    return attrs.evolve(estimate, items=(*estimate.items, *further))


def host_peak() -> int:
    """Most RAM this process has ever held, bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would report the peak of the process this one was forked from.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_now() -> int:
    """RAM this process holds now, bytes."""
    return int(psutil.Process().memory_info().rss)


def device_peak(device: torch.device) -> int | None:
    """Most GPU memory torch has allocated in this process, bytes; ``None`` without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# -- The activations of the very batch that is trained on, measured on the ``meta`` device.


_LATENT: Final = 8
"""Pixels of the image per pixel of the latent, along each side."""
_SAMPLES: Final = ("latents", "images", "pixel_values")
"""Where a batch keeps what is denoised, as the families name it."""


@attrs.frozen(kw_only=True)
class Activations:
    """What is known of a training step's activations."""

    size: tuple[int, int] | None = None
    """Height and width in pixels; ``None``: not known."""
    facts: ActivationFacts | None = None
    """Bytes; ``None``: not known."""
    why: str = ""
    """Why they are not known, or where the size came from."""


def known_activations(
    model: torch.nn.Module, data: Any, *, batch: int, checkpointed: bool = True
) -> Activations:
    """Measure one pass of a copy of the model without data, in the size that is trained on.

    Exact for diffusers' models as they are configured; adapters added later are not in it.

    Args:
        model: A diffusers model, anywhere; not touched.
        data: What the trainer reads; tells the size.
        batch: Samples per pass.
        checkpointed: Measure a pass with recomputed blocks too.
    """
    size, source = input_size(model, data)
    if size is None:
        return Activations(why=source)
    try:
        copy = _without_data(model)
        arguments = example_inputs(copy)(batch, *size)
        full = _cost(copy, arguments)
        less = None
        if checkpointed and hasattr(copy, "enable_gradient_checkpointing"):
            copy.enable_gradient_checkpointing()
            less = _cost(copy, arguments)
    except ZeroTuneError as error:
        return Activations(size=size, why=error.reason)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        # A model that cannot run without data, or not in this size, is still trained.
        return Activations(size=size, why=f"{type(error).__name__}: {error}"[:200])
    facts = ActivationFacts(full=full, checkpointed=less)
    return Activations(size=size, facts=facts, why=source)


def input_size(model: torch.nn.Module, data: Any) -> tuple[tuple[int, int] | None, str]:
    """Height and width in pixels of what is trained on, the largest, and where that was found."""
    config: Any = getattr(model, "config", None)
    if isinstance(data, BucketedDataset):
        sides = _bucket_sizes(data)
        if sides:
            return max(sides, key=lambda side: side[0] * side[1]), "the largest bucket"
    sample = _sample(data)
    for name in _SAMPLES:
        shape: Any = getattr(sample.get(name), "shape", ())
        if len(shape) >= 3:
            factor = 1 if _in_pixels(model, name) else _LATENT
            return (shape[-2] * factor, shape[-1] * factor), f"the data's {name!r}"
    side = config.get("sample_size") if isinstance(config, Mapping) else None
    if isinstance(side, int):
        factor = 1 if _in_pixels(model, "images") else _LATENT
        return (side * factor, side * factor), "the model's sample_size"
    return None, "neither data nor model tell the size of an image"


def input_positions(model: torch.nn.Module, size: tuple[int, int]) -> int:
    """Pixels of the model's own input: of latents, but for unconditional models of images."""
    factor = 1 if type(model).__name__ == "UNet2DModel" and _in_pixels(model, "images") else _LATENT
    return max(1, size[0] * size[1] // factor**2)


def _cost(model: Any, arguments: Mapping[str, Any]) -> ActivationCost:
    return ActivationCost(base=activation_peak(model, arguments), per_sample=0.0, per_pixel=0.0)


def _without_data(model: Any) -> Any:
    with torch.device("meta"):
        copy = type(model).from_config(model.config)
    # Not the model's own: diffusers warns of layers that a real run keeps in fp32.
    torch.nn.Module.to(copy, torch.bfloat16)
    for parameter in copy.parameters():
        # Gradients are an item of their own in an estimate.
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    return copy


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _in_pixels(model: torch.nn.Module, name: str) -> bool:
    """Whether a tensor of this name is counted in pixels, as ``example_inputs`` counts them."""
    unconditional = type(model).__name__ == "UNet2DModel"
    if not unconditional:
        return name != "latents"
    return getattr(model, "config", {}).get("in_channels") == 3


def _bucket_sizes(data: BucketedDataset) -> list[tuple[int, int]]:
    return [(bucket.height, bucket.width) for bucket in data.assignment.members]


def _sample(data: Any) -> Mapping[str, Any]:
    """One sample or batch, if that can be had without taking it from anybody."""
    source = getattr(data, "dataset", data)
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__") or not len(source):
        return {}
    try:
        found = source[0]
    except (LookupError, TypeError, ValueError, OSError):
        return {}
    return found if isinstance(found, Mapping) else {}


# -- Whether blocks are recomputed in the backward pass: as asked, or as the memory demands.


KEY: Final = "gradient_checkpointing"
_PER_POSITION: Final = 8 * 2**20
"""Bytes of activations for one position of one sample that no model comes near: SDXL keeps 0.4
MiB for each of its latent's, Flux 1.8. Where there is more room, nothing need be measured."""
_USED: Final = 0.95
"""Share of the memory that may be planned with."""


def recomputes(model: torch.nn.Module) -> bool:
    """Whether any block of a diffusers model is recomputed in the backward pass."""
    return any(getattr(module, KEY, False) is True for module in model.modules())


def set_checkpointing(
    engine: Engine, data: Any, wanted: bool | Literal["auto"]
) -> tuple[Decision, ...]:
    """Switch recomputation on or off until the engine is closed. Collective.

    diffusers recomputes without re-entering the autograd engine (``use_reentrant=False``), which
    is what stage 3 needs; losses are the same to the bit.

    Args:
        engine: What trains.
        data: Tells the size of a sample.
        wanted: ``"auto"`` asks the memory estimate, and leaves models alone that cannot
            recompute, do so already, or whose activations are not known.

    Raises:
        InvalidValueError: ``True`` for a model without gradient checkpointing.
    """
    model: Any = engine.module
    able, before = hasattr(model, "enable_gradient_checkpointing"), recomputes(model)
    if wanted is True and not able:
        raise InvalidValueError(
            f"{type(model).__name__} has no gradient checkpointing",
            key=KEY,
            value=wanted,
            fix='gradient_checkpointing="auto", or a diffusers model',
        )
    if wanted == "auto":
        if not able or before:
            return ()
        # Recomputed modules gather their weights once more, so at stage 3 ranks must agree.
        wanted, why = engine.group.broadcast(_needed(engine, data))
    else:
        why = "asked for"
    if wanted != before:
        switch, undo = "enable_gradient_checkpointing", "disable_gradient_checkpointing"
        if before:
            switch, undo = undo, switch
        getattr(model, switch)()
        engine.resources.callback(getattr(model, undo))
    return (Decision(key=KEY, before=before, after=wanted, reason=why),)


def _needed(engine: Engine, data: Any) -> tuple[bool, str]:
    model, plan = engine.module, engine.plan
    size, source = input_size(model, data)
    if size is None or plan.model is None:
        return False, f"activations are not known: {source}"
    room = _room(engine)
    positions = input_positions(model, size) * plan.micro_batch_size
    if room >= positions * _PER_POSITION:
        return False, (
            f"the {format_size(room)} left over are more than any model keeps for "
            f"{positions} positions of its input"
        )
    known = known_activations(model, data, batch=plan.micro_batch_size, checkpointed=False)
    if known.facts is None:
        return False, f"activations are not known: {known.why}"
    element = 4 if plan.precision == "fp32" else 2
    keeps = known.facts.full.nbytes(batch=1, pixels=1, element_bytes=element)
    words = f"a pass over {size[0]} x {size[1]} pixels ({known.why}) keeps {format_size(keeps)}"
    return keeps > room, f"{words}, and {format_size(room)} are left over"


def _room(engine: Engine) -> int:
    """Bytes per rank that the plan leaves to activations."""
    plan, estimate = engine.plan, expected_memory(engine.plan)
    vram = plan.platform.vram
    if plan.platform.accelerator != "cpu" and vram is not None:
        return max(0, int(_USED * vram) - estimate.device)
    available = min(plan.platform.host_memory.limit, psutil.virtual_memory().available)
    still = max(0, estimate.host - host_now())
    return max(0, int(_USED * available) // plan.world_size - still)


# -- What becomes of the activations: as the advice says, or as somebody asked.


PlanT = TypeVar("PlanT")


def plan_of(plan: PlanT | Advice) -> Any:
    """The plan itself, of advice too: it is resolved anew for the machine that runs it."""
    return plan.plan if isinstance(plan, Advice) else plan


def keep_activations(
    engine: Engine, *, plan: object, activations: ActivationOffload | None
) -> tuple[Decision, ...]:
    """Switch on what is to be recomputed and offloaded, until the engine is closed.

    Args:
        engine: What trains.
        plan: As the trainer got it; advice brings its own wishes.
        activations: What was asked for besides.

    Returns:
        What the advice decided.

    Raises:
        InvalidValueError: The model has no gradient checkpointing.
    """
    decisions: tuple[Decision, ...] = ()
    model: Any = engine.module
    if isinstance(plan, Advice):
        decisions = plan.decisions
        if activations is None and plan.activation_offload:
            activations = ActivationOffload()
        elif plan.gradient_checkpointing and activations is None:
            model.enable_gradient_checkpointing()
    if activations is not None:
        if not activations.attached:
            activations.attach(model)
        engine.resources.callback(activations.detach)
    return decisions


# -- What to do when memory runs out: what was expected, what there is, and the plan that fits.


_WORDS: Final = re.compile(
    r"out of memory|can.t allocate memory|cannot allocate memory|not enough memory|ALLOC_FAILED",
    re.IGNORECASE,
)
_ON_DEVICE: Final = re.compile(r"\b(CUDA|HIP|XPU|MPS|CUDNN|CUBLAS)", re.IGNORECASE)


@attrs.frozen(kw_only=True)
class Situation:
    """What a run was doing when its memory ran out."""

    plan: ResolvedPlan
    doing: str
    """``"forward of optimizer step 12"``, ``"starting the engine"``."""
    estimate: MemoryEstimate | None = None
    """What was expected; the plan's own without activations when not given."""
    limits: Limits | None = None
    """What there is; measured when not given."""


@contextmanager
def advising(situation: Callable[[], Situation]) -> Iterator[None]:
    """Turn running out of memory inside the block into an error that says what would fit.

    Args:
        situation: Called only when it happens.

    Raises:
        OutOfMemoryError: From the original error, whoever raised it and however it was wrapped.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        found = out_of_memory(error)
        if found is None or isinstance(error, OutOfMemoryError):
            raise
        raise _explained(found, situation()) from error


def out_of_memory(error: BaseException) -> BaseException | None:
    """The error in a chain of causes that says memory ran out; ``None``: none does.

    A plan that zerotune refuses because it would not fit is none: its message says so already.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, MemoryError | torch.OutOfMemoryError):
            return current
        own = type(current).__module__.startswith("zerotune.")
        plain = isinstance(current, RuntimeError | OSError) and not own
        if plain and _WORDS.search(str(current)):
            return current
        current = current.__cause__ or current.__context__
    return None


def _place(error: BaseException) -> Place:
    if isinstance(error, torch.OutOfMemoryError) or _ON_DEVICE.search(str(error)):
        return "device"
    return "host"


def _explained(error: BaseException, situation: Situation) -> OutOfMemoryError:
    place = _place(error)
    estimate = situation.estimate or _estimate(situation.plan)
    limits = situation.limits or Limits.now(situation.plan)
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    parts = [f"no {place} memory is left in {situation.doing} ({said[:160]})"]
    if estimate is not None:
        peak = estimate.peak(_counted(situation.plan, place))
        parts.append(f"the plan expected {format_size(peak.nbytes)} {DURING[peak.phase]}")
    parts.append(limits.words(place))
    advice, plan = _advice(situation.plan, estimate, limits, place)
    return OutOfMemoryError(
        "; ".join(parts), key=f"memory.{place}", fix=advice, original=error, plan=plan
    )


def _estimate(plan: ResolvedPlan) -> MemoryEstimate | None:
    return None if plan.model is None else expected_memory(plan)


def _counted(plan: ResolvedPlan, place: Place) -> Place:
    return "host" if plan.platform.accelerator == "cpu" else place


@attrs.frozen(kw_only=True)
class Limits:
    """What this process, and the ranks like it on this machine, can have at most."""

    device: int | None
    """Bytes of the device this process can have; ``None``: there is none."""
    device_free: int | None = None
    allocated: int | None = None
    """Most bytes torch has held there."""
    host: int
    """Bytes of RAM that all ranks of this machine can have."""
    host_free: int

    @classmethod
    def now(cls, plan: ResolvedPlan) -> Limits:
        """Measure this process and machine."""
        device = free = allocated = None
        if plan.platform.accelerator in ("cuda", "rocm") and torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            allocated = torch.cuda.max_memory_allocated()
            # What others hold is not ours to plan with; our context is part of an estimate.
            others = total - free - torch.cuda.memory_reserved() - CONTEXT
            device = total - max(0, others)
        elif plan.platform.vram is not None:
            device = plan.platform.vram
        memory = detect_platform(log=False).host_memory
        own = host_now()
        host = min(memory.limit, memory.available + own * plan.world_size)
        process = _process_limit()
        if process is not None:
            host = min(host, process * plan.world_size)
        left = memory.available if process is None else min(memory.available, process - own)
        return cls(
            device=device,
            device_free=free,
            allocated=allocated,
            host=host,
            host_free=max(0, left),
        )

    def words(self, place: Place) -> str:
        """What there is at a place, as a clause."""
        if place == "device" and self.device is not None:
            held = "" if self.allocated is None else f"torch held {format_size(self.allocated)}, "
            free = "" if self.device_free is None else f", {format_size(self.device_free)} is free"
            return f"{held}this process can have {format_size(self.device)}{free}"
        peak, free = format_size(host_peak()), format_size(self.host_free)
        return f"this process held up to {peak}, {free} of host memory is free"


def _process_limit() -> int | None:
    """Bytes one process may hold by ``ulimit``; ``None``: no limit, or none on this system."""
    try:
        import resource
    except ImportError:
        return None
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    finite = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min(finite, default=None)


def _advice(
    plan: ResolvedPlan, estimate: MemoryEstimate | None, limits: Limits, place: Place
) -> tuple[str, DeepSpeedPlan | None]:
    if estimate is None or plan.model is None:
        return "see DeepSpeedPlan.advise(model) for the plan that fits", None
    counted = _counted(plan, place)
    has = limits.host // plan.world_size if counted == "host" else limits.device or 0
    own = estimate.peak(counted).nbytes
    if own < has // 2:
        return (
            f"the plan needs {format_size(own)} of {format_size(has)} there are for this rank, "
            "so something outside of it took the memory: look at other processes, at the "
            "objective, at what is kept from step to step, and at the batch"
        ), None
    # What has just failed does not fit, whatever was expected of it.
    device = limits.device or 0
    if counted == "device":
        device = min(device or estimate.device, estimate.device)
    host = limits.host if counted == "device" else min(limits.host, estimate.host * plan.world_size)
    failure: PlanError | None = None
    for disk in (0, _free_disk()):
        try:
            found = _ask(plan, estimate, device=device, host=host, disk=disk)
        except PlanError as error:
            failure = error
            continue
        call = build_call(found.plan)
        recompute = ", gradient_checkpointing=True" if found.gradient_checkpointing else ""
        if found.activation_offload:
            recompute = ", activations=ActivationOffload()"
        needs = ", ".join(
            f"{format_size(nbytes)} {where}"
            for where, nbytes in (("device", found.estimate.device), ("host", found.estimate.host))
            if nbytes
        )
        words = f"{found.chosen.title} needs {needs} per rank: Trainer(plan={call}{recompute})"
        return words, found.plan
    fix = failure.fix if isinstance(failure, NothingFitsError) else None
    return f"no plan fits this machine: {fix or failure}; or train a smaller batch", None


def _ask(plan: ResolvedPlan, estimate: MemoryEstimate, *, device: int, host: int, disk: int) -> Any:
    work = estimate.workload
    size = None if work.height is None or work.width is None else (work.height, work.width)
    return DeepSpeedPlan.advise(
        estimate.resolved.model,
        vram=device,
        ram=host,
        nvme=disk,
        batch=plan.micro_batch_size,
        resolution=size,
        world_size=plan.world_size,
        precision=plan.precision,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        optimizer=_optimizer(plan),
        ema=work.ema,
        frozen_bytes=work.frozen_bytes,
        platform=plan.platform,
    )


def _optimizer(plan: ResolvedPlan) -> dict[str, Any]:
    written = plan.plan.optimizer
    if written is None or not isinstance(written.type, str):
        return {"type": "AdamW"}
    params = {key: value for key, value in (written.params or {}).items() if value != AUTO}
    return {"type": written.type, "params": params}


def _free_disk() -> int:
    try:
        return shutil.disk_usage(Path(tempfile.gettempdir())).free
    except OSError:
        return 0


def build_call(plan: DeepSpeedPlan) -> str:
    """One line of Python that gives a plan equal to this one, by keywords where that can be."""
    given: dict[str, Any] = {
        "stage": plan.stage,
        "offload": plan.offload_optimizer_device,
        "offload_param": plan.offload_param_device,
        "micro_batch_size": plan.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "precision": next(
            (name for name in ("bf16", "fp16") if getattr(getattr(plan, name), "enabled", False)),
            "fp32",
        ),
        "gradient_clipping": plan.gradient_clipping,
        "optimizer": _written(plan),
    }
    given = {key: value for key, value in given.items() if value not in (None, "none")}
    try:
        if DeepSpeedPlan.build(**given) == plan:
            words = ", ".join(f"{key}={_quoted(value)}" for key, value in given.items())
            return f"DeepSpeedPlan.build({words})"
    except PlanError:
        pass
    return " ".join(python_expression(plan).split())


def _written(plan: DeepSpeedPlan) -> Any:
    optimizer = plan.optimizer
    if optimizer is None:
        return None
    params = dict(optimizer.params or {})
    return {"type": optimizer.type, "params": params} if params else optimizer.type


def _quoted(value: Any) -> str:
    plain = isinstance(value, str)
    return json.dumps(value) if plain else repr(value).replace("'", '"')
