"""Measure activation memory, and decide on gradient checkpointing and activation offload.

Activations are measured on the ``meta`` device at the training resolution. Blocks are recomputed if
the caller or an ``Advice`` requests it, or if memory would otherwise be too small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import psutil
import torch

from zerotune._util.text import format_size
from zerotune.backend.proof import prove_first
from zerotune.decisions import Decision
from zerotune.diffusion.activations import ActivationOffload
from zerotune.diffusion.data.streams import BucketedDataset
from zerotune.diffusion.facts import example_inputs, frames_per_latent, latent_scale
from zerotune.diffusion.passes import CALLS, KINDS, Pass, both_passes, counting
from zerotune.errors import InvalidValueError, ZeroTuneError
from zerotune.plan.facts import latent_frames
from zerotune.plan.work import ActivationCost, ActivationFacts, Amount, ArithmeticFacts, PassWork
from zerotune.training.memory import expected_memory, host_now

if TYPE_CHECKING:
    from zerotune.backend.engine import Engine
    from zerotune.plan.plan import Advice

_CLIP_DIMENSIONS: Final = 4
"""Channels, frames, height and width."""
_COLOURS: Final = 3
_SAMPLE_KEYS: Final = ("latents", "images", "pixel_values")
"""Batch keys that hold the clean samples, by family."""


@attrs.frozen(kw_only=True)
class Activations:
    """Activation memory and compute cost of one training step at a given image size."""

    size: tuple[int, int] | None = None
    """Height and width in pixels; ``None`` if unknown."""
    frames: int | None = None
    """Number of frames in a clip; ``None`` for image models."""
    facts: ActivationFacts | None = None
    """Bytes; ``None`` if unknown."""
    arithmetic: ArithmeticFacts | None = None
    """Compute cost of one forward and backward pass; ``None`` if unknown."""
    why: str = ""
    """Reason why values are unknown; if all are known, where the image size was found."""


def known_activations(
    model: Any, data: Any, *, batch: int, checkpointed: bool = True
) -> Activations:
    """Measure one training step's activations on the ``meta`` device, at the training resolution.

    The measured model is rebuilt from the model's diffusers configuration, so adapters are not
    counted.

    Args:
        model: The model to train.
        data: Training data; determines the input size.
        batch: Samples per micro batch.
        checkpointed: Also measure the activations with gradient checkpointing.
    """
    size, source = input_size(model, data)
    if size is None:
        return Activations(why=source)
    frames = clip_frames(model, data)
    try:
        with torch.device("meta"):
            copy = type(model).from_config(model.config)
        # torch's method, because diffusers' own warns about layers that a real run keeps in fp32.
        torch.nn.Module.to(copy, torch.bfloat16)
        clip = {} if frames is None else {"frames": frames}
        arguments = example_inputs(copy)(batch * _samples_each(data), *size, **clip)
        with counting(copy) as count:
            (full,), again = both_passes(copy, [arguments], count, checkpointed=checkpointed)
        less = None if again is None else again[0]
    except ZeroTuneError as error:
        return Activations(size=size, why=error.reason)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        # Training continues if the model cannot run without data or at this size.
        return Activations(size=size, why=f"{type(error).__name__}: {error}"[:200])
    facts = ActivationFacts(full=_cost(full), checkpointed=None if less is None else _cost(less))
    return Activations(
        size=size,
        frames=frames,
        facts=facts,
        arithmetic=_arithmetic_facts(full, less, batch),
        why=source,
    )


def input_size(model: torch.nn.Module, data: Any) -> tuple[tuple[int, int] | None, str]:
    """Return the largest training height and width in pixels, and where they were found."""
    config: Any = getattr(model, "config", None)
    if isinstance(data, BucketedDataset) and data.assignment.members:
        sides = [(each.height, each.width) for each in data.assignment.members]
        return max(sides, key=lambda side: side[0] * side[1]), "the largest bucket"
    sample = _sample(data)
    for name in _SAMPLE_KEYS:
        shape: Any = getattr(sample.get(name), "shape", ())
        if len(shape) >= 3:
            factor = 1 if _in_pixels(model, name) else latent_scale(model)
            return (shape[-2] * factor, shape[-1] * factor), f"the data's {name!r}"
    side = config.get("sample_size") if isinstance(config, Mapping) else None
    if isinstance(side, int):
        factor = 1 if _in_pixels(model, "images") else latent_scale(model)
        return (side * factor, side * factor), "the model's sample_size"
    return None, "neither the data nor the model's configuration contains an image size"


def _samples_each(data: Any) -> int:
    """Return the number of images the model receives per sample: two for a pair."""
    return int(getattr(data, "samples_each", 1))


def clip_frames(model: Any, data: Any) -> int | None:
    """Return the largest number of frames among training clips; ``None`` for image models."""
    each = frames_per_latent(model)
    if each is None:
        return None
    if isinstance(data, BucketedDataset):
        return max((getattr(one, "frames", 1) for one in data.assignment.members), default=1)
    sample = _sample(data)
    for name in _SAMPLE_KEYS:
        shape: Any = getattr(sample.get(name), "shape", ())
        channels = model.config.in_channels if name == "latents" else _COLOURS
        # Other shapes are the latents of an image, or a batch of images.
        if len(shape) >= _CLIP_DIMENSIONS and shape[-_CLIP_DIMENSIONS] == channels:
            return int(shape[-3]) if name != "latents" else (int(shape[-3]) - 1) * each + 1
    return 1


def input_positions(
    model: torch.nn.Module, size: tuple[int, int], frames: int | None = None
) -> int:
    """Return the number of input positions: latent pixels, or pixels for unconditional models."""
    factor = (
        1
        if type(model).__name__ == "UNet2DModel" and _in_pixels(model, "images")
        else latent_scale(model)
    )
    latents = latent_frames(frames or 1, per_latent=frames_per_latent(model) or 1)
    return max(1, latents * size[0] * size[1] // factor**2)


def _cost(counted: Pass) -> ActivationCost:
    return ActivationCost(base=counted.peak, per_sample=0.0, per_pixel=0.0)


def _arithmetic_facts(full: Pass, less: Pass | None, batch: int) -> ArithmeticFacts:
    def work(counts: Mapping[str, int], operators: int) -> PassWork:
        amounts = {kind: Amount(per_sample=counts[kind] / batch, per_pixel=0.0) for kind in KINDS}
        calls = {name: counts[name] for name in CALLS.values()}
        return PassWork(**dict[str, Any](amounts), operators=operators, **calls)

    def backward(of: Pass) -> int:
        return len(of.operators) - of.first

    again = None if less is None else {k: less.backward[k] - v for k, v in full.backward.items()}
    return ArithmeticFacts(
        forward=work(full.forward, full.first),
        backward=work(full.backward, backward(full)),
        recomputed=None
        if less is None or again is None
        else work(again, backward(less) - backward(full)),
    )


def _in_pixels(model: torch.nn.Module, name: str) -> bool:
    """Return whether a tensor's size is in pixels, as in ``example_inputs``."""
    unconditional = type(model).__name__ == "UNet2DModel"
    if not unconditional:
        return name != "latents"
    # Grey or coloured images; the latents of an unconditional model have more channels.
    return getattr(model, "config", {}).get("in_channels") in (1, _COLOURS)


