"""What families are written with: inputs brought to the model, and its output checked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zerotune.diffusion.data.streams import check_float
from zerotune.diffusion.family import Conditioning, Denoiser
from zerotune.errors import DataError


def take(batch: Mapping[str, Tensor], key: str) -> Tensor:
    """A tensor of a batch.

    Raises:
        DataError: The batch has no such key.
    """
    if key not in batch:
        raise DataError(
            f"the batch has no {key!r}, only {sorted(batch)}",
            key=f"batch[{key!r}]",
            fix="let the dataset yield dicts with it, or use another family",
        )
    return batch[key]


def images_of(batch: Mapping[str, Tensor]) -> Tensor:
    """The images of a batch, fp32.

    Raises:
        DataError: There are none, or they are whole numbers.
    """
    images = take(batch, "images")
    check_float(images, key="batch['images']")
    return images.float()


def to_model(value: Tensor, model: Denoiser) -> Tensor:
    """A tensor on the model's device and, if it holds floats, in its precision.

    Not for time steps and sizes: bf16 cannot tell 999 from 1000.
    """
    return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)


def call_diffusers_model(
    model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
) -> Tensor:
    """Call ``model(noisy, timesteps, **conditioning)`` and unwrap diffusers' output."""
    output = model(
        noisy.to(model.device, model.dtype),
        timesteps.to(model.device),
        **{name: to_model(value, model) for name, value in conditioning.items()},
    )
    return prediction_of(output, like=noisy)


def prediction_of(output: Any, *, like: Tensor) -> Tensor:
    """The prediction in what a diffusers model returned.

    Raises:
        DataError: It is not shaped like its input.
    """
    prediction = output if isinstance(output, Tensor) else output[0]
    if not isinstance(prediction, Tensor) or prediction.shape != like.shape:
        shape = getattr(prediction, "shape", None)
        raise DataError(
            "the model's output is not shaped like its input "
            f"({None if shape is None else tuple(shape)} against {tuple(like.shape)})",
            key="model.forward",
            fix="predict as many channels as the samples have; learned variance is not trained",
        )
    return prediction


def config_of(model: Any) -> Any:
    """The configuration of a diffusers model, also of one inside an engine."""
    return getattr(model, "module", model).config


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name."""
    return inspect.signature(function).parameters
