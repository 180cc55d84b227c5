"""Latent spaces of VAEs: compression, normalisation and packing."""

from __future__ import annotations

import math
from typing import Any, Final, Protocol, runtime_checkable

import attrs
import torch

from zerotune.errors import DataError
from zerotune.plan.facts import latent_frames

_PATCH: Final = 2
"""Side of the patches that a VAE with batch normalisation (Flux.2's) folds into channels."""


class LatentSpace:
    """Latent space of a VAE; latents are normalised to mean 0 and standard deviation 1.

    The class supports diffusers' VAEs for images and clips, including deterministic autoencoders
    such as ``AutoencoderDC``. The VAE provides the statistics: a scaling factor (optionally with a
    shift), means and standard deviations per channel, or batch normalisation statistics.

    Args:
        vae: A diffusers VAE; a VAE on the ``meta`` device suffices for ``scale`` and ``frames``.
    """

    def __init__(self, vae: Any) -> None:
        self._vae = vae

    @property
    def scale(self) -> int:
        """Return the number of image pixels per latent pixel along one side."""
        own = getattr(self._vae, "spatial_compression_ratio", None)
        if own is None:
            own = 2 ** (len(self._vae.config.block_out_channels) - 1)
        return int(own) * (_PATCH if self._patched else 1)

    @property
    def channels(self) -> int:
        """Return the number of latent channels."""
        config = self._vae.config
        own = config.get("latent_channels") or config.get("z_dim")
        return int(own) * (_PATCH**2 if self._patched else 1)

    @property
    def frames(self) -> int:
        """Return the number of frames per latent frame after the first one; 1 for images."""
        if not self._of_clips:
            return 1
        for name in ("temporal_compression_ratio", "time_compression_ratio"):
            found = getattr(self._vae, name, None)
            if found is not None:
                return int(found)
        halved = self._vae.config.get("temperal_downsample") or ()
        steps = 2 ** sum(map(bool, halved))
        return int(self._vae.config.get("scale_factor_temporal") or steps)

    def latent_frames(self, frames: int) -> int:
        """Return the number of latent frames in a clip; the first frame has its own latent frame.

        Args:
            frames: Number of frames in the clip.
        """
        return latent_frames(frames, per_latent=self.frames)

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Encode images or clips, and return the normalised mean of the VAE's distribution.

        Args:
            images: Images (b, 3, height, width) or clips (b, 3, frames, height, width) in [-1, 1].

        Returns:
            Latents (b, c, height / scale, width / scale), or (b, c, latent frames, …) for clips,
            fp32, on the VAE's device.
        """
        pixels = images.to(self._device, self._vae.dtype)
        single = self._of_clips and pixels.ndim == 4
        if self._of_clips and not single:
            self._check_frames(pixels.shape[2])
        found = self._vae.encode(pixels.unsqueeze(2) if single else pixels)
        latents: torch.Tensor = (
            found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latent
        )
        latents = (latents.squeeze(2) if single else latents).float()
        if self._patched:
            latents = torch.nn.functional.pixel_unshuffle(latents, _PATCH)
        mean, deviation = self._statistics(latents)
        return (latents - mean) / deviation

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents one sample at a time, to limit memory.

        Args:
            latents: Latents in the shape that ``encode`` returns.

        Returns:
            Images or clips in the shape that ``encode`` accepts, nominally in [-1, 1], fp32, on the
            CPU.
        """
        mean, deviation = self._statistics(latents.float())
        scaled = latents.float() * deviation + mean
        if self._patched:
            scaled = torch.nn.functional.pixel_shuffle(scaled, _PATCH)
        single = self._of_clips and scaled.ndim == 4
        if single:
            scaled = scaled.unsqueeze(2)
        scaled = scaled.to(self._device, self._vae.dtype)
        ones = torch.split(scaled, 1)
        decoded = torch.cat([self._decoded(one).float().cpu() for one in ones])
        return decoded.squeeze(2) if single else decoded

    def settings(self) -> dict[str, Any]:
        """Return the VAE's settings that affect its output, other than weights and dtype."""
        names = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
        return {name: self._vae.config.get(name) for name in names}

    def _check_frames(self, frames: int) -> None:
        if (frames - 1) % self.frames:
            raise DataError(
                f"the number of frames must be 1 more than a multiple of {self.frames}, because "
                f"the VAE compresses every {self.frames} frames after the first into "
                "one latent frame",
                f"use ClipBuckets(compression={self.frames}, frames=...) with a valid number "
                "of frames",
                "frames",
                frames,
            )

    def _decoded(self, one: torch.Tensor) -> torch.Tensor:
        # LTX's decoder has an input for remaining noise; the pipeline's default is none.
        if self._vae.config.get("timestep_conditioning"):
            return self._vae.decode(one, one.new_zeros(1), return_dict=False)[0]  # type: ignore[no-any-return]
        return self._vae.decode(one, return_dict=False)[0]  # type: ignore[no-any-return]

    def _statistics(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation, (1, c or 1, 1, …), to normalise latents."""
        channels = (1, -1, *(1,) * (latents.ndim - 2))
        if self._patched:
            norm = self._vae.bn
            deviation = torch.sqrt(norm.running_var + self._vae.config.batch_norm_eps)
            return norm.running_mean.view(channels).to(latents), deviation.view(channels).to(
                latents
            )
        settings = self.settings()
        scaling = float(settings["scaling_factor"] or 1.0)
        means, deviations = self._of_channels("latents_mean"), self._of_channels("latents_std")
        if means is None or deviations is None:
            ones = (1,) * latents.ndim
            shift = torch.full(ones, float(settings["shift_factor"] or 0.0))
            return shift.to(latents), torch.full(ones, 1 / scaling).to(latents)
        return means.view(channels).to(latents), deviations.view(channels).to(latents) / scaling

    def _of_channels(self, name: str) -> torch.Tensor | None:
        # LTX stores statistics as buffers, all other VAEs in their configuration.
        found = self._vae.config.get(name)
        if found is not None:
            return torch.tensor(found)
        return dict(self._vae.named_buffers()).get(name)

    @property
    def _patched(self) -> bool:
        return isinstance(getattr(self._vae, "bn", None), torch.nn.BatchNorm2d)

    @property
    def _of_clips(self) -> bool:
        return any(parameter.ndim == 5 for parameter in self._vae.parameters())

    @property
    def _device(self) -> torch.device:
        return next(self._vae.parameters()).device  # type: ignore[no-any-return]


@attrs.frozen(kw_only=True)
class UsualSpace:
    """Latent sizes of the family's usual VAE, if no VAE is loaded."""

    scale: int
    frames: int

    def latent_frames(self, frames: int) -> int:
        """Return the number of latent frames of a clip of ``frames`` frames."""
        return latent_frames(frames, per_latent=self.frames)


@runtime_checkable
class Packing(Protocol):
    """Interface for the conversion between latents and the layout that a pipeline expects."""

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Convert latents to the pipeline's layout.

        Args:
            latents: Latents (b, c, [frames,] h, w).
        """
        ...

    def unpack(self, prediction: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Convert a prediction from the pipeline's layout to latents.

        Args:
            prediction: Prediction that the pipeline passes to its scheduler.
            shape: Shape of the latents.
        """
        ...


@attrs.frozen
class Unpacked:
    """Packing for pipelines that use latents unchanged."""

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents unchanged."""
        return latents

    def unpack(self, prediction: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ARG002
        """Return the prediction unchanged."""
        return prediction


@attrs.frozen
class Tokens:
    """Packing as tokens (b, n, c * patch²): patches row by row, channels first within a patch."""

    patch: int = 1
    """Side length of a patch in latent pixels; a patch covers one latent frame."""
    packs: bool = True
    """Whether the pipeline's input latents are tokens; if not, only its predictions are tokens."""

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Convert latents to tokens."""
        if not self.packs:
            return latents
        count, channels, *frames, height, width = latents.shape
        side = self.patch
        grid = latents.reshape(
            count, channels, math.prod(frames), height // side, side, width // side, side
        )
        return grid.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)

    def unpack(self, prediction: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Convert tokens to latents."""
        count, channels, *frames, height, width = shape
        side = self.patch
        grid = prediction.reshape(
            count, math.prod(frames), height // side, width // side, channels, side, side
        )
        return grid.permute(0, 4, 1, 2, 5, 3, 6).reshape(shape)
