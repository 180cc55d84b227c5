"""Noise schedules: diffusers schedulers, the trained range, and resolution-dependent shifts.

Training and sampling often share a scheduler, but neither may change it for the other. Training
uses a copy from ``own_copy`` or ``adding_scheduler``; sampling uses a copy from
``drawing_scheduler``.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Final, Protocol, runtime_checkable

import attrs
import torch

from zerotune._util.text import whole
from zerotune.decisions import Decision, announce
from zerotune.errors import InvalidValueError

_FROM_TRAINING: Final = (
    "prediction_type",
    "rescale_betas_zero_snr",
    "shift",
    "use_dynamic_shifting",
)

_SCHEDULE: Final = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "prediction_type",
    "rescale_betas_zero_snr",
)
"""Settings that define the noise schedule and the prediction type."""

# -- Schedulers for training and for sampling.


def own_copy(scheduler: Any) -> Any:
    """Return a copy of a scheduler, because sampling overwrites the tables that training reads."""
    options = {}
    if hasattr(scheduler, "set_shift"):
        # set_shift changes neither the configuration nor the training tables.
        options["shift"] = scheduler.shift
    return type(scheduler).from_config(scheduler.config, **options)


def adding_scheduler(scheduler: Any) -> Any:
    """Return the scheduler that adds noise when a denoising model is trained.

    As in diffusers' training scripts, DDPM with the same configuration replaces Euler, DPM-Solver
    and similar schedulers. The replaced schedulers scale noise differently and cannot compute
    velocity targets.
    """
    if not hasattr(scheduler, "alphas_cumprod"):
        raise InvalidValueError(
            "DenoisingObjective needs a scheduler with alphas_cumprod",
            "train as examples/recipes/edm.py does"
            if preconditions(scheduler)
            else "use DDPMScheduler, or FlowMatchingObjective for flow matching",
            "scheduler",
            type(scheduler).__name__,
        )
    if adds_noise(scheduler):
        return scheduler
    ddpm = ddpm_of(scheduler)
    if ddpm is None:
        raise InvalidValueError(
            "can only sample, and DDPM with the same settings has a different noise "
            "schedule (alphas_cumprod)",
            "use DDPMScheduler(trained_betas=...) with the betas of the model's original training",
            "scheduler",
            type(scheduler).__name__,
        )
    return ddpm


def preconditions(scheduler: Any) -> bool:
    """Return whether a scheduler scales the model's inputs and outputs, as EDM does."""
    return hasattr(scheduler, "precondition_inputs") and hasattr(scheduler, "precondition_outputs")


def adds_noise(scheduler: Any) -> bool:
    """Return whether a denoising scheduler can add noise for training."""
    return hasattr(scheduler, "get_velocity") and not hasattr(scheduler, "sigmas")


def ddpm_of(scheduler: Any) -> Any | None:
    """Return a DDPM scheduler with the same noise schedule as ``scheduler``.

    Returns:
        The scheduler, or ``None`` if DDPM with the same settings has a different noise schedule.
    """
    from diffusers import DDPMScheduler

    config = scheduler.config
    # Keywords, because diffusers drops settings that the configuration lists as defaults.
    settings = {name: config[name] for name in _SCHEDULE if name in config}
    try:
        ddpm = DDPMScheduler.from_config(config, **settings)
    except NotImplementedError:  # A beta_schedule that DDPM does not know.
        return None
    ours, theirs = ddpm.alphas_cumprod, scheduler.alphas_cumprod.float()
    # Some schedulers replace a final 0 by 2^-24.
    same = ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6)
    return ddpm if same else None


def replacement_decision(scheduler: Any, adding: Any) -> tuple[Decision, ...]:
    """Return a decision that reports a replaced scheduler; empty if none was replaced."""
    if adding is scheduler:
        return ()
    return (
        Decision(
            "objective.scheduler",
            type(scheduler).__name__,
            type(adding).__name__,
            f"{type(scheduler).__name__} can only sample; {type(adding).__name__} adds "
            "noise with the same schedule",
        ),
    )


def drawing_scheduler(scheduler: Any, trained_with: Any = None) -> Any:
    """Return a copy of a scheduler for sampling, with the prediction type and shift of training.

    If the training schedule ends in pure noise, sampling starts from pure noise
    (``timestep_spacing="trailing"``). DDIM replaces a scheduler that does not support a schedule
    ending in pure noise; a decision reports the replacement.

    Args:
        scheduler: A diffusers scheduler; not changed.
        trained_with: Scheduler of the training objective; ``None`` keeps ``scheduler``'s settings.

    Source: Lin et al., "Common Diffusion Noise Schedules and Sample Steps are Flawed", section 3.3.
    """
    changed = {} if trained_with is None else trained_with.config
    kept = {name: changed[name] for name in _FROM_TRAINING if name in changed}
    kind = type(scheduler)
    if kept.get("rescale_betas_zero_snr"):
        kept["timestep_spacing"] = "trailing"
        if "rescale_betas_zero_snr" not in inspect.signature(kind.__init__).parameters:
            kind = _ddim_instead_of(kind)
            kept["clip_sample"] = False  # DDIM's default is for pixels; these are latents.
    if "shift" in kept and "flow_shift" in inspect.signature(kind.__init__).parameters:
        kept["flow_shift"] = kept.pop("shift")
    # Keywords, because diffusers drops settings that the configuration lists as defaults.
    return kind.from_config(scheduler.config, **kept)


