"""Memory estimates of plans, per rank and component.

The formulas come from the code of DeepSpeed 0.19.8 and from measurements; comments cite the code or
measurement behind each group of formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from zerotune._util.text import is_integer, whole
from zerotune.errors import InvalidValueError, UnresolvedPlanError
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import ModelFamily, frozen_beside, model_family
from zerotune.plan.memory.costing import (
    BACKWARD,
    CHECKPOINT,
    EMA_CHUNK,
    EMA_CHUNKS,
    GIB,
    INITIALIZATION,
    TRAINING,
    Costing,
)
from zerotune.plan.memory.hosted import hosted
from zerotune.plan.memory.items import Estimate, MemoryItem, Workload
from zerotune.plan.memory.stage_3 import stage_3
from zerotune.plan.memory.whole import kept_in, plain, stage_0, stages_1_and_2
from zerotune.plan.resolved import Resolved
from zerotune.platform.facts import DISCRETE

CONTEXT: Final = GIB // 2
"""Bytes of device memory that a CUDA context, cuBLAS and cuDNN use."""


RUNTIME: Final = GIB
"""Bytes of host RAM that Python, torch and DeepSpeed use; measured on the CPU."""


def workload_of(
    model: Any,
    facts: ModelFacts,
    *,
    batch: int,
    resolution: int | tuple[int, int] | None,
    frames: int | None,
    frozen_bytes: int,
    **options: Any,
) -> Workload:
    """Return the workload of a model, a family or a family's name.

    Args:
        model: What the user passed; a family provides the default size of samples.
        facts: Facts of the model.
        batch: Samples per forward pass and rank.
        resolution: Side length in pixels, or height and width.
        frames: Number of frames of a clip.
        frozen_bytes: Bytes of frozen models, besides those that the family needs.
        **options: Other attributes of ``Workload``.
    """
    size = sample_size(model, facts, resolution=resolution, frames=frames)
    frozen = whole(frozen_bytes, key="frozen_bytes", least=0) + frozen_beside(model)
    return Workload(batch=whole(batch, key="batch"), frozen_bytes=frozen, **size, **options)


def estimate_resolved(resolved: Resolved, workload: Workload) -> Estimate:
    """Estimate the memory of a resolved plan by component.

    Args:
        resolved: Plan that was resolved with its model.
        workload: Batch size, resolution, and options that affect memory, such as EMA.
    """
    model = resolved.model
    if model is None:
        raise UnresolvedPlanError(
            "the estimate needs the shapes of the model's parameters",
            "pass model=ModelFacts.from_module(model) to resolve",
            "model",
        )
    case = Costing(resolved=resolved, model=model, workload=workload)
    items = [item for item in _items(case) if item.nbytes > 0]
    items.extend(item for item in _as_loaded(case, items) if item.nbytes > 0)
    return (resolved.estimated_as or Estimate)(
        resolved=resolved, workload=workload, items=tuple(items), notes=tuple(_notes(case))
    )


def sample_size(
    model: Any, facts: ModelFacts, *, resolution: int | tuple[int, int] | None, frames: int | None
) -> dict[str, Any]:
    """Return the size of a sample as fields of ``Workload``.

    Args:
        model: A model, a family or a family's name; a family provides the default size.
        facts: Facts of the model.
        resolution: Side length in pixels, or height and width.
        frames: Number of frames of a clip.
    """
    if isinstance(model, str | ModelFamily):
        known = model_family(model) if isinstance(model, str) else model
        resolution = known.resolution if resolution is None else resolution
        frames = known.frames if frames is None else frames
    height, width = sides(resolution)
    if frames is not None:
        whole(frames, key="frames")
        if facts.frames_per_latent is None:
            raise InvalidValueError(
                f"is set, but {facts.name} is trained on images, which have no frames",
                "omit it, or choose a video model",
                "frames",
                frames,
            )
    return {"height": height, "width": width, "frames": frames}


def sides(resolution: int | tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Return a resolution's height and width in pixels."""
    if resolution is None:
        return None, None
    pair: Any = (resolution, resolution) if isinstance(resolution, int) else resolution
    shaped = isinstance(pair, tuple | list) and len(pair) == 2
    if not shaped or not all(is_integer(side) and side >= 8 for side in pair):
        raise InvalidValueError(
            "is not a valid image size",
            "write the side in pixels, such as 1024, or (height, width)",
            "resolution",
            resolution,
        )
    return int(pair[0]), int(pair[1])


_BEFORE_THE_MODEL: Final = ("runtime", "frozen parts")


