"""Noise: what is added to clean samples, and what of it a model has to find.

Noise composes: each kind takes another one and changes it. Every random number comes from the
generator passed in, on the CPU.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from zerotune._util.text import validated, whole
from zerotune.errors import InvalidValueError


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
            "is not a valid noise strength",
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


def _check_discount(_instance: object, attribute: Any, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise InvalidValueError(
            "is not a valid share of the previous strength",
            key=attribute.name,
            value=value,
            fix="write a number above 0 and at most 1, such as 0.3",
        )


@attrs.frozen(kw_only=True)
class MultiResolutionNoise:
    """Noise with coarser noise in it, of ever fewer pixels, so that large shapes are learned too.

    Each time it is drawn, smaller by 2 to 4 times per iteration and enlarged bilinearly; the sum
    is brought back to the deviation 1 over the whole batch. Every frame of clips has its own.

    Source: ``pyramid_noise_like`` (``--multires_noise_iterations``, ``--multires_noise_discount``)
    of kohya-ss/sd-scripts, ``library/custom_train_functions.py``, after
    https://wandb.ai/johnowhitaker/multires_noise/reports/Multi-Resolution-Noise-for-Diffusion-Model-Training--VmlldzozNjYyOTU2.
    """

    iterations: int = attrs.field(
        default=6, validator=validated(whole, least=1, fix="write 6 to 10")
    )
    """Sizes of noise that are added at most; it ends where a side has one pixel."""
    discount: float = attrs.field(default=0.3, validator=_check_discount)
    """What the strength is multiplied by from one size to the next."""
    noise: Noise = attrs.field(factory=GaussianNoise)
    """What coarser noise is added to."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:
        """The noise of all sizes."""
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


def _normal_like(
    shape: tuple[int, ...], clean: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(clean.device)