def _ddim_instead_of(kind: type[Any]) -> type[Any]:
    from diffusers import DDIMScheduler

    announce(
        (
            Decision(
                "sampling.scheduler",
                kind.__name__,
                DDIMScheduler.__name__,
                "the model was trained with rescale_betas_zero_snr, which "
                f"{kind.__name__} does not support",
                "warning",
            ),
        )
    )
    chosen: type[Any] = DDIMScheduler
    return chosen


# -- The shift by resolution.


@runtime_checkable
class Shift(Protocol):
    """Interface for noise-level shifts that depend on the shape of the samples."""

    def mu(self, shape: tuple[int, ...], config: Any) -> float:
        """Return the value that a diffusers pipeline passes to ``set_timesteps(mu=...)``.

        Args:
            shape: Shape of the clean samples, (b, c, h, w).
            config: Configuration of the scheduler.
        """
        ...


@attrs.frozen(kw_only=True)
class ResolutionShift:
    """Shift of the SD3 and Flux pipelines; its logarithm is linear in the number of image tokens.

    Source: ``calculate_shift`` of diffusers' ``pipelines/flux/pipeline_flux.py``. The formula is
    copied, because importing diffusers' module loads the pipeline and transformers.
    """

    patch_size: int = attrs.field(default=2)
    """Side length of a token in latent pixels: the transformer's ``patch_size``, or 2 for pipelines
    that pack latents, such as Flux."""

    @patch_size.validator
    def _check_patch(self, attribute: Any, value: Any) -> None:
        whole(value, key=attribute.name, fix="write 2, the patch size of SD3 and Flux")

    def mu(self, shape: tuple[int, ...], config: Any) -> float:
        """Return the logarithm of the shift for samples of one shape."""
        height, width = shape[-2] // self.patch_size, shape[-1] // self.patch_size
        tokens = math.prod(shape[2:-2]) * height * width
        base, most = config["base_image_seq_len"], config["max_image_seq_len"]
        slope = (config["max_shift"] - config["base_shift"]) / (most - base)
        return float(tokens * slope + (config["base_shift"] - slope * base))


# -- Noise levels, and the trained range.


@attrs.frozen(kw_only=True, eq=False)
class NoiseLevels:
    """Noise levels: sigmas, and the time steps that the model receives."""

    sigmas: torch.Tensor
    """Sigmas (n,), fp32, in decreasing order."""
    timesteps: torch.Tensor
    """Time steps (n,), fp32, in the scheduler's units."""

    def __len__(self) -> int:
        return len(self.sigmas)

    def __getitem__(self, index: torch.Tensor) -> NoiseLevels:
        """Select levels by index, one for each sample of a batch."""
        return NoiseLevels(sigmas=self.sigmas[index], timesteps=self.timesteps[index])

    def spread(self, clean: torch.Tensor) -> torch.Tensor:
        """Reshape a batch's sigmas to (b, 1, 1, 1) for broadcasting over samples (b, c, h, w)."""
        return self.sigmas.to(clean.device).view(-1, *(1,) * (clean.ndim - 1))

    def part(self, share: tuple[float, float]) -> NoiseLevels:
        """Return the noise levels with ``share[0] < sigma <= share[1]``."""
        if share == (0.0, 1.0):
            return self
        within = (self.sigmas > share[0]) & (self.sigmas <= share[1])
        if not bool(within.any()):
            raise _no_levels(share)
        return NoiseLevels(sigmas=self.sigmas[within], timesteps=self.timesteps[within])


def noise_levels(scheduler: Any, shape: tuple[int, ...], shift: Shift | None) -> NoiseLevels:
    """Return all noise levels of a flow-matching scheduler for samples of one shape.

    Args:
        scheduler: A scheduler on which ``set_timesteps`` has not been called, so that it still has
            its training tables.
        shape: Shape of the clean samples.
        shift: Shift for schedulers with ``use_dynamic_shifting``; ``None`` adds no shift.
    """
    # For some shifts, rounding makes the highest sigma slightly larger than 1.
    sigmas = scheduler.sigmas.float().clamp(max=1.0)
    if shift is None:
        return NoiseLevels(sigmas=sigmas, timesteps=scheduler.timesteps)
    sigmas = scheduler.time_shift(shift.mu(shape, scheduler.config), 1.0, sigmas)
    return NoiseLevels(
        sigmas=sigmas, timesteps=sigmas * float(scheduler.config.num_train_timesteps)
    )


def at_quantile(quantile: float, count: int) -> int:
    """Return the index that a quantile in [0, 1] selects from ``count`` sorted entries."""
    return min(int(quantile * count), count - 1)


def check_range(_instance: object, attribute: Any, value: tuple[float, float]) -> None:
    """Check that a range of noise levels satisfies ``0 <= low < high <= 1``."""
    low, high = value
    if not 0.0 <= low < high <= 1.0:
        raise InvalidValueError(
            "is not a range (low, high) with 0 <= low < high <= 1",
            "use (0.0, 1.0) for the whole schedule, or (0.0, 0.2) for the last fifth of sampling",
            attribute.name,
            value,
        )


def bounds(steps: int, share: tuple[float, float]) -> tuple[int, int]:
    """Convert fractions of a schedule with ``steps`` steps to start and exclusive end indices."""
    low, high = round(share[0] * steps), round(share[1] * steps)
    if low == high:
        raise _no_levels(share)
    return low, high


def _no_levels(share: tuple[float, float]) -> InvalidValueError:
    return InvalidValueError(
        "the range contains no noise level of the schedule",
        "write a wider range",
        "timestep_range",
        share,
    )
