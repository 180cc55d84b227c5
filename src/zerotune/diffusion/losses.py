"""Losses: the error of a prediction, optionally weighted and masked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import attrs
import torch

from zerotune.diffusion.data.preparation import LOSS_MASKS, shrunk
from zerotune.errors import DataError

LOSS_WEIGHTS = "loss_weights"
"""Batch key for the loss weights, one per sample: (b,)."""


# -- The error of one value.


@attrs.frozen(kw_only=True, eq=False)
class Level:
    """Noise level of each sample in a batch."""

    time: torch.Tensor | None = None
    """(b,), fp32: time step as a fraction of all steps, 0 to 1; ``None`` for EDM."""
    noise_to_signal: torch.Tensor | None = None
    """(b,), fp32: standard deviation of the noise divided by the scale of the clean sample;
    ``None`` for flow matching."""


@runtime_checkable
class Loss(Protocol):
    """Protocol: computes the error of each predicted value.

    Any object with a method ``errors`` is accepted.
    """

    def errors(self, prediction: torch.Tensor, target: torch.Tensor, level: Level) -> torch.Tensor:
        """Return the errors in fp32, with the shape of the prediction (b, c, h, w).

        Args:
            prediction: Output of the model, fp32.
            target: Expected output, fp32.
            level: Noise levels of the model's input.
        """
        ...


# -- The error of a batch.


@attrs.frozen(kw_only=True, eq=False)
class Comparison:
    """A prediction with its target, weights and masks."""

    prediction: torch.Tensor
    """Prediction (b, c, h, w), in the model's precision or fp32."""
    target: torch.Tensor
    """Target of the same shape."""
    batch: Mapping[str, torch.Tensor]
    """Batch, optionally with ``"loss_weights"`` (b,) and ``"loss_masks"`` (b, 1, h, w)."""
    weights: torch.Tensor | None = None
    """Loss weights of the objective, (b,)."""
    errors: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Function that computes the error of each value in fp32; by default the squared error."""

    def mean(self) -> torch.Tensor:
        """Return the mean of the weighted errors over the batch: a scalar, fp32."""
        weighted = self.weights is not None or LOSS_WEIGHTS in self.batch
        if self.errors is None and not weighted and LOSS_MASKS not in self.batch:
            return torch.nn.functional.mse_loss(*self._in_fp32())
        return self.by_sample().mean()

    def by_sample(self) -> torch.Tensor:
        """Return the weighted mean error of each sample (b,), fp32."""
        predicted, target = self._in_fp32()
        if self.errors is None:
            errors = (predicted - target) ** 2
        else:
            errors = self.errors(predicted, target)
        mask = _mask_of(self.batch, like=predicted)
        if mask is not None:
            errors = errors * mask
        means = errors.flatten(1).mean(1)
        if self.weights is not None:
            means = means * self.weights.to(means.device, torch.float32)
        return weighed(means, self.batch)

    def _in_fp32(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.prediction.float(), self.target.to(self.prediction.device).float()


def weighed(losses: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Multiply losses (b,) by the batch's loss weights, if it has some."""
    given = batch.get(LOSS_WEIGHTS)
    if given is None:
        return losses
    if given.shape != losses.shape:
        raise DataError(
            f"must contain one weight per sample: a tensor of shape ({len(losses)},)",
            "add a scalar weight, a tensor of shape (), to each sample of the dataset",
            f"batch[{LOSS_WEIGHTS!r}]",
            tuple(given.shape),
        )
    return losses * given.to(losses.device, torch.float32)


def masks_over(
    clean: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return the batch with its loss masks resized to the height and width of ``clean``."""
    mask, images = batch.get(LOSS_MASKS), batch.get("images")
    if mask is None or images is None or mask.shape[-2:] == clean.shape[-2:]:
        return batch
    if mask.ndim != 4 or mask.shape[-2:] != images.shape[-2:]:
        return batch  # The loss reports the error.
    return {**batch, LOSS_MASKS: shrunk(mask.float(), clean.shape[-2:])}


def _mask_of(batch: Mapping[str, torch.Tensor], *, like: torch.Tensor) -> torch.Tensor | None:
    mask = batch.get(LOSS_MASKS)
    if mask is None:
        return None
    places = (len(like), 1, *like.shape[2:])
    if like.ndim == 5 and mask.ndim == 4:
        mask = mask.unsqueeze(2).expand(-1, -1, like.shape[2], -1, -1)  # The same for all frames.
    if mask.shape not in (places, like.shape):
        raise DataError(
            f"masks must have the shape {places}, the shape of the model's input with one channel",
            "resize pixel masks to the latent size, for example with "
            'torch.nn.functional.interpolate(masks, size=(h, w), mode="area")',
            f"batch[{LOSS_MASKS!r}]",
            tuple(mask.shape),
        )
    return mask.to(like.device, torch.float32)
