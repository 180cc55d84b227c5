"""The loss on held-out data with noise that never changes, so that figures compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from zerotune.diffusion.data.order import derive_seed
from zerotune.diffusion.data.streams import Batch
from zerotune.diffusion.models.family import Denoiser
from zerotune.diffusion.noise import DrawnNoise
from zerotune.diffusion.objective import LevelObjective, Objective
from zerotune.diffusion.sampling import equal_share, evaluating, group_of, shared
from zerotune.errors import DataError, InvalidValueError

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The middles of five equal parts of the noise levels."""


@attrs.frozen(kw_only=True)
class FixedNoise:
    """Noise that depends on a seed, the number of a batch and the row in it alone."""

    seed: int
    index: int
    """Number of the batch."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:  # noqa: ARG002
        """Standard normal values; the generator is left alone."""
        rows = [
            torch.randn(clean.shape[1:], generator=_noise_generator(self.seed, self.index, row))
            for row in range(len(clean))
        ]
        noise = torch.stack(rows).to(clean.device)
        return DrawnNoise(target=noise, added=noise)


@attrs.frozen(kw_only=True)
class HeldOutLoss:
    """Mean squared errors on held-out data."""

    mean: float
    """Over all samples and quantiles."""
    by_quantile: Mapping[float, float]
    """Over all samples, from little noise to much."""
    samples: int


def validation_loss(
    objective: Objective,
    model: Denoiser,
    batches: Sequence[Batch],
    *,
    seed: int = 0,
    quantiles: Sequence[float] = QUANTILES,
) -> HeldOutLoss:
    """The error on held-out batches at fixed noise levels, with fixed noise.

    Collective under an ``Engine``: every rank calls it with the same arguments, computes its
    share of the batches in the same number of forward passes, and receives the same figures.
    They depend on the batches and the seed, not on the number of ranks, the step, or what the
    objective does with noise and weights in training, so they compare between all of these.
    The training's own random numbers are left alone.

    Args:
        objective: ``DenoisingObjective``, ``FlowMatchingObjective``, or any other
            ``LevelObjective``.
        model: An ``Engine`` or a diffusers model; put in evaluation mode meanwhile.
        batches: All held-out batches, the same on every rank, such as a list; each is read by one
            rank only.
        seed: Fixes the noise.
        quantiles: Noise levels in [0, 1], from little noise to much; one forward pass each.

    Raises:
        DataError: There are no batches, or one has no samples.
        InvalidValueError: The objective cannot tell its error at a level, or a level is none.
        CollectiveError: The ranks were given different arguments.
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
    """The losses of this rank's batches, by number."""
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
"""A batch's loss at each level, and its samples."""


def _check_levels(
    objective: Objective, batches: Sequence[Batch], levels: tuple[float, ...]
) -> LevelObjective:
    if not isinstance(objective, LevelObjective):
        raise InvalidValueError(
            "cannot tell its error at one noise level",
            key="objective",
            value=type(objective).__name__,
            fix="give it a method losses_at, as LevelObjective describes",
        )
    if not levels or not all(0.0 <= level <= 1.0 for level in levels):
        raise InvalidValueError(
            "are no levels of noise",
            key="quantiles",
            value=levels,
            fix="write numbers from 0 to 1, at least one",
        )
    if len(batches) == 0:
        raise DataError(
            "there is nothing to validate on", key="batches", value=0, fix="give at least one batch"
        )
    return objective


def _count_samples(batch: Batch, index: int) -> int:
    counts = {len(value) for value in batch.values()}
    if len(counts) != 1 or counts == {0}:
        raise DataError(
            "all tensors of a batch have as many samples, and at least one",
            key=f"batches[{index}]",
            value=sorted(counts),
            fix="leave empty batches out",
        )
    return counts.pop()


def _mean_losses(parts: list[dict[int, _BatchLosses]], levels: tuple[float, ...]) -> HeldOutLoss:
    # In the order of the batches, so that the last digit is the same for any number of ranks.
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