def _sample(data: Any) -> Mapping[str, Any]:
    """Return one sample or batch of indexable data; empty for data that reading would consume."""
    source = getattr(data, "dataset", data)
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__") or not len(source):
        return {}
    try:
        first = source[0]
    except (LookupError, TypeError, ValueError, OSError):
        return {}
    return first if isinstance(first, Mapping) else {}


# -- Recomputing blocks in the backward pass.


_CHECKPOINTING: Final = "gradient_checkpointing"
_PER_POSITION: Final = 8 * 2**20
"""Upper bound of activation bytes per position of one sample. SDXL keeps 0.4 MiB per latent
position, Flux 1.8. If there is room for this much, nothing is measured."""
_USED: Final = 0.95
"""Fraction of the memory that a plan may use."""


def recomputes(model: torch.nn.Module) -> bool:
    """Return whether a diffusers model recomputes any block in the backward pass."""
    return any(getattr(module, _CHECKPOINTING, False) is True for module in model.modules())


def set_recomputing(
    engine: Engine, data: Any, wanted: bool | Literal["auto"]
) -> tuple[Decision, ...]:
    """Switch gradient checkpointing on or off until the engine is closed. Collective.

    Gradient checkpointing does not change the losses. diffusers uses ``use_reentrant=False``, which
    stage 3 requires.

    Args:
        engine: Engine of the model.
        data: Training data, whose image size determines the activation memory.
        wanted: ``True``, ``False``, or ``"auto"``, which switches checkpointing on if the memory
            estimate requires it. ``"auto"`` has no effect if the model does not support gradient
            checkpointing or already uses it, or if its activation memory is unknown.
    """
    model: Any = engine.module
    able, before = hasattr(model, "enable_gradient_checkpointing"), recomputes(model)
    if wanted is True and not able:
        raise InvalidValueError(
            f"{type(model).__name__} has no gradient checkpointing",
            'pass gradient_checkpointing="auto", or use a diffusers model',
            _CHECKPOINTING,
            wanted,
        )
    if wanted == "auto":
        if not able or before:
            return ()
        # Recomputed modules gather their weights once more, so at stage 3 ranks must agree.
        wanted, why = engine.group.broadcast(_needed(engine, data))
    else:
        why = "requested"
    if wanted != before:
        switch, undo = "enable_gradient_checkpointing", "disable_gradient_checkpointing"
        if before:
            switch, undo = undo, switch
        getattr(model, switch)()
        engine.resources.callback(getattr(model, undo))
    return (Decision(_CHECKPOINTING, before, wanted, why),)


