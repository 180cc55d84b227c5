"""A diffusers pipeline around a model in training: its frozen parts, and who stands for its model.

The parts that are not trained (VAE, text encoders, tokenizers) are ``FrozenParts``; in the place of
the trained model the pipeline has a ``PipelineModel``, which calls the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from zerotune.backend.unpartitioned import check_whole
from zerotune.diffusion.data.cache import hash_weights
from zerotune.diffusion.family import Denoiser
from zerotune.errors import DataError

_EXACT: Final = ("timestep", "time_ids", "guidance", "img_ids", "txt_ids")
"""Numbers that bf16 cannot hold."""

Embeddings = Mapping[str, torch.Tensor]
"""Tensors of texts by name, batch first."""


class FrozenParts:
    """A diffusers pipeline without its trained model, whole on every rank and without gradients.

    Weights stay where they are until something has to be computed; ``on`` brings some of them to
    a device for a while, ``release`` back to the host for good.

    Args:
        pipeline: Such as ``StableDiffusionXLPipeline``, its trained component ``None`` or a
            ``PipelineModel``.

    Raises:
        EngineError: A part was partitioned by ZeRO-3 while it was loaded.
    """

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self._remembered: dict[str, dict[str, torch.Tensor]] = {}
        for name, module in self.modules.items():
            check_whole(module, name=name)
            module.requires_grad_(False).eval()

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The parts that hold weights, by their name in the pipeline."""
        return {
            name: part
            for name, part in self.pipeline.components.items()
            if isinstance(part, torch.nn.Module) and next(part.parameters(), None) is not None
        }

    @property
    def vae(self) -> Any:
        """The autoencoder.

        Raises:
            DataError: It was left out.
        """
        if self.pipeline.vae is None:
            raise DataError(
                "the pipeline was loaded without its VAE, so there are neither latents nor images",
                key="parts.vae",
                value=None,
                fix='load it: leave_out without "vae"',
            )
        return self.pipeline.vae

    @property
    def text_encoders(self) -> dict[str, torch.nn.Module]:
        """The text encoders by name.

        Raises:
            DataError: All were left out.
        """
        found = {n: module for n, module in self.modules.items() if n.startswith("text_encoder")}
        if not found:
            raise DataError(
                "the pipeline was loaded without text encoders, so texts cannot be used",
                key="parts.text_encoders",
                value=None,
                fix="load them: leave_out without their names",
            )
        return found

    @property
    def scale(self) -> int:
        """Pixels per latent pixel, along each side."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    def to(self, device: torch.device | str, names: Sequence[str] | None = None) -> FrozenParts:
        """Move the weights of some parts, or of all."""
        for name, module in self.modules.items():
            if names is None or name in names:
                module.to(device)
        return self

    def release(self) -> None:
        """Move all weights to the host and give the device's memory back."""
        self.to("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextmanager
    def on(self, device: torch.device, names: Sequence[str]) -> Iterator[None]:
        """Some parts on a device; afterwards they are where they were."""
        moved = [(self.modules[n], _device(self.modules[n])) for n in names if n in self.modules]
        for module, _ in moved:
            module.to(device)
        try:
            yield
        finally:
            for module, before in moved:
                module.to(before)

    def remember(
        self,
        texts: Sequence[str],
        encode: Callable[[Sequence[str]], Embeddings],
        *,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """Embeddings of texts, each computed once on ``device`` and then kept on the host."""
        new = [text for text in dict.fromkeys(texts) if text not in self._remembered]
        if new:
            with self.on(device, list(self.text_encoders)), torch.no_grad():
                for text in new:
                    encoded = encode([text])
                    self._remembered[text] = {name: v[0].cpu() for name, v in encoded.items()}
        first = self._remembered[texts[0]]
        return {name: torch.stack([self._remembered[t][name] for t in texts]) for name in first}

    @torch.no_grad()
    def encode_images(self, images: torch.Tensor) -> torch.Tensor:
        """The means of the VAE's distributions as the model sees them.

        Args:
            images: (b, 3, height, width) in [-1, 1], on the VAE's device or another.

        Returns:
            (b, c, height / scale, width / scale), fp32, on the VAE's device.
        """
        vae = self.vae
        pixels = images.to(_device(vae), vae.dtype)
        encoded: torch.Tensor = vae.encode(pixels).latent_dist.mode().float()
        mean, deviation = self._normalisation(encoded)
        return (encoded - mean) / deviation

    @torch.no_grad()
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Images of latents, one at a time: decoding takes much more memory than encoding.

        Args:
            latents: (b, c, h, w).

        Returns:
            (b, 3, height, width), nominally in [-1, 1], fp32, on the CPU.
        """
        vae = self.vae
        mean, deviation = self._normalisation(latents.float())
        scaled = (latents.float() * deviation + mean).to(_device(vae), vae.dtype)
        ones = torch.split(scaled, 1)
        decoded = [vae.decode(one, return_dict=False)[0].float().cpu() for one in ones]
        return torch.cat(decoded)

    def vae_settings(self) -> dict[str, Any]:
        """All that decides what the VAE makes of an image, but its weights and precision."""
        names = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
        return {name: self.vae.config.get(name) for name in names}

    def hash(self, names: Sequence[str]) -> str:
        """A hash of the weights of some parts."""
        return "+".join(hash_weights(self.modules[name]) for name in names)

    def _normalisation(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation of latents, (1, c or 1, 1, 1): what the model sees has 0 and 1."""
        settings = self.vae_settings()
        scaling = float(settings["scaling_factor"])
        mean = settings["latents_mean"]
        deviation = settings["latents_std"]
        if mean is None or deviation is None:
            shift = torch.full((1, 1, 1, 1), float(settings["shift_factor"] or 0.0))
            return shift.to(latents), torch.full((1, 1, 1, 1), 1 / scaling).to(latents)
        channels = (1, -1, 1, 1)
        return (
            torch.tensor(mean).view(channels).to(latents),
            torch.tensor(deviation).view(channels).to(latents) / scaling,
        )


class PipelineModel(torch.nn.Module):
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


def _device(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {
            name: inner if name in _EXACT else _cast(inner, dtype) for name, inner in value.items()
        }
    return value
