"""What is learned: noise, velocity or the clean image, through diffusers' own schedulers.

Every random number comes from the generator passed in, on the CPU, so that a run is the same on
every device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs
import torch

from zerotune.decisions import Decision, announce
from zerotune.diffusion.data.preparation import LOSS_MASKS, shrunk
from zerotune.diffusion.models.family import Conditioning, Denoiser, Family, Unconditional
from zerotune.diffusion.noise_schedule import (
    NoiseLevels,
    ResolutionShift,
    Shift,
    adding_scheduler,
    at_quantile,
    bounds,
    check_range,
    noise_levels,
    own_copy,
    replacement_decision,
)
from zerotune.errors import DataError, InvalidValueError

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler


@attrs.frozen(kw_only=True, eq=False)
class DrawnNoise:
    """The noise of one batch, shaped as its samples."""

    target: torch.Tensor
    """What the model has to find."""
    added: torch.Tensor
    """What its input is made of; the same but for ``InputPerturbation``."""


@runtime_checkable
class Noise(Protocol):
    """Draws the noise of a batch. Any object with this method will do."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:
        """Noise on the device of ``clean``.

        Args:
            clean: Noise-free samples (b, c, h, w), fp32.
            generator: A CPU generator, the only source of randomness.
        """
        ...


def _check_strength(_instance: object, attribute: Any, value: float) -> None:
    if not 0.0 <= value < float("inf"):
        raise InvalidValueError(
            "is no strength of noise",
            key=attribute.name,
            value=value,
            fix="write a number that is not negative, such as 0.1",
        )


@attrs.frozen(kw_only=True)
class GaussianNoise:
    """Independent standard normal values."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:
        """One value for each of ``clean``."""
        noise = _normal_like(clean.shape, clean, generator)
        return DrawnNoise(target=noise, added=noise)


@attrs.frozen(kw_only=True)
class OffsetNoise:
    """Noise with a common shift per sample and channel, so that brightness is learned too.

    Source: ``noise_offset`` of diffusers' ``examples/text_to_image/train_text_to_image.py``.
    """

    strength: float = attrs.field(default=0.1, validator=_check_strength)
    """Standard deviation of the shift."""
    noise: Noise = attrs.field(factory=GaussianNoise)
    """What is shifted."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:
        """The shifted noise."""
        drawn = self.noise.draw(clean, generator)
        shape = (*clean.shape[:2], *(1,) * (clean.ndim - 2))
        offset = self.strength * _normal_like(shape, clean, generator)
        return DrawnNoise(target=drawn.target + offset, added=drawn.added + offset)


@attrs.frozen(kw_only=True)
class InputPerturbation:
    """More noise in the model's input than it has to find, which makes it forgive its own errors.

    Source: ``input_perturbation`` of diffusers' ``examples/text_to_image/train_text_to_image.py``,
    after https://arxiv.org/abs/2301.11706.
    """

    strength: float = attrs.field(default=0.1, validator=_check_strength)
    """Standard deviation of what is not to be found."""
    noise: Noise = attrs.field(factory=GaussianNoise)
    """What is perturbed."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:
        """The noise, and what is added in its place."""
        drawn = self.noise.draw(clean, generator)
        more = self.strength * _normal_like(clean.shape, clean, generator)
        return DrawnNoise(target=drawn.target, added=drawn.added + more)


def _normal_like(
    shape: tuple[int, ...], clean: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(clean.device)


LOSS_WEIGHTS = "loss_weights"
"""Key of a batch: what each sample's loss is multiplied by, (b,)."""

_SIGMA_ROUNDING = 1e-5

_PREDICTIONS = ("epsilon", "v_prediction", "sample")

_DENSITIES = ("uniform", "logit_normal", "mode")

_WEIGHTINGS = ("none", "sigma_sqrt", "cosmap")