def _items(case: Costing) -> Iterator[MemoryItem]:
    yield from _engine_items(case)
    note = "buffers, such as tables of positions"
    yield case.item("weights", case.device, case.model.buffers, note=note)
    # Quantized weights are dequantized one at a time.
    nbytes = case.element * case.model.largest_quantized
    note = "the largest quantized weight, dequantized"
    yield case.item("temporaries", case.device, nbytes, BACKWARD, note)
    yield from _activation_items(case)
    yield from _around_the_engine(case)
    yield case.item("runtime", "host", RUNTIME, note="Python, torch and DeepSpeed")
    if case.resolved.platform.accelerator in DISCRETE:
        yield case.item("context", "device", CONTEXT, note="driver and libraries")


def _engine_items(case: Costing) -> Iterator[MemoryItem]:
    plan = case.resolved.plan
    zero = plan.zero_optimization
    if case.hosted:
        yield from hosted(case)
    elif not case.resolved.uses_deepspeed or zero is None:
        yield from plain(case)
    elif zero.stage == 0:
        yield from stage_0(case)
    elif zero.stage == 3:
        yield from stage_3(case, zero)
    else:
        yield from stages_1_and_2(case, zero)


def _as_loaded(case: Costing, items: Iterable[MemoryItem]) -> Iterator[MemoryItem]:
    """Yield host memory for loading the model, beyond that of later phases.

    Weights in files are read one at a time to their final place; at stage 3 each rank reads only
    its part.
    """
    later = sum(
        item.nbytes
        for item in items
        if item.place == "host"
        and "initialization" in item.phases
        and item.component not in _BEFORE_THE_MODEL
    )
    if case.workload.model_in_memory:
        excess = case.model.weight_bytes(4) + case.model.buffers - later
        note = f"{kept_in(case, 'fp32')}, whole"
        yield case.item("model as loaded", "host", max(0, excess), INITIALIZATION, note)


def _activation_items(case: Costing) -> Iterator[MemoryItem]:
    work, known = case.workload, case.model.activations
    if known is None or work.height is None or work.width is None:
        return
    size = {"batch": work.batch, "pixels": case.positions, "element_bytes": case.element}
    if offloads_activations(case) and known.offloaded is not None:
        note = "recomputed blocks, with inputs on the host"
        yield case.item("activations", case.device, known.offloaded.nbytes(**size), BACKWARD, note)
        if known.offloaded_host is not None:
            waiting = known.offloaded_host.nbytes(**size)
            # Blocks are reused, so they stay allocated from the first step on.
            yield case.pinned("activations", [waiting], TRAINING, "inputs of recomputed blocks")
        return
    checkpoints = work.gradient_checkpointing and known.checkpointed is not None
    cost = known.checkpointed if checkpoints else known.full
    if cost is not None:
        note = "blocks recomputed" if checkpoints else "all kept"
        yield case.item("activations", case.device, cost.nbytes(**size), BACKWARD, note)


def offloads_activations(case: Costing) -> bool:
    """Whether the inputs of recomputed blocks are offloaded to host memory."""
    work, known = case.workload, case.model.activations
    asked = work.activation_offload and work.gradient_checkpointing and not case.on_cpu
    return asked and known is not None and known.offloaded is not None


def _around_the_engine(case: Costing) -> Iterator[MemoryItem]:
    work = case.workload
    yield case.item("frozen parts", case.device, work.frozen_bytes, note="VAE, text encoders")
    if not case.on_cpu:
        note = "during loading, in full on every rank"
        yield case.item("frozen parts", "host", work.frozen_bytes, INITIALIZATION, note)
    if work.ema != "none":
        place = case.device if work.ema == "device" else work.ema
        yield case.item("EMA", place, 4 * case.owned, TRAINING, "fp32, this rank's part")
        if place == "nvme":
            nbytes = min(EMA_CHUNK * EMA_CHUNKS, 4 * case.owned)
            yield case.item("EMA", "host", nbytes, TRAINING, "chunks read, updated or written")
    yield case.item(
        "checkpoint",
        "host",
        4 * case.largest,
        CHECKPOINT,
        "the largest fragment during writing",
    )


def _notes(case: Costing) -> Iterator[str]:
    work = case.workload
    if case.resolved.streaming is not None and not case.streamed.units:
        yield "streamed units are unknown: the model's class does not define them"
    if case.resolved.waits_for_proof:
        yield (
            "for the host engine, which runs once `zerotune doctor --prove` has passed on the "
            'device; until then, DeepSpeed runs, and resolve(engine="deepspeed") estimates it'
        )
    if work.height is None:
        yield "activations are not included: no resolution was given"
    elif case.model.activations is None:
        yield "activations are not included: they are unknown for this model (see model_facts)"
    elif case.model.frames_per_latent is not None and work.frames is None:
        yield "activations are for one frame: no frame count was given for this video model"
    elif work.gradient_checkpointing and case.model.activations.checkpointed is None:
        yield "this model has no gradient checkpointing, so all activations are kept"
    elif work.activation_offload and not offloads_activations(case):
        yield "activations are not offloaded: the model or the device does not support offload"