def _needed(engine: Engine, data: Any) -> tuple[bool, str]:
    model, plan = engine.module, engine.plan
    size, source = input_size(model, data)
    if size is None or plan.model is None:
        return False, f"the activation memory is unknown: {source}"
    room = _room(engine)
    frames = clip_frames(model, data)
    positions = input_positions(model, size, frames) * plan.micro_batch_size * _samples_each(data)
    if room >= positions * _PER_POSITION:
        return False, (
            f"{format_size(room)} of memory is free, more than any model's activations need "
            f"at {positions} input positions"
        )
    measured = known_activations(model, data, batch=plan.micro_batch_size, checkpointed=False)
    if measured.facts is None:
        return False, f"the activation memory is unknown: {measured.why}"
    element = 4 if plan.precision == "fp32" else 2
    keeps = measured.facts.full.nbytes(batch=1, pixels=1, element_bytes=element)
    words = f"a pass at {size[0]} x {size[1]} pixels ({measured.why}) keeps {format_size(keeps)}"
    return keeps > room, f"{words} of activations, and {format_size(room)} of memory is free"


def _room(engine: Engine) -> int:
    """Return the bytes per rank that the plan leaves for activations."""
    plan, estimate = engine.plan, expected_memory(engine.plan)
    vram = plan.platform.vram
    if plan.platform.accelerator != "cpu" and vram is not None:
        return max(0, int(_USED * vram) - estimate.device)
    available = min(plan.platform.host_memory.limit, psutil.virtual_memory().available)
    still = max(0, estimate.host - host_now())
    return max(0, int(_USED * available) // plan.world_size - still)


# -- Applying requested or advised settings.


def keep_activations(
    engine: Engine, *, advice: Advice | None, activations: ActivationOffload | None
) -> tuple[Decision, ...]:
    """Enable gradient checkpointing and activation offload until the engine is closed.

    Args:
        engine: Engine of the model.
        advice: Advice that chooses gradient checkpointing and activation offload; ignored if
            ``activations`` is given.
        activations: The activation offload to use, which is attached to the model.
    """
    model: Any = engine.module
    if advice is not None and activations is None:
        if advice.activation_offload:
            activations = ActivationOffload()
        elif advice.gradient_checkpointing:
            model.enable_gradient_checkpointing()
    proven: tuple[Decision, ...] = ()
    if activations is not None:
        # An engine that offloads nothing has not run the proof.
        before = engine.decisions
        proven = prove_first(engine.plan.platform.accelerator, engine.group)
        proven = tuple(decision for decision in proven if decision not in before)
        if not activations.attached:
            activations.attach(model)
        engine.resources.callback(activations.detach)
    return (*proven, *(() if advice is None else advice.decisions))
