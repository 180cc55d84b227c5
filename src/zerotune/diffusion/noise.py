"""Training noise: the noise added to clean samples, and the noise the model must predict.

Noise types compose: ``InputPerturbation(noise=OffsetNoise())`` perturbs noise with an offset. All
random numbers come from the CPU generator that the caller passes.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from zerotune._util.text import not_negative


@attrs.frozen(kw_only=True, eq=False)
class DrawnNoise:
    """Noise for one batch, with the shape of the samples."""

    target: torch.Tensor
    """Noise that the model must predict."""
    added: torch.Tensor
    """Noise in the model's input; differs from the target only with ``InputPerturbation``."""


@runtime_checkable
class Noise(Protocol):
    """Protocol for drawing the noise for a batch. Any object with a method ``draw`` is accepted."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:
        """Draw noise on the device of ``clean``.

        Args:
            clean: Noise-free samples (b, c, h, w), fp32.
            generator: CPU generator, the only source of randomness.
        """
        ...


def _check_strength(_instance: object, attribute: Any, value: Any) -> None:
    not_negative(value, key=attribute.name, fix="write a non-negative number, such as 0.1")


@attrs.frozen(kw_only=True)
class GaussianNoise:
    """Independent standard normal values."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:
        """Draw one normal value for each value of ``clean``."""
        noise = _normal_like(clean.shape, clean, generator)
        return DrawnNoise(target=noise, added=noise)


@attrs.frozen(kw_only=True)
class OffsetNoise:
    """Noise plus a random offset per sample and channel, to help the model learn brightness.

    Source: ``noise_offset`` of diffusers' ``examples/text_to_image/train_text_to_image.py``.
    """

    strength: float = attrs.field(default=0.1, validator=_check_strength)
    """Standard deviation of the offset."""
    noise: Noise = attrs.field(factory=GaussianNoise)
    """Noise to which the offset is added."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:
        """Draw the noise and add the offset."""
        drawn = self.noise.draw(clean, generator)
        shape = (*clean.shape[:2], *(1,) * (clean.ndim - 2))
        offset = self.strength * _normal_like(shape, clean, generator)
        return DrawnNoise(target=drawn.target + offset, added=drawn.added + offset)


@attrs.frozen(kw_only=True)
class InputPerturbation:
    """Extra noise in the input but not in the target, to make the model robust to its own errors.

    Source: ``input_perturbation`` of diffusers' ``examples/text_to_image/train_text_to_image.py``,
    after https://arxiv.org/abs/2301.11706.
    """

    strength: float = attrs.field(default=0.1, validator=_check_strength)
    """Standard deviation of the extra noise."""
    noise: Noise = attrs.field(factory=GaussianNoise)
    """Noise to perturb."""

    def draw(self, clean: torch.Tensor, generator: torch.Generator) -> DrawnNoise:
        """Draw the noise to predict, and the perturbed noise for the model's input."""
        drawn = self.noise.draw(clean, generator)
        more = self.strength * _normal_like(clean.shape, clean, generator)
        return DrawnNoise(target=drawn.target, added=drawn.added + more)


def _normal_like(
    shape: tuple[int, ...], clean: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(clean.device)
