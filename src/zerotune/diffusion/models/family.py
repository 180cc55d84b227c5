"""Interfaces of model families, which call models in training and sampling."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from zerotune._util.text import probability, validated
from zerotune.diffusion.data.batches import check_float
from zerotune.errors import DataError, InvalidValueError

Conditioning = Mapping[str, Tensor]
"""Keyword arguments of the model's forward pass, batch first; empty for unconditional models."""


class Denoiser(Protocol):
    """Interface of a callable model: an ``Engine`` or any diffusers model."""

    @property
    def device(self) -> torch.device:
        """Device to which inputs are moved."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype to which floating-point inputs are cast."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""
        ...


@runtime_checkable
class Family(Protocol):
    """Interface of a model family, which converts batches to model inputs and calls the model.

    Tensors stay on the batch's device until ``predict`` moves them to the model's device. A family
    that can also sample is a ``LabelFamily`` or a ``PromptFamily``.
    """

    def clean(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the clean samples (b, c, h, w) of a batch in fp32.

        Args:
            batch: Tensors and captions by name, as the data loader yields them.
        """
        ...

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """Return a batch's conditioning for training, with random dropout if configured.

        Args:
            batch: Batch from the dataset.
            generator: Random generator for dropout.
        """
        ...

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Return the model's prediction, with the shape of ``noisy``, in the model's dtype or fp32.

        Args:
            model: Model that predicts.
            noisy: Noisy samples (b, c, h, w), fp32.
            timesteps: Time steps (b,) in the scheduler's units; floating-point time steps remain in
                fp32.
            conditioning: Value returned by ``conditioning`` or ``condition_on``.
        """
        ...


@runtime_checkable
class LabelFamily(Family, Protocol):
    """Interface of class-conditional and unconditional families; sampling uses no pipeline."""

    def condition_on(self, labels: Tensor | None) -> Conditioning:
        """Return the conditioning for sampling.

        Args:
            labels: Class labels (b,) of the images to sample; ``None`` for unconditional images.
        """
        ...

    def without_condition(self, conditioning: Conditioning) -> Conditioning | None:
        """Return the unconditional input for classifier-free guidance; ``None`` disables guidance.

        Args:
            conditioning: Value returned by ``condition_on``.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class Drawing:
    """Prompts for the images that one rank samples, and the options passed to ``sample``."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    """Seeds of the initial noise, one per prompt."""
    negative_prompt: str = ""
    steps: int = 50
    guidance_scale: float = 1.0
    size: tuple[int, int] | None = None
    frames: int | None = None
    references: Tensor | None = None
    scheduler: Any = None
    trained_with: Any = None


@runtime_checkable
class PromptFamily(Family, Protocol):
    """Interface of families that sample images from prompts through their diffusers pipeline."""

    def draw(self, model: Denoiser, drawing: Drawing) -> Tensor:
        """Sample images (n, 3, height, width) as fp32 CPU tensors, nominally in [-1, 1].

        Args:
            model: Model that predicts.
            drawing: Prompts, seeds and options.
        """
        ...


def take(batch: Mapping[str, Tensor], key: str) -> Tensor:
    """Return ``batch[key]``; raise ``DataError`` if it is missing."""
    if key not in batch:
        raise DataError(
            f"the batch has no {key!r}, only {sorted(batch)}",
            f"add {key!r} to the dataset's samples, or use a different family",
            f"batch[{key!r}]",
        )
    return batch[key]


def images_of(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the images of a batch in fp32."""
    images = take(batch, "images")
    check_float(images, key="batch['images']")
    return images.float()


def to_model(value: Tensor, model: Denoiser) -> Tensor:
    """Move a tensor to the model's device and cast floats to its dtype.

    Do not use this function for time steps or sizes, because bf16 rounds 999 to 1000.
    """
    return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)


_CHANNELS: Final = "in_channels"
_IMAGE_DIMS: Final = 4


def call_diffusers_model(
    model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
) -> Tensor:
    """Call ``model(noisy, timesteps, **conditioning)`` and unwrap diffusers' output."""
    try:
        output = model(
            noisy.to(model.device, model.dtype),
            timesteps.to(model.device),
            **{name: to_model(value, model) for name, value in conditioning.items()},
        )
    except RuntimeError as error:
        config = getattr(getattr(model, "module", model), "config", None)
        channels = getattr(config, _CHANNELS, None)
        of_images = isinstance(channels, int) and noisy.ndim == _IMAGE_DIMS
        if not of_images or noisy.shape[1] == channels:
            raise
        raise DataError(
            f"the model takes {channels} channels, but the images have {noisy.shape[1]}",
            f"give images of {channels} channels, or create the model with "
            f"in_channels={noisy.shape[1]} and out_channels={noisy.shape[1]}",
            "batch['images']",
            tuple(noisy.shape),
        ) from error
    return prediction_of(output, like=noisy)


