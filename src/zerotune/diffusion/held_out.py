"""Loss on held-out data, with fixed noise to make steps and runs comparable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from zerotune.diffusion.data.batches import Batch
from zerotune.diffusion.data.order import derive_seed
from zerotune.diffusion.models.family import Denoiser
from zerotune.diffusion.noise import DrawnNoise
from zerotune.diffusion.objective import LevelObjective, Objective
from zerotune.diffusion.sampling import equal_share, evaluating, group_of, shared
from zerotune.errors import DataError, InvalidValueError

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Midpoints of five equal parts of the range of noise levels."""


@attrs.frozen(kw_only=True)
class FixedNoise:
    """Noise that depends only on the seed, the index of the batch, and the row in the batch."""

    seed: int
    index: int
    """Index of the batch."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:  # noqa: ARG002
        """Return standard normal values; ``generator`` is not used."""
        rows = [
            torch.randn(clean.shape[1:], generator=_noise_generator(self.seed, self.index, row))
            for row in range(len(clean))
        ]
        noise = torch.stack(rows).to(clean.device)
        return DrawnNoise(target=noise, added=noise)


@attrs.frozen(kw_only=True)
class HeldOutLoss:
    """Mean squared errors on held-out data, overall and per noise level."""

    mean: float
    """Mean error over all samples and quantiles."""
    by_quantile: Mapping[float, float]
    """Mean error over all samples for each quantile of the noise levels, from least to most
    noise."""
    samples: int


def validation_loss(
    objective: Objective,
    model: Denoiser,
    batches: Sequence[Batch],
    *,
    seed: int = 0,
    quantiles: Sequence[float] = QUANTILES,
) -> HeldOutLoss:
    """Measure the loss on held-out batches at fixed noise levels with fixed noise.

    Collective with an ``Engine``: every rank must pass the same arguments. Each rank computes its
    share of the batches, and all ranks return the same result. Losses from different steps and runs
    are comparable, because the noise depends only on the seed and the position of a sample in
    ``batches``. The objective's noise and weighting have no effect. Validation does not change the
    random state of training.

    Args:
        objective: ``DenoisingObjective``, ``FlowMatchingObjective``, or your own
            ``LevelObjective``.
        model: An ``Engine`` or a diffusers model, in evaluation mode during the call.
        batches: Sequence of all held-out batches, identical on every rank. Each rank reads only its
            share.
        seed: Seed for the noise.
        quantiles: Noise levels from 0 (least noise) to 1 (most noise). Each level requires one
            forward pass per batch.

    Raises:
        DataError: There are no batches, or a batch is empty.
        InvalidValueError: ``objective`` is not a ``LevelObjective``, or a noise level is invalid.
        CollectiveError: The ranks passed different arguments.
    """
    levels = tuple(sorted(set(quantiles)))
    able = _check_levels(objective, batches, levels)
    group = group_of(model)
    if group is not None:
        group.agree((len(batches), seed, levels), "validation loss")

    def work() -> dict[int, _BatchLosses]:
        return _errors(
            able, model, batches, mine=equal_share(len(batches), group), seed=seed, at=levels
        )

    return _mean_losses(shared(group, "validation loss", work), levels)


def _errors(
    objective: LevelObjective,
    model: Denoiser,
    batches: Sequence[Batch],
    *,
    mine: Sequence[int],
    seed: int,
    at: tuple[float, ...],
) -> dict[int, _BatchLosses]:
    """Return the losses of this rank's batches, by batch index."""
    found: dict[int, _BatchLosses] = {}
    with evaluating(model):
        for index in mine:
            held_out = batches[index]
            samples = _count_samples(held_out, index)
            batch = {name: value.to(model.device) for name, value in held_out.items()}
            losses = objective.losses_at(
                model,
                batch,
                quantiles=at,
                noise=FixedNoise(seed=seed, index=index),
                generator=_noise_generator(seed, index, "conditioning"),
            )
            found[index] = losses.tolist(), samples
    return found


_BatchLosses = tuple[list[float], int]
"""Loss at each level for a batch, and the number of samples."""


def _check_levels(
    objective: Objective, batches: Sequence[Batch], levels: tuple[float, ...]
) -> LevelObjective:
    if not isinstance(objective, LevelObjective):
        raise InvalidValueError(
            "cannot compute the loss at a given noise level",
            "implement losses_at in the objective, as LevelObjective requires",
            "objective",
            type(objective).__name__,
        )
    if not levels or not all(0.0 <= level <= 1.0 for level in levels):
        raise InvalidValueError(
            "must be noise levels between 0 and 1",
            "write at least one number from 0 to 1",
            "quantiles",
            levels,
        )
    if len(batches) == 0:
        raise DataError("there are no held-out batches", "pass at least one batch", "batches", 0)
    return objective


def _count_samples(batch: Batch, index: int) -> int:
    counts = {len(value) for value in batch.values()}
    if len(counts) != 1 or counts == {0}:
        raise DataError(
            "all tensors of a batch must have the same number of samples, at least 1",
            "remove empty batches",
            f"batches[{index}]",
            sorted(counts),
        )
    return counts.pop()


def _mean_losses(parts: list[dict[int, _BatchLosses]], levels: tuple[float, ...]) -> HeldOutLoss:
    # In batch order, so that the last digit does not depend on the number of ranks.
    every = {index: losses for part in parts for index, losses in part.items()}
    ordered = [every[index] for index in sorted(every)]
    samples = sum(count for _, count in ordered)
    means = [
        sum(losses[place] * count for losses, count in ordered) / samples
        for place in range(len(levels))
    ]
    return HeldOutLoss(
        mean=sum(means) / len(means),
        by_quantile=dict(zip(levels, means, strict=True)),
        samples=samples,
    )


def _noise_generator(seed: int, *parts: object) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, "validation", *parts))
