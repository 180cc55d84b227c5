"""From a resolved plan and a workload to what it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs

from zerotune.errors import InvalidValueError, UnresolvedPlanError
from zerotune.plan import sizing
from zerotune.plan.facts import ModelFacts
from zerotune.plan.families import as_facts, model_family
from zerotune.plan.kinds import is_integer
from zerotune.plan.memory.costing import (
    BACKWARD,
    CHECKPOINT,
    GIB,
    INITIALIZATION,
    TRAINING,
    Costing,
)
from zerotune.plan.memory.replicated import plain, stage_0, stages_1_and_2
from zerotune.plan.memory.sharded import stage_3
from zerotune.plan.memory.values import MemoryEstimate, MemoryItem
from zerotune.plan.memory.workload import EMAPlace, Workload

if TYPE_CHECKING:
    from zerotune.plan.deepspeed_plan import DeepSpeedPlan
    from zerotune.plan.facts import RunFacts
    from zerotune.plan.resolved import ResolvedPlan
    from zerotune.platform import Platform

CONTEXT: Final = GIB // 2
"""Bytes of device memory that a CUDA context, cuBLAS and cuDNN take."""
RUNTIME: Final = GIB
"""Bytes of host RAM that Python, torch and DeepSpeed take; measured on the CPU."""
_HAS_CONTEXT: Final = frozenset({"cuda", "rocm", "xpu"})


def estimate_plan(
    plan: DeepSpeedPlan,
    model: ModelFacts | str | Any,
    *,
    platform: Platform | None,
    world_size: int,
    run: RunFacts | None,
    batch: int | None,
    resolution: int | tuple[int, int] | None,
    ema: EMAPlace,
    gradient_checkpointing: bool,
    activation_offload: bool,
    frozen_bytes: int,
) -> MemoryEstimate:
    """See ``DeepSpeedPlan.estimate``."""
    facts = as_facts(model)
    if batch is not None:
        micro = count(batch, "batch")
        plan = attrs.evolve(plan, train_micro_batch_size_per_gpu=micro, train_batch_size=None)
    resolved = plan.resolve(platform=platform, model=facts, world_size=world_size, run=run)
    if resolution is None and isinstance(model, str):
        resolution = model_family(model).resolution
    height, width = sides(resolution)
    return estimate_resolved(
        resolved,
        Workload(
            batch=resolved.micro_batch_size,
            height=height,
            width=width,
            gradient_checkpointing=gradient_checkpointing,
            activation_offload=activation_offload,
            ema=ema,
            frozen_bytes=count(frozen_bytes, "frozen_bytes", least=0),
        ),
    )


def estimate_resolved(resolved: ResolvedPlan, workload: Workload) -> MemoryEstimate:
    """What a resolved plan needs, by component.

    Args:
        resolved: A plan that was resolved with its model.
        workload: Batch, resolution and what runs beside the optimizer.

    Raises:
        UnresolvedPlanError: The plan was resolved without a model.
    """
    model = resolved.model
    if model is None:
        raise UnresolvedPlanError(
            "memory is counted from the shapes of the parameters",
            key="model",
            fix="resolve the plan with model=ModelFacts.from_module(model)",
        )
    case = Costing(resolved=resolved, model=model, workload=workload)
    items = [item for item in _items(case) if item.nbytes > 0]
    items.extend(item for item in _loading(case, items) if item.nbytes > 0)
    return MemoryEstimate(
        resolved=resolved, workload=workload, items=tuple(items), notes=tuple(_notes(case))
    )


def sides(resolution: int | tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Height and width in pixels of a resolution as people write it.

    Raises:
        InvalidValueError: Neither a side nor a pair of sides of at least 8 pixels.
    """
    if resolution is None:
        return None, None
    pair: Any = (resolution, resolution) if isinstance(resolution, int) else resolution
    shaped = isinstance(pair, tuple | list) and len(pair) == 2
    if not shaped or not all(is_integer(side) and side >= 8 for side in pair):
        raise InvalidValueError(
            "is not a size of images",
            key="resolution",
            value=resolution,
            fix="write the side in pixels, such as 1024, or (height, width)",
        )
    return int(pair[0]), int(pair[1])


