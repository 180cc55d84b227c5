"""``OneStep``: a scheduler whose step ends a pipeline's call; ``LastStep`` records latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zerotune.diffusion.models.family import parameters_of


class LastStep:
    """Records the latents of the last step, because pipelines return their latents differently."""

    latents: Tensor | None = None

    def listening(self, call: Any) -> dict[str, Any]:
        """Return the argument of a pipeline's ``call`` that receives a callback, if there is one.

        Without it, the pipeline's output contains the latents.
        """
        callbacks = {"callback_on_step_end": self._stepped, "callback": self._called}
        taken = parameters_of(call)
        return dict([(name, each) for name, each in callbacks.items() if name in taken][:1])

    def _stepped(self, _pipe: Any, _step: int, _time: Any, tensors: Mapping[str, Any]) -> Any:
        self.latents = tensors["latents"]
        return {}

    def _called(self, _step: int, _time: Any, latents: Tensor) -> None:
        self.latents = latents


class Predicted(Exception):  # noqa: N818 - not an error: ends the pipeline's call
    """Ends a pipeline's call, and contains the prediction."""

    def __init__(self, prediction: Tensor) -> None:
        super().__init__("the pipeline's prediction")
        self.prediction = prediction


class OneStep:
    """A scheduler of one step, whose time steps may differ by sample.

    Args:
        config: Configuration of the pipeline's scheduler.
        steps: Time steps (1, b), or (1,) for pipelines with one time step for all samples.
    """

    order = 1
    init_noise_sigma = 1.0

    def __init__(self, config: Any, steps: Tensor) -> None:
        # Pipelines of U-Nets warn about other values, which only matter for sampling.
        sampling = {"steps_offset": 1, "clip_sample": False}
        self.config = type(config)({**config, **{n: v for n, v in sampling.items() if n in config}})
        self.timesteps = steps
        self.sigmas = torch.tensor([1.0, 0.0])

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        *,
        timesteps: Any = None,
        sigmas: Any = None,
        **_: Any,
    ) -> None:
        """Keep the time steps that were passed to the constructor."""

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Ignore the index, because the scheduler has one step."""

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:  # noqa: ARG002
        """Return ``sample`` unscaled."""
        return sample

    def step(self, model_output: Tensor, *_: Any, **__: Any) -> Any:
        """End the pipeline's call by raising an exception that contains the prediction."""
        raise Predicted(model_output)
