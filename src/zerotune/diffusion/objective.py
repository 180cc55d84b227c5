"""Training objectives for noise, velocity and image prediction with diffusers' schedulers.

All random numbers come from a CPU generator that the caller passes, so they are the same on every
device.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs
import torch

from zerotune._util.text import positive
from zerotune.decisions import Decision, announce
from zerotune.diffusion.losses import Comparison, Level, Loss, masks_over
from zerotune.diffusion.models.family import Conditioning, Denoiser, Family, Unconditional
from zerotune.diffusion.noise import DrawnNoise, GaussianNoise, Noise
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
from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler


_SIGMA_ROUNDING = 1e-5

_PREDICTIONS = ("epsilon", "v_prediction", "sample")

_DENSITIES = ("uniform", "logit_normal", "mode")

_WEIGHTINGS = ("none", "sigma_sqrt", "cosmap")


@runtime_checkable
class Objective(Protocol):
    """Interface of a training objective, which computes the loss.

    Training accepts any callable with the signature of ``__call__``; sampling also needs the
    attributes ``family`` and ``scheduler``.
    """

    def __call__(
        self, model: Denoiser, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> torch.Tensor:
        """Compute the loss of one micro batch: a scalar, fp32, on the model's device.

        Args:
            model: Model to train.
            batch: Tensors by name, batch first.
            generator: CPU generator for all random numbers.
        """
        ...


@runtime_checkable
class LevelObjective(Objective, Protocol):
    """Interface of an objective that can also compute the error at chosen noise levels."""

    def losses_at(
        self,
        model: Denoiser,
        batch: Mapping[str, torch.Tensor],
        *,
        quantiles: Sequence[float],
        noise: Noise,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Return the mean squared error at each of ``q`` quantiles of the noise levels: (q,), fp32.

        The errors include the batch's loss weights but not the objective's weighting, so errors
        from different objectives are comparable.

        Args:
            model: Model that predicts.
            batch: Tensors by name, batch first.
            quantiles: Positions among the trained noise levels, from 0 (least noise) to 1 (most
                noise).
            noise: Noise to add.
            generator: CPU generator for all random numbers, such as noise and dropout.
        """
        ...


# -- Objectives over the schedulers of diffusers.


@attrs.frozen(kw_only=True, eq=False)
class Inputs:
    """A batch's clean samples, conditioning and noise, before a noise level is chosen."""

    batch: Mapping[str, torch.Tensor]
    clean: torch.Tensor
    conditioning: Conditioning
    noise: DrawnNoise


