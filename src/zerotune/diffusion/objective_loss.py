"""The squared error of a batch, weighted where something asks for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from zerotune.errors import DataError

LOSS_WEIGHTS = "loss_weights"
"""Key of a batch: what each sample's loss is multiplied by, (b,)."""
LOSS_MASKS = "loss_masks"
"""Key of a batch: what each place's squared error is multiplied by, (b, 1, h, w)."""


def mean_error(
    prediction: torch.Tensor,
    target: torch.Tensor,
    *,
    batch: Mapping[str, torch.Tensor],
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean over the batch of each sample's weight times its mean squared error.

    Args:
        prediction: The model's output (b, c, h, w).
        target: What it should have been, of the same shape.
        batch: May hold ``"loss_weights"`` (b,) and ``"loss_masks"`` (b, 1, h, w).
        weights: (b,), of the objective itself.

    Returns:
        A scalar, fp32, on the device of ``prediction``.

    Raises:
        DataError: Weights or masks of the batch are of another shape.
    """
    predicted, target = prediction.float(), target.to(prediction.device).float()
    each = _sample_weights(batch, weights, like=predicted)
    mask = _mask(batch, like=predicted)
    if each is None and mask is None:
        return torch.nn.functional.mse_loss(predicted, target)
    squared = (predicted - target) ** 2
    if mask is not None:
        squared = squared * mask
    errors = squared.flatten(1).mean(1)
    return (errors if each is None else errors * each).mean()


def min_snr_weights(scheduler: Any, timesteps: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Min-SNR weights for what ``scheduler`` predicts.

    Of the loss of the clean image they are ``min(snr, gamma)``; noise and velocity scale that loss
    by ``snr`` and ``snr + 1``, so they are divided by it. Where the schedule ends in pure noise
    the weight is 1, not 0: no other step would teach the model the one that sampling starts with.

    Args:
        scheduler: A diffusers scheduler with ``alphas_cumprod``.
        timesteps: (b,), integers.
        gamma: The largest signal-to-noise ratio that counts in full; 5 in the paper.

    Returns:
        (b,), fp32, on the device of ``timesteps``.

    Source: https://arxiv.org/abs/2303.09556 and ``snr_gamma`` of diffusers'
    ``examples/text_to_image/train_text_to_image.py``.
    """
    from diffusers.training_utils import compute_snr

    snr: torch.Tensor = compute_snr(scheduler, timesteps).float()
    weights = snr.clamp(max=gamma)
    prediction = scheduler.config.get("prediction_type", "epsilon")
    if prediction == "epsilon":
        weights = weights / snr
    elif prediction == "v_prediction":
        weights = weights / (snr + 1)
    return torch.where(snr == 0, torch.ones_like(snr), weights)


def _sample_weights(
    batch: Mapping[str, torch.Tensor], weights: torch.Tensor | None, *, like: torch.Tensor
) -> torch.Tensor | None:
    given = batch.get(LOSS_WEIGHTS)
    if given is None:
        return None if weights is None else weights.to(like.device, torch.float32)
    if given.shape != like.shape[:1]:
        raise DataError(
            f"one weight per sample is wanted, ({len(like)},)",
            key=f"batch[{LOSS_WEIGHTS!r}]",
            value=tuple(given.shape),
            fix="let each sample of the dataset have one number, a tensor of shape ()",
        )
    given = given.to(like.device, torch.float32)
    return given if weights is None else given * weights.to(like.device, torch.float32)


def _mask(batch: Mapping[str, torch.Tensor], *, like: torch.Tensor) -> torch.Tensor | None:
    mask = batch.get(LOSS_MASKS)
    if mask is None:
        return None
    places = (len(like), 1, *like.shape[2:])
    if mask.shape not in (places, like.shape):
        raise DataError(
            f"masks lie over the samples the model sees, {places}",
            key=f"batch[{LOSS_MASKS!r}]",
            value=tuple(mask.shape),
            fix="shrink masks of pixels to the latents, as "
            'torch.nn.functional.interpolate(masks, size=(h, w), mode="area") does',
        )
    return mask.to(like.device, torch.float32)


def check_gamma(_instance: object, attribute: Any, value: float | None) -> None:
    """Refuse a gamma that would turn the loss off or make no sense."""
    from zerotune.errors import InvalidValueError

    if value is not None and not (math.isfinite(value) and value > 0):
        raise InvalidValueError(
            "is no signal-to-noise ratio to clip at",
            key=attribute.name,
            value=value,
            fix="write 5.0 as the paper does, or None for no weighting",
        )
