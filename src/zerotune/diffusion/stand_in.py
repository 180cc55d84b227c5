"""An engine in the place of a pipeline's own model, so that diffusers' loops draw with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from zerotune.diffusion.families.base import Denoiser

_EXACT: Final = ("timestep", "time_ids", "guidance", "img_ids", "txt_ids")
"""Numbers that bf16 cannot hold."""


class StandIn(torch.nn.Module):
    """Looks like the model to a pipeline and calls the engine.

    Floating-point inputs are brought to the engine's precision, time steps and sizes excepted,
    and the output back to fp32, so that the scheduler's arithmetic is not done in bf16. It has no
    parameters of its own: moving or casting the pipeline leaves the engine alone.

    Args:
        config: The model's configuration.
        model: What predicts; without one it only answers questions about the configuration.
    """

    def __init__(self, *, config: Any, model: Denoiser | None = None) -> None:
        super().__init__()
        # As plain attributes: torch would otherwise register the model as a child.
        self.__dict__["config"] = config
        self.__dict__["_model"] = model

    @property
    def device(self) -> torch.device:
        """Where the engine computes."""
        return torch.device("cpu") if self._model is None else self._model.device

    @property
    def dtype(self) -> torch.dtype:
        """What the pipeline keeps latents and embeddings in."""
        return torch.float32

    @contextmanager
    def cache_context(self, name: str) -> Iterator[None]:  # noqa: ARG002 - diffusers' signature
        """Nothing is cached between the steps of training."""
        yield

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the engine with the arguments a pipeline gives its model."""
        model: Any = self._model
        arguments = [_cast(value, model.dtype) for value in args[:1]] + list(args[1:])
        output = model(*arguments, **_cast(kwargs, model.dtype))
        prediction = output[0] if isinstance(output, tuple) else output.sample
        return (prediction.float(),)

    def __getattr__(self, name: str) -> Any:
        module = getattr(self.__dict__.get("_model"), "module", self.__dict__.get("_model"))
        if name.startswith("_") or module is None:
            return super().__getattr__(name)
        return getattr(module, name)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {
            name: inner if name in _EXACT else _cast(inner, dtype) for name, inner in value.items()
        }
    return value
