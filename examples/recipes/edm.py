"""Train adapters for a model with an EDM scheduler, such as Playground v2.5.

    torchrun examples/recipes/edm.py --base PLAYGROUND --data photos --output runs/zoe --steps 2000

The loss is that of diffusers' train_dreambooth_lora_sdxl.py with --do_edm_style_training; --paper
selects the loss of the EDM paper. To resume a stopped run, use the same command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from diffusers import EDMEulerScheduler

import zerotune
from zerotune import AspectBuckets, ImageFolder, PreparedImages
from zerotune.diffusion.losses import Comparison, Level, Loss
from zerotune.diffusion.models.family import Denoiser, Family, Unconditional
from zerotune.diffusion.noise import GaussianNoise, Noise
from zerotune.diffusion.noise_schedule import (
    NoiseLevels,
    at_quantile,
    bounds,
    check_range,
    own_copy,
    preconditions,
)
from zerotune.diffusion.objective import Inputs, SchedulerObjective
from zerotune.errors import InvalidValueError


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = zerotune.DeepSpeedPlan.build(
        stage=options.stage, offload="cpu", precision="bf16", micro_batch_size=options.batch,
        optimizer="AdamW", lr=options.lr,
    )  # fmt: skip
    loaded = zerotune.load_pretrained(options.base, plan=plan)
    adapters = zerotune.LoRA(rank=options.rank, targets=loaded.family.lora_targets)
    zerotune.add_lora(loaded.model, adapters)
    images = PreparedImages(
        ImageFolder(options.data),
        buckets=AspectBuckets(area=options.area, step=options.bucket_step),
    )
    data = zerotune.encode_dataset(images, family=loaded.family, folder=options.output / "cache")
    paper = {"density": "log_normal", "weighting": "edm"} if options.paper else {}
    objective = EDMObjective(scheduler=loaded.scheduler, family=loaded.family, **paper)
    checkpoints = options.output / "checkpoints"
    saving = zerotune.SaveEvery(steps=options.every, root=checkpoints, keep=2)
    with zerotune.Trainer(
        model=loaded, data=data, objective=objective, callbacks=[saving]
    ) as trainer:
        if checkpoint := zerotune.latest_checkpoint(checkpoints):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        trainer.export(options.output / "lora.safetensors")
    return list(report.losses)


@attrs.frozen(kw_only=True, eq=False)
class EDMObjective(SchedulerObjective):
    """EDM: noise with standard deviation sigma, and a loss between denoised and clean samples.

    The scheduler's methods precondition inputs, noise levels and outputs. A batch's
    ``"loss_weights"`` (b,) and ``"loss_masks"`` (b, 1, h, w) multiply the error.

    The defaults reproduce the loss of diffusers'
    ``examples/dreambooth/train_dreambooth_lora_sdxl.py`` with ``--do_edm_style_training``.
    ``density="log_normal"`` with ``weighting="edm"`` reproduces ``EDMLoss`` of NVlabs/edm
    (``training/loss.py``).

    Source: https://arxiv.org/abs/2206.00364.
    """

    scheduler: Any = attrs.field(factory=EDMEulerScheduler, converter=own_copy)
    """``EDMEulerScheduler`` or ``EDMDPMSolverMultistepScheduler``; the objective makes a copy."""
    family: Family = attrs.field(factory=Unconditional)
    """Family that turns a batch into the model's inputs."""
    noise: Noise = attrs.field(factory=GaussianNoise)
    """Training noise: ``OffsetNoise``, ``InputPerturbation``, a combination, or a custom noise."""
    loss: Loss | None = None
    """Error of each predicted value; by default the squared error."""
    density: Literal["uniform", "log_normal"] = "uniform"
    """Distribution of sigmas: uniform over the scheduler's table of sigmas, or log-normal."""
    log_mean: float = -1.2
    """Mean of log sigma for the density ``"log_normal"``."""
    log_std: float = 1.2
    """Standard deviation of log sigma for the density ``"log_normal"``."""
    weighting: Literal["none", "edm"] = "none"
    """``"edm"`` is the paper's weighting, which makes the loss of an untrained model equal at all
    sigmas. With ``density="uniform"``, some weights are extreme: up to 250,000 at sigma 0.002."""
    timestep_range: tuple[float, float] = attrs.field(default=(0.0, 1.0), validator=check_range)
    """Trained range of the scheduler's sigma table, from 0 (least noise) to 1 (most noise)."""

    def __attrs_post_init__(self) -> None:
        for name, known in (("density", ("uniform", "log_normal")), ("weighting", ("none", "edm"))):
            if getattr(self, name) not in known:
                raise InvalidValueError(
                    f"is not one of {', '.join(known)}",
                    key=name,
                    value=getattr(self, name),
                    fix=f'write "{known[0]}" or "{known[1]}"',
                )
        if not preconditions(self.scheduler):
            raise InvalidValueError(
                "EDM needs a scheduler that preconditions the model's inputs and outputs",
                key="scheduler",
                value=type(self.scheduler).__name__,
                fix="use EDMEulerScheduler, or DenoisingObjective",
            )
        if self.scheduler.config.prediction_type not in ("epsilon", "v_prediction"):
            raise InvalidValueError(
                "EDM supports only epsilon and v_prediction",
                key="scheduler.prediction_type",
                value=self.scheduler.config.prediction_type,
                fix="create the scheduler with the prediction type of the model's original "
                "training",
            )
        if self.density == "log_normal" and self.timestep_range != (0.0, 1.0):
            raise InvalidValueError(
                'has no effect with density="log_normal", which draws sigmas independently of the '
                "scheduler's time steps",
                key="timestep_range",
                value=self.timestep_range,
                fix='write density="uniform", or omit timestep_range and change log_mean',
            )
        if getattr(self.loss, "schedule", None) == "exponential":
            raise InvalidValueError(
                "EDM has no time steps, which this threshold schedule requires",
                key="loss.schedule",
                value="exponential",
                fix='write schedule="snr" or schedule="constant"',
            )
        self._bounds()

    def draw_levels(self, inputs: Inputs, generator: torch.Generator) -> NoiseLevels:
        """Draw sigmas and time steps (b,) from ``density``."""
        count = len(inputs.clean)
        if self.density == "uniform":
            index = torch.randint(*self._bounds(), (count,), generator=generator)
            return self._levels(index)
        drawn = torch.randn(count, generator=generator)
        sigmas = (drawn * self.log_std + self.log_mean).exp()
        return NoiseLevels(sigmas=sigmas, timesteps=self.scheduler.precondition_noise(sigmas))

    def _bounds(self) -> tuple[int, int]:
        # The table starts at the highest noise level, the range at the lowest.
        count = int(self.scheduler.config.num_train_timesteps)
        low, high = bounds(count, self.timestep_range)
        return count - high, count - low

    def _levels(self, index: torch.Tensor) -> NoiseLevels:
        return NoiseLevels(
            sigmas=self.scheduler.sigmas[index], timesteps=self.scheduler.timesteps[index]
        )

    def _levels_at(self, inputs: Inputs, quantiles: Sequence[float]) -> list[NoiseLevels]:
        first, end = self._bounds()
        places = [end - 1 - at_quantile(quantile, end - first) for quantile in quantiles]
        return [self._levels(torch.full((len(inputs.clean),), place)) for place in places]

    def _predict(self, model: Denoiser, inputs: Inputs, levels: NoiseLevels) -> Comparison:
        clean, noise = inputs.clean, inputs.noise
        sigma = levels.spread(clean)
        given = self.scheduler.precondition_inputs(clean + sigma * noise.added, sigma)
        found = self.family.predict(model, given, levels.timesteps, inputs.conditioning).float()
        # With the target noise: a perturbed input would reveal the perturbation.
        noisy, sigma = (clean + sigma * noise.target).to(found.device), sigma.to(found.device)
        denoised = self.scheduler.precondition_outputs(noisy, found, sigma)
        return Comparison(prediction=denoised, target=clean, batch=inputs.batch)

    def _weights(self, levels: NoiseLevels) -> torch.Tensor | None:
        if self.weighting == "none":
            return None
        data = float(self.scheduler.config.sigma_data)
        return (levels.sigmas**2 + data**2) / (levels.sigmas * data) ** 2

    def _level(self, inputs: Inputs, levels: NoiseLevels) -> Level:
        return Level(noise_to_signal=levels.sigmas.to(inputs.clean.device))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train adapters for a model with an EDM scheduler."
    )
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--data", type=Path, required=True, help="images with captions")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=2000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--paper", action="store_true", help="the loss of the EDM paper")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    sizes = {"stage": 2, "batch": 2, "rank": 16, "area": 1024 * 1024, "bucket-step": 64}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
