"""What the library must know of a kind of model to train it and to sample from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from zerotune.errors import DataError, InvalidValueError

Conditioning = Mapping[str, torch.Tensor]
"""Keyword arguments of the model's forward pass, batch first; empty without conditioning."""


class Denoiser(Protocol):
    """What predicts: an ``Engine``, or any diffusers model."""

    @property
    def device(self) -> torch.device:
        """Where its inputs must lie."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Precision of its floating-point inputs."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""
        ...


@runtime_checkable
class Family(Protocol):
    """A kind of model: how a batch becomes its inputs, and how it is called.

    Tensors stay where the batch lies until ``predict`` moves them to the model. To draw images
    as well, a family is a ``LabelFamily`` or a ``PromptFamily``.
    """

    def clean(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The noise-free samples (b, c, h, w) of a batch, fp32."""
        ...

    def conditioning(
        self, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> Conditioning:
        """What the model may know of each sample in training, dropped at random if so asked."""
        ...

    def predict(
        self,
        model: Denoiser,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Conditioning,
    ) -> torch.Tensor:
        """The model's output, shaped as ``noisy``, in the model's precision.

        Args:
            model: What predicts.
            noisy: Noisy samples (b, c, h, w), fp32.
            timesteps: (b,), as the scheduler counts them; floats stay fp32.
            conditioning: What ``conditioning`` or ``condition_on`` gave.
        """
        ...


@runtime_checkable
class LabelFamily(Family, Protocol):
    """A family whose samples are images, of a class or of none; drawn by zerotune's own loop."""

    def condition_on(self, labels: torch.Tensor | None) -> Conditioning:
        """The conditioning for drawing samples of these labels (b,)."""
        ...

    def without_condition(self, conditioning: Conditioning) -> Conditioning | None:
        """The "nothing is known" counterpart for guidance; ``None`` where there is none."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Drawing:
    """Images wanted of one rank."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    """One for each prompt: it alone decides the image's noise."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    steps: int = 50
    guidance_scale: float = 1.0
    size: tuple[int, int] | None = None
    """Height and width in pixels; what the model was made for when not given."""
    scheduler: Any = None
    """A diffusers scheduler to draw with; the pipeline's own when not given."""
    trained_with: Any = None
    """The objective's scheduler: the pipeline's own takes over what the model predicts."""


@runtime_checkable
class PromptFamily(Family, Protocol):
    """A family whose images are drawn from texts, through its diffusers pipeline."""

    def draw(self, model: Denoiser, drawing: Drawing) -> torch.Tensor:
        """Images (n, 3, height, width) on the CPU, fp32, nominally in [-1, 1]."""
        ...


def check_probability(_instance: object, attribute: Any, value: float) -> None:
    """An attrs validator: a number from 0 to 1."""
    if not 0.0 <= value <= 1.0:
        raise InvalidValueError(
            "is a probability", key=attribute.name, value=value, fix="write a number in [0, 1]"
        )


def config_of(model: Any) -> Any:
    """The configuration of a diffusers model, also of one inside an engine."""
    return getattr(model, "module", model).config


def take(batch: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
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


def call_diffusers_model(
    model: Denoiser, noisy: torch.Tensor, timesteps: torch.Tensor, conditioning: Conditioning
) -> torch.Tensor:
    """Call ``model(noisy, timesteps, **conditioning)`` and unwrap diffusers' output."""
    output = model(
        noisy.to(model.device, model.dtype),
        timesteps.to(model.device),
        **{name: to_model(value, model) for name, value in conditioning.items()},
    )
    return prediction_of(output, like=noisy)


def to_model(value: torch.Tensor, model: Denoiser) -> torch.Tensor:
    """A tensor on the model's device and, if it holds floats, in its precision.

    Not for time steps and sizes: bf16 cannot tell 999 from 1000.
    """
    return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)


def prediction_of(output: Any, *, like: torch.Tensor) -> torch.Tensor:
    """The prediction in what a diffusers model returned.

    Raises:
        DataError: It is not shaped like its input.
    """
    prediction = output if isinstance(output, torch.Tensor) else output[0]
    if not isinstance(prediction, torch.Tensor) or prediction.shape != like.shape:
        shape = getattr(prediction, "shape", None)
        raise DataError(
            "the model's output is not shaped like its input "
            f"({None if shape is None else tuple(shape)} against {tuple(like.shape)})",
            key="model.forward",
            fix="predict as many channels as the samples have; learned variance is not trained",
        )
    return prediction
