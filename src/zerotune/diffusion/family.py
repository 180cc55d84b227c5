"""What a kind of model is to the library: how it is called in training and drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

Conditioning = Mapping[str, Tensor]
"""Keyword arguments of the model's forward pass, batch first; empty without conditioning."""


class Denoiser(Protocol):
    """What predicts: an ``Engine``, or any diffusers model."""

    @property
    def device(self) -> torch.device:
        """Where its inputs must lie."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Precision of its floating-point inputs."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass."""
        ...


@runtime_checkable
class Family(Protocol):
    """A kind of model: how a batch becomes its inputs, and how it is called.

    Tensors stay where the batch lies until ``predict`` moves them to the model. To draw images
    as well, a family is a ``LabelFamily`` or a ``PromptFamily``.
    """

    def clean(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The noise-free samples (b, c, h, w) of a batch, fp32."""
        ...

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """What the model may know of each sample in training, dropped at random if so asked."""
        ...

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The model's output, shaped as ``noisy``, in its precision or fp32.

        Args:
            model: What predicts.
            noisy: Noisy samples (b, c, h, w), fp32.
            timesteps: (b,), as the scheduler counts them; floats stay fp32.
            conditioning: What ``conditioning`` or ``condition_on`` gave.
        """
        ...


@runtime_checkable
class LabelFamily(Family, Protocol):
    """A family whose samples are images, of a class or of none; drawn by zerotune's own loop."""

    def condition_on(self, labels: Tensor | None) -> Conditioning:
        """The conditioning for drawing samples of these labels (b,)."""
        ...

    def without_condition(self, conditioning: Conditioning) -> Conditioning | None:
        """The "nothing is known" counterpart for guidance; ``None`` where there is none."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class Drawing:
    """Images wanted of one rank; options are those of ``sample``."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    """One for each prompt: it alone decides the image's noise."""
    negative_prompt: str = ""
    steps: int = 50
    guidance_scale: float = 1.0
    size: tuple[int, int] | None = None
    frames: int | None = None
    references: Tensor | None = None
    scheduler: Any = None
    trained_with: Any = None


@runtime_checkable
class PromptFamily(Family, Protocol):
    """A family whose images are drawn from texts, through its diffusers pipeline."""

    def draw(self, model: Denoiser, drawing: Drawing) -> Tensor:
        """Images (n, 3, height, width) on the CPU, fp32, nominally in [-1, 1]."""
        ...