@runtime_checkable
class Objective(Protocol):
    """A loss. Any callable of this shape will do; sampling needs ``family`` and ``scheduler``."""

    def __call__(
        self, model: Denoiser, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> torch.Tensor:
        """The loss of one micro batch: a scalar, fp32, on the model's device.

        Args:
            model: What is trained.
            batch: Tensors by name, batch first.
            generator: A CPU generator, the only source of randomness.
        """
        ...


@runtime_checkable
class LevelObjective(Objective, Protocol):
    """An objective that also tells its error at noise levels of one's choice."""

    def losses_at(
        self,
        model: Denoiser,
        batch: Mapping[str, torch.Tensor],
        *,
        quantiles: Sequence[float],
        noise: Noise,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Mean squared errors (q,), fp32, one forward pass for each quantile.

        Weighted by the batch, not by the objective, so that they compare between objectives.

        Args:
            model: What predicts.
            batch: Tensors by name, batch first.
            quantiles: In [0, 1], from little noise to much, of the levels that uniform draws
                would give.
            noise: What is added.
            generator: For what else is drawn, such as dropped conditioning.
        """
        ...


# -- Objectives over the schedulers of diffusers.


@attrs.frozen(kw_only=True, eq=False)
class _Inputs:
    """A batch made ready for any noise level."""

    batch: Mapping[str, torch.Tensor]
    clean: torch.Tensor
    conditioning: Conditioning
    noise: DrawnNoise


class _SchedulerObjective(ABC):
    """What objectives over diffusers' schedulers share: batches made ready, errors at levels."""

    __slots__ = ()

    family: Family
    noise: Noise

    def losses_at(
        self,
        model: Denoiser,
        batch: Mapping[str, torch.Tensor],
        *,
        quantiles: Sequence[float],
        noise: Noise,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Mean squared errors at quantiles of the trained levels; see ``LevelObjective``."""
        inputs = self._inputs(noise, batch, generator)
        levels = self._levels_at(inputs, quantiles)
        return torch.stack([self._loss(model, inputs, level) for level in levels])

    def _inputs(
        self, noise: Noise, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> _Inputs:
        # In this order: seeds of earlier runs depend on it.
        clean = self.family.clean(batch)
        conditioning = self.family.conditioning(batch, generator)
        drawn = noise.draw(clean, generator)
        batch = _masks_over(clean, batch)
        return _Inputs(batch=batch, clean=clean, conditioning=conditioning, noise=drawn)

    @abstractmethod
    def _levels_at(self, inputs: _Inputs, quantiles: Sequence[float]) -> Sequence[Any]:
        """A level of noise for each quantile, the same for all samples."""

    @abstractmethod
    def _loss(
        self, model: Denoiser, inputs: _Inputs, level: Any, weights: Any = None
    ) -> torch.Tensor:
        """The error of a batch, each sample at its level."""


def _new_ddpm() -> Any:
    from diffusers import DDPMScheduler

    return DDPMScheduler()


@attrs.frozen(kw_only=True, eq=False)
class DenoisingObjective(_SchedulerObjective):
    """Denoising diffusion: DDPM's forward process, mean squared error.

    Steps are uniform over the scheduler's; the target is what its ``prediction_type`` says. A
    batch's ``"loss_weights"`` (b,) and ``"loss_masks"`` (b, 1, h, w) multiply the error.

    Source: diffusers' ``examples/text_to_image/train_text_to_image_sdxl.py``.
    """

    scheduler: DDPMScheduler = attrs.field(factory=_new_ddpm, converter=own_copy)
    """Any diffusers scheduler with ``alphas_cumprod``; a private copy is kept. With
    ``rescale_betas_zero_snr=True`` the schedule ends in pure noise."""
    family: Family = attrs.field(factory=Unconditional)
    """How a batch becomes the model's inputs."""
    noise: Noise = attrs.field(factory=GaussianNoise)
    """What is added: ``OffsetNoise``, ``InputPerturbation``, one inside the other, or your own."""
    snr_gamma: float | None = attrs.field(default=None)
    """Clip of min-SNR weighting, 5 in its paper; ``None``: all time steps weigh the same."""
    timestep_range: tuple[float, float] = attrs.field(default=(0.0, 1.0), validator=check_range)
    """Part of the schedule that is trained, from little noise to much: ``(0.0, 0.2)`` for a
    refiner that takes over the last fifth of sampling."""
    _adding: Any = attrs.field(
        init=False, default=attrs.Factory(lambda self: adding_scheduler(self.scheduler), True)
    )

    @snr_gamma.validator
    def _check_gamma(self, _attribute: Any, value: float | None) -> None:
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidValueError(
                "is no signal-to-noise ratio to clip at",
                key="snr_gamma",
                value=value,
                fix="write 5.0 as the paper does, or None for no weighting",
            )

    def __attrs_post_init__(self) -> None:
        if self._prediction not in _PREDICTIONS:
            raise InvalidValueError(
                f"this objective learns {', '.join(_PREDICTIONS)}",
                key="scheduler.prediction_type",
                value=self._prediction,
                fix="use FlowMatchingObjective for flow matching",
            )
        if self._prediction == "epsilon" and float(self._adding.alphas_cumprod[-1]) == 0.0:
            raise InvalidValueError(
                "the schedule ends in pure noise, from which a model that predicts noise cannot "
                "tell the image",
                key="scheduler.prediction_type",
                value="epsilon",
                fix='give the scheduler prediction_type="v_prediction", or '
                "rescale_betas_zero_snr=False",
            )
        self._bounds()
        announce(self.decisions)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What was chosen for the scheduler."""
        return replacement_decision(self.scheduler, self._adding)

    def __call__(
        self, model: Denoiser, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> torch.Tensor:
        """Mean squared error of the prediction, scalar, fp32."""
        inputs = self._inputs(self.noise, batch, generator)
        low, high = self._bounds()
        timesteps = torch.randint(low, high, (len(inputs.clean),), generator=generator)
        timesteps = timesteps.to(inputs.clean.device)
        weights = None
        if self.snr_gamma is not None:
            weights = min_snr_weights(self._adding, timesteps, gamma=self.snr_gamma)
        return self._loss(model, inputs, timesteps, weights)

    def _levels_at(self, inputs: _Inputs, quantiles: Sequence[float]) -> list[torch.Tensor]:
        low, high = self._bounds()
        steps = [low + at_quantile(quantile, high - low) for quantile in quantiles]
        shape, device = (len(inputs.clean),), inputs.clean.device
        return [torch.full(shape, step, device=device) for step in steps]

    def _loss(
        self, model: Denoiser, inputs: _Inputs, timesteps: torch.Tensor, weights: Any = None
    ) -> torch.Tensor:
        noisy = self._adding.add_noise(inputs.clean, inputs.noise.added, timesteps)
        prediction = self.family.predict(model, noisy, timesteps, inputs.conditioning)
        target = self._target(inputs.clean, inputs.noise.target, timesteps)
        return mean_error(prediction, target, batch=inputs.batch, weights=weights)

    @property
    def _prediction(self) -> str:
        return str(self.scheduler.config.get("prediction_type", "epsilon"))

    def _bounds(self) -> tuple[int, int]:
        return bounds(int(self.scheduler.config.num_train_timesteps), self.timestep_range)

    def _target(
        self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        if self._prediction == "sample":
            return clean
        if self._prediction == "v_prediction":
            velocity: torch.Tensor = self._adding.get_velocity(clean, noise, timesteps)
            return velocity
        return noise


def _new_flow() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler()


@attrs.frozen(kw_only=True, eq=False)
class FlowMatchingObjective(_SchedulerObjective):
    """Rectified flow: straight lines from data to noise, mean squared error of the velocity.

    ``noisy = (1 - sigma) * clean + sigma * noise``; the target is ``noise - clean``. Sigmas and
    time steps are the scheduler's own, so ``shift`` and the like are its settings. With its
    ``use_dynamic_shifting`` they are moved for each batch by what its resolution asks for, as
    they are in sampling. A batch's ``"loss_weights"`` (b,) and ``"loss_masks"`` (b, 1, h, w)
    multiply the error.

    Source: diffusers' ``examples/dreambooth/train_dreambooth_sd3.py``.
    """

    scheduler: FlowMatchEulerDiscreteScheduler = attrs.field(factory=_new_flow, converter=own_copy)
    """A private copy is kept."""
    family: Family = attrs.field(factory=Unconditional)
    """How a batch becomes the model's inputs."""
    noise: Noise = attrs.field(factory=GaussianNoise)
    """What is added: ``OffsetNoise``, ``InputPerturbation``, one inside the other, or your own."""
    density: Literal["uniform", "logit_normal", "mode"] = "uniform"
    """How time steps are drawn (SD3 paper, section 3.1)."""
    logit_mean: float = 0.0
    """Mean of ``"logit_normal"``; above 0 draws less noise."""
    logit_std: float = 1.0
    """Standard deviation of ``"logit_normal"``."""
    mode_scale: float = 1.29
    """Scale of ``"mode"``."""
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    """How errors weigh by noise level; with the density ``"uniform"`` these are diffusers'
    ``weighting_scheme`` of the same name."""
    timestep_range: tuple[float, float] = attrs.field(default=(0.0, 1.0), validator=check_range)
    """Sigmas that are trained, after any shift; the density is squeezed into them."""
    resolution_shift: Shift | None = None
    """How a scheduler with ``use_dynamic_shifting`` shifts; ``ResolutionShift()`` when not
    given."""

    def __attrs_post_init__(self) -> None:
        self._check_density()
        self._check_weighting()
        self._check_scheduler()

    def __call__(
        self, model: Denoiser, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> torch.Tensor:
        """Mean squared error of the velocity, scalar, fp32."""
        inputs = self._inputs(self.noise, batch, generator)
        levels = self.levels(tuple(inputs.clean.shape))
        drawn = levels.take(self._draw(len(inputs.clean), len(levels), generator))
        return self._loss(model, inputs, drawn, self._weights(drawn.sigmas))

    def _check_density(self) -> None:
        if self.density in _DENSITIES:
            return
        weighting = self.density in _WEIGHTINGS
        fix = f'write density="uniform", weighting="{self.density}"'
        raise InvalidValueError(
            "is a weighting of the loss" if weighting else f"is none of {', '.join(_DENSITIES)}",
            key="density",
            value=self.density,
            fix=fix if weighting else 'write "uniform"',
        )

    def _check_weighting(self) -> None:
        if self.weighting in _WEIGHTINGS:
            return
        density = self.weighting in _DENSITIES
        fix = f'write density="{self.weighting}", weighting="none"'
        raise InvalidValueError(
            "is a density of time steps" if density else f"is none of {', '.join(_WEIGHTINGS)}",
            key="weighting",
            value=self.weighting,
            fix=fix if density else 'write "none"',
        )

    def _check_scheduler(self) -> None:
        scheduler: Any = self.scheduler
        flows = hasattr(scheduler, "sigmas") and not hasattr(scheduler, "alphas_cumprod")
        if not flows or float(scheduler.sigmas.max()) > 1.0 + _SIGMA_ROUNDING:
            raise InvalidValueError(
                "flow matching needs a scheduler with sigmas from 1 to 0",
                key="scheduler",
                value=type(scheduler).__name__,
                fix="use FlowMatchEulerDiscreteScheduler, or DenoisingObjective",
            )
        if scheduler.config.get("invert_sigmas", False):
            raise InvalidValueError(
                "the model counts time from noise to data, which this objective does not",
                key="scheduler.invert_sigmas",
                value=True,
                fix="invert the time steps in the family's predict, and pass invert_sigmas=False",
            )
        if self.resolution_shift is not None and not scheduler.config.get(
            "use_dynamic_shifting", False
        ):
            raise InvalidValueError(
                "the scheduler does not shift by resolution, so sampling would not either",
                key="resolution_shift",
                value=True,
                fix="give the scheduler use_dynamic_shifting=True, or leave resolution_shift out",
            )

    def levels(self, shape: tuple[int, ...]) -> NoiseLevels:
        """The noise levels that batches of samples of this shape (b, c, h, w) are trained on."""
        shift = None
        if self.scheduler.config.get("use_dynamic_shifting", False):
            shift = self.resolution_shift or ResolutionShift()
        return noise_levels(self.scheduler, shape, shift).part(self.timestep_range)

    def _levels_at(self, inputs: _Inputs, quantiles: Sequence[float]) -> list[NoiseLevels]:
        levels, count = self.levels(tuple(inputs.clean.shape)), len(inputs.clean)
        # The table falls, quantiles rise.
        places = [at_quantile(1.0 - quantile, len(levels)) for quantile in quantiles]
        return [levels.take(torch.full((count,), place)) for place in places]

    def _loss(
        self, model: Denoiser, inputs: _Inputs, levels: NoiseLevels, weights: Any = None
    ) -> torch.Tensor:
        clean, noise = inputs.clean, inputs.noise
        sigma = levels.sigmas.to(clean.device).view(-1, *(1,) * (clean.ndim - 1))
        noisy = (1.0 - sigma) * clean + sigma * noise.added
        prediction = self.family.predict(model, noisy, levels.timesteps, inputs.conditioning)
        return mean_error(prediction, noise.target - clean, batch=inputs.batch, weights=weights)

    def _weights(self, sigmas: torch.Tensor) -> torch.Tensor | None:
        from diffusers.training_utils import compute_loss_weighting_for_sd3

        if self.weighting == "none":
            return None
        weights: torch.Tensor = compute_loss_weighting_for_sd3(self.weighting, sigmas=sigmas)
        return weights

    def _draw(self, count: int, levels: int, generator: torch.Generator) -> torch.Tensor:
        from diffusers.training_utils import compute_density_for_timestep_sampling

        u: torch.Tensor = compute_density_for_timestep_sampling(
            weighting_scheme=self.density,
            batch_size=count,
            logit_mean=self.logit_mean,
            logit_std=self.logit_std,
            mode_scale=self.mode_scale,
            generator=generator,
        )
        # A logit-normal sigmoid rounds to exactly 1 in fp32 once in a while.
        return (u * levels).long().clamp(0, levels - 1)


# -- The error of a batch, weighted where something asks for it.


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
    """
    predicted, target = prediction.float(), target.to(prediction.device).float()
    each = _sample_weights(batch, weights, like=predicted)
    mask = _mask_of(batch, like=predicted)
    if each is None and mask is None:
        return torch.nn.functional.mse_loss(predicted, target)
    squared = (predicted - target) ** 2
    if mask is not None:
        squared = squared * mask
    errors = squared.flatten(1).mean(1)
    return (errors if each is None else errors * each).mean()


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


def _masks_over(
    clean: torch.Tensor, batch: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The batch, its masks over images brought to the size of what the family made of these."""
    mask, images = batch.get(LOSS_MASKS), batch.get("images")
    if mask is None or images is None or mask.shape[-2:] == clean.shape[-2:]:
        return batch
    if mask.ndim != 4 or mask.shape[-2:] != images.shape[-2:]:
        return batch  # mean_error says what is wrong with it.
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
            f"masks lie over the samples the model sees, {places}",
            key=f"batch[{LOSS_MASKS!r}]",
            value=tuple(mask.shape),
            fix="shrink masks of pixels to the latents, as "
            'torch.nn.functional.interpolate(masks, size=(h, w), mode="area") does',
        )
    return mask.to(like.device, torch.float32)


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
