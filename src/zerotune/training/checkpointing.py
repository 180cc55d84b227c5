"""Whether blocks are recomputed in the backward pass: as asked, or as the memory demands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import psutil
import torch

from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError
from zerotune.plan.memory.sizes import format_size
from zerotune.training.activations import input_positions, input_size, known_activations
from zerotune.training.memory import expected_memory, host_now

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine

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
