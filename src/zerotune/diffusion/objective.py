"""What is learned: noise, velocity or the clean image, through diffusers' own schedulers.

Every random number comes from the generator passed in, on the CPU, so that a run is the same on
every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs
import torch

from zerotune.diffusion.families.base import Denoiser, Family
from zerotune.diffusion.families.unconditional import Unconditional
from zerotune.errors import InvalidValueError

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

_PREDICTIONS = ("epsilon", "v_prediction", "sample")
_DENSITIES = ("uniform", "logit_normal", "mode")


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


def _new_ddpm() -> Any:
    from diffusers import DDPMScheduler

    return DDPMScheduler()


def _new_flow() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler()


def _own(scheduler: Any) -> Any:
    # Sampling calls set_timesteps, which overwrites the tables that training reads.
    return type(scheduler).from_config(scheduler.config)


@attrs.frozen(kw_only=True, eq=False)
class DenoisingObjective:
    """Denoising diffusion: DDPM's forward process, mean squared error.

    Steps are uniform over the scheduler's; the target is what its ``prediction_type`` says.

    Source: diffusers' ``examples/text_to_image/train_text_to_image_sdxl.py``.
    """

    scheduler: DDPMScheduler = attrs.field(factory=_new_ddpm, converter=_own)
    """Any diffusers scheduler with ``add_noise`` and ``get_velocity``; a private copy is kept."""
    family: Family = attrs.field(factory=Unconditional)
    """How a batch becomes the model's inputs."""

    def __attrs_post_init__(self) -> None:
        prediction = self.scheduler.config.get("prediction_type", "epsilon")
        if prediction not in _PREDICTIONS:
            raise InvalidValueError(
                f"this objective learns {', '.join(_PREDICTIONS)}",
                key="scheduler.prediction_type",
                value=prediction,
                fix="use FlowMatchingObjective for flow matching",
            )

    def __call__(
        self, model: Denoiser, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> torch.Tensor:
        """Mean squared error of the prediction, scalar, fp32."""
        clean = self.family.clean(batch)
        conditioning = self.family.conditioning(batch, generator)
        noise = _noise_like(clean, generator)
        timesteps = torch.randint(
            self.scheduler.config.num_train_timesteps, (len(clean),), generator=generator
        ).to(clean.device)
        noisy = self.scheduler.add_noise(clean, noise, timesteps)
        prediction = self.family.predict(model, noisy, timesteps, conditioning)
        return _error(prediction, self._target(clean, noise, timesteps))

    def _target(
        self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        prediction = self.scheduler.config.get("prediction_type", "epsilon")
        if prediction == "sample":
            return clean
        if prediction == "v_prediction":
            velocity: torch.Tensor = self.scheduler.get_velocity(clean, noise, timesteps)
            return velocity
        return noise


@attrs.frozen(kw_only=True, eq=False)
class FlowMatchingObjective:
    """Rectified flow: straight lines from data to noise, mean squared error of the velocity.

    ``noisy = (1 - sigma) * clean + sigma * noise``; the target is ``noise - clean``. Sigmas and
    time steps are the scheduler's own, so ``shift`` and the like are its settings.

    Source: diffusers' ``examples/dreambooth/train_dreambooth_sd3.py``.
    """

    scheduler: FlowMatchEulerDiscreteScheduler = attrs.field(factory=_new_flow, converter=_own)
    """A private copy is kept."""
    family: Family = attrs.field(factory=Unconditional)
    """How a batch becomes the model's inputs."""
    density: Literal["uniform", "logit_normal", "mode"] = "uniform"
    """How time steps are drawn (SD3 paper, section 3.1)."""
    logit_mean: float = 0.0
    """Mean of ``"logit_normal"``."""
    logit_std: float = 1.0
    """Standard deviation of ``"logit_normal"``."""
    mode_scale: float = 1.29
    """Scale of ``"mode"``."""

    def __attrs_post_init__(self) -> None:
        if self.density not in _DENSITIES:
            raise InvalidValueError(
                f"is none of {', '.join(_DENSITIES)}",
                key="density",
                value=self.density,
                fix='write "uniform"',
            )
        if not hasattr(self.scheduler, "sigmas"):
            raise InvalidValueError(
                "flow matching needs a scheduler with sigmas",
                key="scheduler",
                value=type(self.scheduler).__name__,
                fix="use FlowMatchEulerDiscreteScheduler, or DenoisingObjective",
            )

    def __call__(
        self, model: Denoiser, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> torch.Tensor:
        """Mean squared error of the velocity, scalar, fp32."""
        clean = self.family.clean(batch)
        conditioning = self.family.conditioning(batch, generator)
        noise = _noise_like(clean, generator)
        index = self._draw(len(clean), generator)
        sigma = self.scheduler.sigmas[index].to(clean.device, torch.float32)
        sigma = sigma.view(-1, *(1,) * (clean.ndim - 1))
        noisy = (1.0 - sigma) * clean + sigma * noise
        prediction = self.family.predict(
            model, noisy, self.scheduler.timesteps[index], conditioning
        )
        return _error(prediction, noise - clean)

    def _draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        from diffusers.training_utils import compute_density_for_timestep_sampling

        u: torch.Tensor = compute_density_for_timestep_sampling(
            weighting_scheme=self.density,
            batch_size=count,
            logit_mean=self.logit_mean,
            logit_std=self.logit_std,
            mode_scale=self.mode_scale,
            generator=generator,
        )
        steps = int(self.scheduler.config.num_train_timesteps)
        # A logit-normal sigmoid rounds to exactly 1 in fp32 once in a while.
        return (u * steps).long().clamp(0, steps - 1)


def _noise_like(clean: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(clean.shape, generator=generator).to(clean.device)


def _error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(prediction.float(), target.to(prediction.device))
