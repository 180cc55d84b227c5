"""Train adapters with the Huber loss, and with noise of several resolutions.

    torchrun examples/recipes/losses.py --base SDXL --data photos --output runs/zoe --steps 2000

The base model is SD 1.5, SDXL, or a flow-matching model such as SD3 or FLUX.1. If the base model
predicts noise, debiased estimation weights the loss, and the noise has several resolutions. For
comparison, --loss squared trains with the squared error. To resume a stopped run, use the same
command.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

import zerotune
from zerotune import AspectBuckets, ImageFolder, PreparedImages
from zerotune._util.text import positive, validated, whole
from zerotune.diffusion.losses import Level
from zerotune.diffusion.noise import DrawnNoise, GaussianNoise, Noise
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
    robust = settings(options, flow=getattr(loaded.family, "flow_matching", False))
    checkpoints = options.output / "checkpoints"
    saving = zerotune.SaveEvery(steps=options.every, root=checkpoints, keep=2)
    with zerotune.Trainer(
        model=loaded,
        data=data,
        objective=loaded.objective(**robust if options.loss == "huber" else {}),
        callbacks=[saving],
    ) as trainer:
        if checkpoint := zerotune.latest_checkpoint(checkpoints):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        trainer.export(options.output / "lora.safetensors")
    return list(report.losses)


def settings(options: argparse.Namespace, *, flow: bool) -> dict[str, Any]:
    """Options of the objective; flow matching has no signal-to-noise ratio for a schedule."""
    if flow:
        return {"loss": Huber(threshold=options.threshold, schedule="exponential")}
    return {
        "loss": Debiased(loss=Huber(threshold=options.threshold, schedule="snr")),
        "noise": MultiResolutionNoise(iterations=6, discount=0.3),
    }


def unknown_schedule(schedule: str) -> InvalidValueError:
    flow = schedule == "snr"
    why = "flow matching has no signal-to-noise ratio" if flow else "EDM has no time steps"
    return InvalidValueError(
        f"{why}, which this threshold schedule requires",
        key="loss.schedule",
        value=schedule,
        fix=f'write schedule="{"exponential" if flow else "snr"}" or schedule="constant"',
    )


def _check_positive(_instance: object, attribute: Any, value: Any) -> None:
    positive(value, key=attribute.name, fix="write a number above 0, such as 0.1")


@attrs.frozen(kw_only=True)
class Huber:
    """Pseudo-Huber loss: quadratic for small errors, linear for large errors such as outliers.

    With the threshold ``c``, the error of a difference ``d`` is ``2 c (sqrt(d² + c²) - c)``, which
    is close to ``d²`` if ``|d|`` is far below ``c``.

    Source: ``--loss_type huber`` of kohya-ss/sd-scripts (``library/train_util.py``), after
    https://arxiv.org/abs/2403.16728.
    """

    threshold: float = attrs.field(default=0.1, validator=_check_positive)
    """Threshold at the noisiest time step; ``huber_c`` of sd-scripts."""
    schedule: Literal["constant", "exponential", "snr"] = "snr"
    """How the threshold depends on the noise: not at all; falling exponentially from ``scale`` at
    the first time step (not with EDM); or following the signal-to-noise ratio from 1 (not with flow
    matching)."""
    scale: float = attrs.field(default=1.0, validator=_check_positive)
    """Multiplier for the threshold; not with ``"snr"``."""

    def __attrs_post_init__(self) -> None:
        if self.schedule not in ("constant", "exponential", "snr"):
            raise InvalidValueError(
                "is not one of constant, exponential, snr",
                key="schedule",
                value=self.schedule,
                fix='write "snr", or "exponential" for flow matching',
            )
        if self.schedule == "snr" and self.scale != 1.0:
            raise InvalidValueError(
                'the schedule "snr" runs from 1 to the threshold and cannot be scaled',
                key="scale",
                value=self.scale,
                fix="omit scale, or use a different schedule",
            )

    def errors(self, prediction: torch.Tensor, target: torch.Tensor, level: Level) -> torch.Tensor:
        """Return one error per predicted value."""
        distances, c = self.rooted(prediction, target, level)
        return 2 * c * distances

    def rooted(
        self, prediction: torch.Tensor, target: torch.Tensor, level: Level
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the smooth distances ``sqrt(error² + c²) - c``, and the thresholds ``c``."""
        c = self.thresholds(level).to(prediction.device)
        c = c.view(-1, *(1,) * (prediction.ndim - 1))
        return torch.sqrt((prediction - target) ** 2 + c**2) - c, c

    def thresholds(self, level: Level) -> torch.Tensor:
        """Return the threshold of each sample (b,), or one threshold for all samples (1,)."""
        c = self.threshold
        if self.schedule == "exponential" and level.time is not None:
            return torch.exp(math.log(c) * level.time) * self.scale
        if self.schedule == "snr" and level.noise_to_signal is not None:
            return (1 - c) / (1 + level.noise_to_signal) ** 2 + c
        if self.schedule == "constant":
            return torch.full((1,), c * self.scale)
        raise unknown_schedule(self.schedule)