class SchedulerObjective(ABC):
    """Base class of objectives that use diffusers' schedulers."""

    __slots__ = ()

    scheduler: Any
    family: Family
    noise: Noise
    loss: Loss | None

    def __call__(
        self, model: Denoiser, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> torch.Tensor:
        """Return the loss of a micro batch, a scalar in fp32."""
        inputs = self.inputs(batch, generator)
        return self.compare(model, inputs, self.draw_levels(inputs, generator)).mean()

    def losses_at(
        self,
        model: Denoiser,
        batch: Mapping[str, torch.Tensor],
        *,
        quantiles: Sequence[float],
        noise: Noise,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Return mean squared errors at chosen noise levels; see ``LevelObjective.losses_at``."""
        inputs = self.inputs(batch, generator, noise=noise)
        levels = self._levels_at(inputs, quantiles)
        return torch.stack([self._predict(model, inputs, level).mean() for level in levels])

    def inputs(
        self,
        batch: Mapping[str, torch.Tensor],
        generator: torch.Generator,
        *,
        noise: Noise | None = None,
    ) -> Inputs:
        """Prepare a batch, and draw its noise.

        Args:
            batch: Tensors by name, batch first.
            generator: CPU generator for all random numbers.
            noise: Noise to add; by default the objective's ``noise``.
        """
        # In this order, because the random numbers of earlier runs depend on it.
        clean = self.family.clean(batch)
        conditioning = self.family.conditioning(batch, generator)
        drawn = (noise or self.noise).draw(clean, generator)
        batch = masks_over(clean, batch)
        return Inputs(batch=batch, clean=clean, conditioning=conditioning, noise=drawn)

    @abstractmethod
    def draw_levels(self, inputs: Inputs, generator: torch.Generator) -> Any:
        """Draw a noise level for each sample.

        Args:
            inputs: Prepared batch.
            generator: CPU generator for all random numbers.

        Returns:
            Noise levels that can be indexed by sample.
        """

    def compare(self, model: Denoiser, inputs: Inputs, levels: Any) -> Comparison:
        """Return the model's prediction and its target, with the objective's weights and loss.

        Args:
            model: Model that predicts.
            inputs: Prepared batch.
            levels: Noise levels from ``draw_levels``.
        """
        errors = None
        if self.loss is not None:
            errors = partial(self.loss.errors, level=self._level(inputs, levels))
        found = self._predict(model, inputs, levels)
        return attrs.evolve(found, weights=self._weights(levels), errors=errors)

    @abstractmethod
    def _levels_at(self, inputs: Inputs, quantiles: Sequence[float]) -> Sequence[Any]:
        """Return a noise level for each quantile, the same for all samples."""

    @abstractmethod
    def _predict(self, model: Denoiser, inputs: Inputs, levels: Any) -> Comparison:
        """Return prediction and target at each sample's noise level, without weights."""

    @abstractmethod
    def _weights(self, levels: Any) -> torch.Tensor | None:
        """Return the loss weights (b,) of samples at these noise levels."""

    @abstractmethod
    def _level(self, inputs: Inputs, levels: Any) -> Level:
        """Return the time and the noise-to-signal ratio of each sample, for the loss."""


def _new_scheduler(name: str) -> Any:
    return getattr(importlib.import_module("diffusers"), name)()


@attrs.frozen(kw_only=True, eq=False)
class DenoisingObjective(SchedulerObjective):
    """Denoising diffusion with DDPM's forward process; the default loss is mean squared error.

    Time steps are drawn uniformly from the scheduler's time steps. The scheduler's
    ``prediction_type`` determines the target. A batch's ``"loss_weights"`` (b,) and
    ``"loss_masks"`` (b, 1, h, w) multiply the error.

    Source: diffusers' ``examples/text_to_image/train_text_to_image_sdxl.py``.
    """

    scheduler: DDPMScheduler = attrs.field(
        factory=partial(_new_scheduler, "DDPMScheduler"), converter=own_copy
    )
    """Any diffusers scheduler with ``alphas_cumprod``; the objective makes a copy. With
    ``rescale_betas_zero_snr=True`` the schedule ends in pure noise."""
    family: Family = attrs.field(factory=Unconditional)
    """Family that turns a batch into the model's inputs."""
    noise: Noise = attrs.field(factory=GaussianNoise)
    """Training noise: ``OffsetNoise``, ``InputPerturbation``, a combination, or a custom noise."""
    loss: Loss | None = None
    """Error of each predicted value; by default the squared error."""
    snr_gamma: float | None = attrs.field(default=None)
    """Clip value of min-SNR weighting, 5 in the paper; ``None`` weights all time steps equally."""
    timestep_range: tuple[float, float] = attrs.field(default=(0.0, 1.0), validator=check_range)
    """Trained range of the schedule, from 0 (least noise) to 1 (most noise). ``(0.0, 0.2)`` trains
    a refiner for the last fifth of the sampling steps."""
    _adding: Any = attrs.field(
        init=False, default=attrs.Factory(lambda self: adding_scheduler(self.scheduler), True)
    )

    @snr_gamma.validator
    def _check_gamma(self, attribute: Any, value: Any) -> None:
        if value is not None:
            fix = "write 5.0, as in the min-SNR paper, or None for no weighting"
            positive(value, key=attribute.name, fix=fix)

    def __attrs_post_init__(self) -> None:
        if self._prediction not in _PREDICTIONS:
            raise InvalidValueError(
                f"DenoisingObjective supports only {', '.join(_PREDICTIONS)}",
                "write a supported prediction type, or use FlowMatchingObjective for a "
                "flow-matching model",
                "scheduler.prediction_type",
                self._prediction,
            )
        if self._prediction == "epsilon" and float(self._adding.alphas_cumprod[-1]) == 0.0:
            raise InvalidValueError(
                "the schedule ends in pure noise, where a model that predicts noise "
                "learns nothing about the image",
                'create the scheduler with prediction_type="v_prediction", or with '
                "rescale_betas_zero_snr=False",
                "scheduler.prediction_type",
                "epsilon",
            )
        self._bounds()
        announce(self.decisions)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Return the decision to replace the scheduler; empty if the scheduler is kept."""
        return replacement_decision(self.scheduler, self._adding)

    def draw_levels(self, inputs: Inputs, generator: torch.Generator) -> torch.Tensor:
        """Draw integer time steps (b,) uniformly from the trained range."""
        low, high = self._bounds()
        timesteps = torch.randint(low, high, (len(inputs.clean),), generator=generator)
        return timesteps.to(inputs.clean.device)

    def _levels_at(self, inputs: Inputs, quantiles: Sequence[float]) -> list[torch.Tensor]:
        low, high = self._bounds()
        steps = [low + at_quantile(quantile, high - low) for quantile in quantiles]
        shape, device = (len(inputs.clean),), inputs.clean.device
        return [torch.full(shape, step, device=device) for step in steps]

    def _predict(self, model: Denoiser, inputs: Inputs, levels: torch.Tensor) -> Comparison:
        noisy = self._adding.add_noise(inputs.clean, inputs.noise.added, levels)
        return Comparison(
            prediction=self.family.predict(model, noisy, levels, inputs.conditioning),
            target=self._target(inputs.clean, inputs.noise.target, levels),
            batch=inputs.batch,
        )

    def _weights(self, levels: torch.Tensor) -> torch.Tensor | None:
        if self.snr_gamma is None:
            return None
        return min_snr_weights(self._adding, levels, gamma=self.snr_gamma)

    def _level(self, inputs: Inputs, levels: torch.Tensor) -> Level:  # noqa: ARG002
        kept = self._adding.alphas_cumprod.to(levels.device)[levels]
        return Level(
            time=levels.float() / int(self.scheduler.config.num_train_timesteps),
            noise_to_signal=((1.0 - kept) / kept) ** 0.5,
        )

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


@attrs.frozen(kw_only=True, eq=False)
class FlowMatchingObjective(SchedulerObjective):
    """Rectified flow: straight paths from data to noise; the loss is the squared velocity error.

    The model receives ``noisy = (1 - sigma) * clean + sigma * noise`` and predicts the velocity
    ``noise - clean``. The scheduler provides the sigmas and time steps, with its ``shift`` applied.
    If the scheduler sets ``use_dynamic_shifting``, the shift depends on each batch's resolution, as
    in sampling. A batch's ``"loss_weights"`` (b,) and ``"loss_masks"`` (b, 1, h, w) multiply the
    error.

    Source: diffusers' ``examples/dreambooth/train_dreambooth_sd3.py``.
    """

    scheduler: FlowMatchEulerDiscreteScheduler = attrs.field(
        factory=partial(_new_scheduler, "FlowMatchEulerDiscreteScheduler"), converter=own_copy
    )
    """Scheduler that defines the sigmas; the objective makes a copy."""
    family: Family = attrs.field(factory=Unconditional)
    """Family that turns a batch into the model's inputs."""
    noise: Noise = attrs.field(factory=GaussianNoise)
    """Training noise: ``OffsetNoise``, ``InputPerturbation``, a combination, or a custom noise."""
    loss: Loss | None = None
    """Error of each predicted value; by default the squared error."""
    precondition_outputs: bool = False
    """Compute the loss on clean samples (``noisy - sigma * prediction``) instead of velocities,
    which weights errors by ``sigma ** 2``. The SD3 paper compares velocities; diffusers' SD3
    scripts compare clean samples by default. ``losses_at`` always compares velocities."""
    density: Literal["uniform", "logit_normal", "mode"] = "uniform"
    """Distribution from which time steps are drawn (SD3 paper, section 3.1)."""
    logit_mean: float = 0.0
    """Mean of the logit for ``density="logit_normal"``; values above 0 favour lower noise
    levels."""
    logit_std: float = 1.0
    """Standard deviation of the logit for ``density="logit_normal"``."""
    mode_scale: float = 1.29
    """Scale parameter of the density ``"mode"``."""
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    """Loss weight as a function of sigma. With ``density="uniform"``, each value is equivalent to
    the ``weighting_scheme`` of the same name in diffusers."""
    timestep_range: tuple[float, float] = attrs.field(default=(0.0, 1.0), validator=check_range)
    """Trained range of sigmas, after any shift; the density is rescaled to this range."""
    resolution_shift: Shift | None = None
    """Shift for a scheduler with ``use_dynamic_shifting``; by default ``ResolutionShift()``."""

    def __attrs_post_init__(self) -> None:
        self._check_choice("density", _DENSITIES, "weighting")
        self._check_choice("weighting", _WEIGHTINGS, "density")
        self._check_scheduler()

    def _check_choice(self, name: str, known: tuple[str, ...], other: str) -> None:
        value = getattr(self, name)
        if value not in known:
            raise InvalidValueError(
                f"is not one of {', '.join(known)}",
                f'write {name}="{known[0]}"; the values of {other} are a different option',
                name,
                value,
            )

    def _check_scheduler(self) -> None:
        scheduler: Any = self.scheduler
        flows = hasattr(scheduler, "sigmas") and not hasattr(scheduler, "alphas_cumprod")
        if not flows or float(scheduler.sigmas.max()) > 1.0 + _SIGMA_ROUNDING:
            raise InvalidValueError(
                "flow matching needs a scheduler with sigmas from 1 to 0",
                "use FlowMatchEulerDiscreteScheduler, or DenoisingObjective",
                "scheduler",
                type(scheduler).__name__,
            )
        if scheduler.config.get("invert_sigmas", False):
            raise InvalidValueError(
                "with invert_sigmas, time runs from noise to data, which FlowMatchingObjective "
                "does not support",
                "set invert_sigmas=False, and invert the time steps in the family's predict",
                "scheduler.invert_sigmas",
                True,
            )
        if self.resolution_shift is not None and not scheduler.config.get(
            "use_dynamic_shifting", False
        ):
            raise InvalidValueError(
                "sampling would not apply the shift, because the scheduler does not set "
                "use_dynamic_shifting",
                "create the scheduler with use_dynamic_shifting=True, or omit resolution_shift",
                "resolution_shift",
                True,
            )

    def levels(self, shape: tuple[int, ...]) -> NoiseLevels:
        """Return all trained noise levels for batches of one shape.

        Args:
            shape: Shape of the clean samples (b, c, h, w).
        """
        shift = None
        if self.scheduler.config.get("use_dynamic_shifting", False):
            shift = self.resolution_shift or ResolutionShift()
        return noise_levels(self.scheduler, shape, shift).part(self.timestep_range)

    def draw_levels(self, inputs: Inputs, generator: torch.Generator) -> NoiseLevels:
        """Draw sigmas and time steps (b,) from ``density``."""
        levels = self.levels(tuple(inputs.clean.shape))
        return levels[self._draw(len(inputs.clean), len(levels), generator)]

    def compare(self, model: Denoiser, inputs: Inputs, levels: NoiseLevels) -> Comparison:
        """Return predicted and true velocities, or clean samples with ``precondition_outputs``."""
        found = super().compare(model, inputs, levels)
        if not self.precondition_outputs:
            return found
        sigma = levels.spread(inputs.clean)
        # With the target noise: a perturbed input would reveal the perturbation.
        noisy = (1.0 - sigma) * inputs.clean + sigma * inputs.noise.target
        velocity = found.prediction.float()
        device = velocity.device
        image = velocity * (-sigma.to(device)) + noisy.to(device)
        return attrs.evolve(found, prediction=image, target=inputs.clean)

    def _levels_at(self, inputs: Inputs, quantiles: Sequence[float]) -> list[NoiseLevels]:
        levels, count = self.levels(tuple(inputs.clean.shape)), len(inputs.clean)
        # The table starts at the highest noise level, quantiles at the lowest.
        places = [at_quantile(1.0 - quantile, len(levels)) for quantile in quantiles]
        return [levels[torch.full((count,), place)] for place in places]

    def _predict(self, model: Denoiser, inputs: Inputs, levels: NoiseLevels) -> Comparison:
        clean, noise = inputs.clean, inputs.noise
        sigma = levels.spread(clean)
        noisy = (1.0 - sigma) * clean + sigma * noise.added
        return Comparison(
            prediction=self.family.predict(model, noisy, levels.timesteps, inputs.conditioning),
            target=noise.target - clean,
            batch=inputs.batch,
        )

    def _weights(self, levels: NoiseLevels) -> torch.Tensor | None:
        from diffusers.training_utils import compute_loss_weighting_for_sd3

        if self.weighting == "none":
            return None
        weights: torch.Tensor = compute_loss_weighting_for_sd3(self.weighting, sigmas=levels.sigmas)
        return weights

    def _level(self, inputs: Inputs, levels: NoiseLevels) -> Level:  # noqa: ARG002
        share = levels.timesteps.float() / int(self.scheduler.config.num_train_timesteps)
        return Level(time=share, noise_to_signal=None)

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
        # In fp32, a logit-normal sigmoid occasionally rounds to exactly 1.
        return (u * levels).long().clamp(0, levels - 1)


# -- Weights by noise level.


def min_snr_weights(scheduler: Any, timesteps: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Return min-SNR weights for the prediction type of ``scheduler``.

    The weight is ``min(snr, gamma)`` if the model predicts the clean image, ``min(snr, gamma) /
    snr`` for noise, and ``min(snr, gamma) / (snr + 1)`` for velocity. At a time step of pure noise,
    the weight is 1, not 0, because sampling starts at this time step.

    Args:
        scheduler: A diffusers scheduler with ``alphas_cumprod``.
        timesteps: Integer time steps (b,).
        gamma: Signal-to-noise ratio at which weights are clipped; 5 in the paper.

    Returns:
        Weights (b,), fp32, on the device of ``timesteps``.

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
