"""The activations of the very batch that is trained on, measured on the ``meta`` device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch

from zerotune.diffusion.data import BucketedDataset
from zerotune.diffusion.profile_inputs import example_inputs
from zerotune.diffusion.profiling import activation_peak
from zerotune.errors import ZeroTuneError
from zerotune.plan.facts import ActivationCost, ActivationFacts

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