def count(value: Any, key: str, *, least: int = 1) -> int:
    """A whole number of at least ``least``, or an ``InvalidValueError`` that names ``key``."""
    if not is_integer(value) or value < least:
        raise InvalidValueError(
            "must be a whole number", key=key, value=value, fix=f"write at least {least}"
        )
    return int(value)


def _items(case: Costing) -> Iterator[MemoryItem]:
    yield from _engine(case)
    yield from _activations(case)
    yield from _beside(case)
    yield case.item("runtime", "host", RUNTIME, note="Python, torch and DeepSpeed")
    if case.resolved.platform.accelerator in _HAS_CONTEXT:
        yield case.item("context", "device", CONTEXT, note="driver and libraries")


def _engine(case: Costing) -> Iterator[MemoryItem]:
    plan = case.resolved.plan
    zero = plan.zero_optimization
    if not case.resolved.uses_deepspeed or zero is None:
        yield from plain(case)
    elif zero.stage == 0:
        yield from stage_0(case)
    elif zero.stage == 3:
        yield from stage_3(case, zero, plan.aio)
    else:
        yield from stages_1_and_2(case, zero)


def _loading(case: Costing, items: Iterable[MemoryItem]) -> Iterator[MemoryItem]:
    # The model arrives in fp32 and has left for the device, or for files, before the optimizer is
    # made; so it only counts as far as it is more than what is held then.
    later = sum(
        item.nbytes
        for item in items
        if item.place == "host" and "initialization" in item.phases and item.component != "runtime"
    )
    excess = 4 * case.all_elements - later
    yield case.item("model as loaded", "host", max(0, excess), INITIALIZATION, "fp32")


def _activations(case: Costing) -> Iterator[MemoryItem]:
    work, known = case.workload, case.model.activations
    if known is None or work.height is None or work.width is None:
        return
    size = {
        "batch": work.batch, "pixels": work.height * work.width, "element_bytes": case.element,
    }  # fmt: skip
    if offloads_activations(case) and known.offloaded is not None:
        note = "blocks recomputed, their inputs on the host"
        yield case.item("activations", case.device, known.offloaded.nbytes(**size), BACKWARD, note)
        if known.offloaded_host is not None:
            waiting = known.offloaded_host.nbytes(**size)
            # Blocks are used again, so that they stay from the first step on.
            yield case.pinned("activations", [waiting], TRAINING, "inputs of recomputed blocks")
        return
    checkpoints = work.gradient_checkpointing and known.checkpointed is not None
    cost = known.checkpointed if checkpoints else known.full
    if cost is not None:
        note = "blocks recomputed" if checkpoints else "all kept"
        yield case.item("activations", case.device, cost.nbytes(**size), BACKWARD, note)


def offloads_activations(case: Costing) -> bool:
    """Whether the inputs of recomputed blocks leave the device."""
    work, known = case.workload, case.model.activations
    asked = work.activation_offload and work.gradient_checkpointing and not case.on_cpu
    return asked and known is not None and known.offloaded is not None


def _beside(case: Costing) -> Iterator[MemoryItem]:
    work = case.workload
    yield case.item("frozen parts", case.device, work.frozen_bytes, note="VAE, text encoders")
    if work.ema != "none":
        place = case.device if work.ema == "device" else work.ema
        yield case.item("EMA", place, 4 * _owned(case), TRAINING, "fp32, this rank's part")
    yield case.item(
        "checkpoint", "host", 4 * case.largest, CHECKPOINT, "the largest fragment on its way"
    )


def _owned(case: Costing) -> int:
    """Elements whose master weights are this rank's."""
    if case.resolved.stage == 3:
        return sum(sizing.partition(parameter, case.ranks) for parameter in case.model.trainable)
    return case.trained if case.resolved.stage == 0 else case.flat_part


def _notes(case: Costing) -> Iterator[str]:
    work = case.workload
    if work.height is None:
        yield "activations are left out: no resolution was given"
    elif case.model.activations is None:
        yield "activations are left out: they are not known for this model; use model_facts()"
    elif work.gradient_checkpointing and case.model.activations.checkpointed is None:
        yield "this model has no gradient checkpointing, so all activations are kept"
    elif work.activation_offload and not offloads_activations(case):
        yield "activations are not offloaded: this model or this device cannot, or keeps all"
