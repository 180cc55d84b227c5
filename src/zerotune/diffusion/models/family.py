"""What a kind of model is to the library: how it is called in training and drawn from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from zerotune._util.text import probability, validated
from zerotune.diffusion.data.streams import check_float
from zerotune.errors import DataError, InvalidValueError

Conditioning = Mapping[str, Tensor]
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

    def clean(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The noise-free samples (b, c, h, w) of a batch, fp32."""
        ...

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """What the model may know of each sample in training, dropped at random if so asked."""
        ...

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The model's output, shaped as ``noisy``, in its precision or fp32.

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

    def condition_on(self, labels: Tensor | None) -> Conditioning:
        """The conditioning for drawing samples of these labels (b,)."""
        ...

    def without_condition(self, conditioning: Conditioning) -> Conditioning | None:
        """The "nothing is known" counterpart for guidance; ``None`` where there is none."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Drawing:
    """Images wanted of one rank; options are those of ``sample``."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    """One for each prompt: it alone decides the image's noise."""
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
    """A family whose images are drawn from texts, through its diffusers pipeline."""

    def draw(self, model: Denoiser, drawing: Drawing) -> Tensor:
        """Images (n, 3, height, width) on the CPU, fp32, nominally in [-1, 1]."""
        ...


def take(batch: Mapping[str, Tensor], key: str) -> Tensor:
    """A tensor of a batch."""
    if key not in batch:
        raise DataError(
            f"the batch has no {key!r}, only {sorted(batch)}",
            key=f"batch[{key!r}]",
            fix="let the dataset yield dicts with it, or use another family",
        )
    return batch[key]


def images_of(batch: Mapping[str, Tensor]) -> Tensor:
    """The images of a batch, fp32."""
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
    """The prediction in what a diffusers model returned."""
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


@attrs.frozen(kw_only=True)
class Unconditional:
    """Batches hold ``"images"`` (b, c, h, w) in [-1, 1]; the model sees nothing else."""

    def clean(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The images, fp32."""
        return images_of(batch)

    def conditioning(
        self,
        batch: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's
        generator: torch.Generator,  # noqa: ARG002
    ) -> Conditioning:
        """Nothing."""
        return {}

    def condition_on(self, labels: Tensor | None) -> Conditioning:
        """Nothing.

        Raises:
            InvalidValueError: Labels for a family without any.
        """
        if labels is not None:
            raise InvalidValueError(
                "an unconditional model takes no labels",
                key="labels",
                value=tuple(labels.shape),
                fix="use ClassConditional, or pass count= instead of labels=",
            )
        return {}

    def without_condition(self, conditioning: Conditioning) -> Conditioning | None:  # noqa: ARG002
        """There is nothing to guide towards."""
        return None

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Call ``model(noisy, timesteps)``."""
        return call_diffusers_model(model, noisy, timesteps, conditioning)


@attrs.frozen(kw_only=True)
class ClassConditional:
    """Batches hold ``"images"`` (b, c, h, w) in [-1, 1] and ``"labels"`` (b,), integers.

    The model is called with ``class_labels``, as diffusers' ``UNet2DModel`` with
    ``num_class_embeds`` takes them. For classifier-free guidance give it one class more than the
    data has, and name that class ``null_label``.
    """

    null_label: int | None = None
    """The class that means "unknown"; ``None``: the model cannot be guided."""
    dropout: float = attrs.field(default=0.0, validator=validated(probability))
    """Share of labels replaced by ``null_label`` in training."""

    def __attrs_post_init__(self) -> None:
        if self.dropout > 0 and self.null_label is None:
            raise InvalidValueError(
                "dropped labels need a class that means unknown",
                key="dropout",
                value=self.dropout,
                fix="set null_label to the model's last class, num_class_embeds - 1",
            )

    def clean(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The images, fp32."""
        return images_of(batch)

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """The labels, some of them replaced by ``null_label``."""
        labels = take(batch, "labels")
        if self.null_label is None or self.dropout == 0:
            return {"class_labels": labels}
        dropped = torch.rand(labels.shape, generator=generator) < self.dropout
        return {"class_labels": labels.masked_fill(dropped.to(labels.device), self.null_label)}

    def condition_on(self, labels: Tensor | None) -> Conditioning:
        """The labels; all ``null_label`` is not implied.

        Raises:
            InvalidValueError: No labels.
        """
        if labels is None:
            raise InvalidValueError(
                "a class-conditional model needs labels",
                key="labels",
                value=None,
                fix="pass labels=torch.tensor([...]); null_label draws any class",
            )
        return {"class_labels": labels}

    def without_condition(self, conditioning: Conditioning) -> Conditioning | None:
        """The same number of ``null_label``; ``None`` when there is no such class."""
        if self.null_label is None:
            return None
        return {"class_labels": torch.full_like(conditioning["class_labels"], self.null_label)}

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Call ``model(noisy, timesteps, class_labels=labels)``."""
        return call_diffusers_model(model, noisy, timesteps, conditioning)