class SmoothL1(Huber):
    """Smoothed absolute error: the ``Huber`` loss divided by its threshold.

    With the threshold ``c``, the error of a difference ``d`` is ``2 (sqrt(d² + c²) - c)``, which is
    close to ``2 |d|`` if ``|d|`` is far above ``c``.

    Source: ``--loss_type smooth_l1`` of kohya-ss/sd-scripts (``library/train_util.py``).
    """

    def errors(self, prediction: torch.Tensor, target: torch.Tensor, level: Level) -> torch.Tensor:
        """Return one error per predicted value."""
        return 2 * self.rooted(prediction, target, level)[0]


@attrs.frozen(kw_only=True)
class Debiased:
    """Weights of debiased estimation, for any loss of models that predict noise or velocity.

    The weight is ``1 / sqrt(snr)`` for noise and ``1 / (snr + 1)`` for velocity; ``snr`` is clipped
    at 1000.

    Source: https://arxiv.org/abs/2310.08442; for velocity, ``--debiased_estimation_loss`` of
    kohya-ss/sd-scripts (``library/custom_train_functions.py``).
    """

    loss: Huber | None = None
    """The error of each value; by default the squared error."""
    velocity: bool = False
    """Whether the model predicts velocity."""

    def errors(self, prediction: torch.Tensor, target: torch.Tensor, level: Level) -> torch.Tensor:
        """Return one error per predicted value."""
        if level.noise_to_signal is None:
            raise unknown_schedule("snr")
        snr = (level.noise_to_signal**-2).clamp(max=1000.0).to(prediction.device)
        weights = 1 / (snr + 1) if self.velocity else snr**-0.5
        if self.loss is None:
            errors = (prediction - target) ** 2
        else:
            errors = self.loss.errors(prediction, target, level)
        return errors * weights.view(-1, *(1,) * (prediction.ndim - 1))


def _check_discount(_instance: object, attribute: Any, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise InvalidValueError(
            "is not a valid factor",
            key=attribute.name,
            value=value,
            fix="write a number above 0 and at most 1, such as 0.3",
        )


@attrs.frozen(kw_only=True)
class MultiResolutionNoise:
    """Sum of noise at decreasing resolutions, to help the model learn large shapes.

    Each iteration reduces the resolution by a factor of 2 to 4, and upsamples its noise bilinearly
    to the full size. The sum is normalised to standard deviation 1 over the batch. The frames of a
    clip have independent noise.

    Source: ``pyramid_noise_like`` (``--multires_noise_iterations``, ``--multires_noise_discount``)
    of kohya-ss/sd-scripts, ``library/custom_train_functions.py``, after
    https://wandb.ai/johnowhitaker/multires_noise/reports/Multi-Resolution-Noise-for-Diffusion-Model-Training--VmlldzozNjYyOTU2.
    """

    iterations: int = attrs.field(
        default=6, validator=validated(whole, least=1, fix="write 6 to 10")
    )
    """Maximum number of resolutions; fewer are used if a side reaches one pixel."""
    discount: float = attrs.field(default=0.3, validator=_check_discount)
    """Factor by which the noise strength is multiplied at each lower resolution."""
    noise: Noise = attrs.field(factory=GaussianNoise)
    """Noise to which coarser noise is added."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:
        """Draw noise at all resolutions, and normalise the sum."""
        drawn = self.noise.draw(clean, generator)
        coarse = self._coarse(tuple(clean.shape), generator).to(clean.device)
        target = drawn.target + coarse
        deviation = target.std()
        return DrawnNoise(target=target / deviation, added=(drawn.added + coarse) / deviation)

    def _coarse(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        height, width = shape[-2:]
        channels = (shape[0], math.prod(shape[1:-2]))
        total = torch.zeros(*channels, height, width)
        for number in range(self.iterations):
            factor = (2 + 2 * float(torch.rand((), generator=generator))) ** number
            small = max(1, int(height / factor)), max(1, int(width / factor))
            drawn = torch.randn(*channels, *small, generator=generator)
            enlarged = torch.nn.functional.interpolate(drawn, size=(height, width), mode="bilinear")
            total += enlarged * self.discount**number
            if 1 in small:
                break
        return total.view(shape)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--data", type=Path, required=True, help="images with captions")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=2000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--loss", choices=["huber", "squared"], default="huber")
    parser.add_argument("--threshold", type=float, default=0.1, help="threshold of Huber's loss")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    sizes = {"stage": 2, "batch": 2, "rank": 16, "area": 1024 * 1024, "bucket-step": 64}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