def prediction_of(output: Any, *, like: Tensor) -> Tensor:
    """Return the prediction contained in a diffusers model's output."""
    prediction = output if isinstance(output, Tensor) else output[0]
    if not isinstance(prediction, Tensor) or prediction.shape != like.shape:
        shape = getattr(prediction, "shape", None)
        raise DataError(
            f"the model's output has shape {None if shape is None else tuple(shape)}, but "
            f"its input has shape {tuple(like.shape)}",
            "use a model with as many output channels as input channels; models that also "
            "predict a variance are not supported",
            "model.forward",
        )
    return prediction


def config_of(model: Any) -> Any:
    """Return the configuration of a diffusers model, or of the model inside an engine."""
    return getattr(model, "module", model).config


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name."""
    return inspect.signature(function).parameters


@attrs.frozen(kw_only=True)
class Unconditional:
    """Family of unconditional models; batches contain ``"images"`` (b, c, h, w) in [-1, 1]."""

    def clean(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the images of a batch in fp32."""
        return images_of(batch)

    def conditioning(
        self,
        batch: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's
        generator: torch.Generator,  # noqa: ARG002
    ) -> Conditioning:
        """Return no conditioning."""
        return {}

    def condition_on(self, labels: Tensor | None) -> Conditioning:
        """Return no conditioning.

        Raises:
            InvalidValueError: ``labels`` is not ``None``.
        """
        if labels is not None:
            raise InvalidValueError(
                "an unconditional model does not support labels",
                "use ClassConditional, or pass count= instead of labels=",
                "labels",
                tuple(labels.shape),
            )
        return {}

    def without_condition(self, conditioning: Conditioning) -> Conditioning | None:  # noqa: ARG002
        """Return ``None``, because unconditional models do not support guidance."""
        return None

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Call ``model(noisy, timesteps)``."""
        return call_diffusers_model(model, noisy, timesteps, conditioning)


@attrs.frozen(kw_only=True)
class ClassConditional:
    """Family of class-conditional models, such as a ``UNet2DModel`` with ``num_class_embeds``.

    Batches contain ``"images"`` (b, c, h, w) in [-1, 1] and integer ``"labels"`` (b,). The model
    receives the labels as ``class_labels``. For classifier-free guidance, create the model with one
    extra class, and set ``null_label`` to that class.
    """

    null_label: int | None = None
    """Class that stands for "no label"; ``None`` disables guidance."""
    dropout: float = attrs.field(default=0.0, validator=validated(probability))
    """Probability of replacing a label by ``null_label`` in training."""

    def __attrs_post_init__(self) -> None:
        if self.dropout > 0 and self.null_label is None:
            raise InvalidValueError(
                "dropout needs a null class, which replaces the dropped labels",
                "set null_label to the model's last class, num_class_embeds - 1",
                "dropout",
                self.dropout,
            )

    def clean(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the images of a batch in fp32."""
        return images_of(batch)

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """Return a batch's labels, each replaced by ``null_label`` with probability ``dropout``."""
        labels = take(batch, "labels")
        if self.null_label is None or self.dropout == 0:
            return {"class_labels": labels}
        dropped = torch.rand(labels.shape, generator=generator) < self.dropout
        return {"class_labels": labels.masked_fill(dropped.to(labels.device), self.null_label)}

    def condition_on(self, labels: Tensor | None) -> Conditioning:
        """Return the labels unchanged.

        Raises:
            InvalidValueError: ``labels`` is ``None``.
        """
        if labels is None:
            raise InvalidValueError(
                "a class-conditional model needs labels",
                "pass labels=torch.tensor([...]); use null_label for images of any class",
                "labels",
                None,
            )
        return {"class_labels": labels}

    def without_condition(self, conditioning: Conditioning) -> Conditioning | None:
        """Return one ``null_label`` per sample; ``None`` if there is no null class."""
        if self.null_label is None:
            return None
        return {"class_labels": torch.full_like(conditioning["class_labels"], self.null_label)}

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Call ``model(noisy, timesteps, class_labels=labels)``."""
        return call_diffusers_model(model, noisy, timesteps, conditioning)
