"""What is added to clean samples, as small values that compose."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import attrs
import torch

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
        noise = _normal(clean.shape, clean, generator)
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
        offset = self.strength * _normal(shape, clean, generator)
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
        more = self.strength * _normal(clean.shape, clean, generator)
        return DrawnNoise(target=drawn.target, added=drawn.added + more)


def _normal(
    shape: tuple[int, ...], clean: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(clean.device)
