"""Image models without text: nothing to condition on, or one class label per image."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from zerotune._util.text import probability, validated
from zerotune.diffusion.families.base import call_diffusers_model, images_of, take
from zerotune.diffusion.family import Conditioning, Denoiser
from zerotune.errors import InvalidValueError


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
