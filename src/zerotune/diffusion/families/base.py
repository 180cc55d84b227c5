"""What the library must know of a kind of model to train it and to sample from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from zerotune.errors import DataError

Conditioning = Mapping[str, torch.Tensor]
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

    Tensors stay where the batch lies until ``predict`` moves them to the model.
    """

    def clean(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The noise-free samples (b, c, h, w) of a batch, fp32."""
        ...

    def conditioning(
        self, batch: Mapping[str, torch.Tensor], generator: torch.Generator
    ) -> Conditioning:
        """What the model may know of each sample in training, dropped at random if so asked."""
        ...

    def condition_on(self, labels: torch.Tensor | None) -> Conditioning:
        """The conditioning for drawing samples of these labels (b,)."""
        ...

    def without_condition(self, conditioning: Conditioning) -> Conditioning | None:
        """The "nothing is known" counterpart for guidance; ``None`` where there is none."""
        ...

    def predict(
        self,
        model: Denoiser,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Conditioning,
    ) -> torch.Tensor:
        """The model's output, shaped as ``noisy``, in the model's precision.

        Args:
            model: What predicts.
            noisy: Noisy samples (b, c, h, w), fp32.
            timesteps: (b,), as the scheduler counts them; floats stay fp32.
            conditioning: What ``conditioning`` or ``condition_on`` gave.
        """
        ...


def take(batch: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    """A tensor of a batch.

    Raises:
        DataError: The batch has no such key.
    """
    if key not in batch:
        raise DataError(
            f"the batch has no {key!r}, only {sorted(batch)}",
            key=f"batch[{key!r}]",
            fix="let the dataset yield dicts with it, or use another family",
        )
    return batch[key]


def call_diffusers_model(
    model: Denoiser, noisy: torch.Tensor, timesteps: torch.Tensor, conditioning: Conditioning
) -> torch.Tensor:
    """Call ``model(noisy, timesteps, **conditioning)`` and unwrap diffusers' output.

    Samples and floating-point conditioning are cast to the model's precision; time steps are
    not: bf16 cannot tell 999 from 1000.
    """
    output = model(
        noisy.to(model.device, model.dtype),
        timesteps.to(model.device),
        **{name: _moved(value, model) for name, value in conditioning.items()},
    )
    prediction = output if isinstance(output, torch.Tensor) else output[0]
    if not isinstance(prediction, torch.Tensor) or prediction.shape != noisy.shape:
        shape = getattr(prediction, "shape", None)
        raise DataError(
            "the model's output is not shaped like its input "
            f"({None if shape is None else tuple(shape)} against {tuple(noisy.shape)})",
            key="model.forward",
            fix="predict as many channels as the samples have; learned variance is not trained",
        )
    return prediction


def _moved(value: torch.Tensor, model: Denoiser) -> torch.Tensor:
    return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
