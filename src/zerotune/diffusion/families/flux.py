"""Flux.1: CLIP and T5, a transformer over packed latents, flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from zerotune.diffusion.families.base import config_of, to_model
from zerotune.diffusion.families.text_to_image import TextToImage
from zerotune.diffusion.family import Conditioning, Denoiser, Drawing
from zerotune.diffusion.pipeline import FrozenParts
from zerotune.errors import DataError

_PATCH = 2


@attrs.frozen(kw_only=True, eq=False)
class Flux(TextToImage):
    """Conditioned on ``prompt_embeds`` (T5) and ``pooled_prompt_embeds`` (CLIP).

    Latents are packed into patches of 2 by 2 for the model and unpacked after, so objectives see
    images of latents as everywhere else.

    Source: diffusers' ``examples/dreambooth/train_dreambooth_lora_flux.py``.
    """

    pipeline: ClassVar[str] = "FluxPipeline"
    component: ClassVar[str] = "transformer"
    text_tensors: ClassVar[tuple[str, ...]] = ("prompt_embeds", "pooled_prompt_embeds")
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn.to_k",
        "attn.to_q",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    leaf_modules: ClassVar[tuple[str, ...]] = (
        "FluxTransformerBlock",
        "FluxSingleTransformerBlock",
    )
    flow_matching: ClassVar[bool] = True

    max_sequence_length: int = 512
    """Tokens of T5; ``schnell`` takes at most 256."""
    guidance: float = 1.0
    """What a guidance-distilled model (``dev``) is told in training; 1 in diffusers' script."""

    def embed(
        self, parts: FrozenParts, captions: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """``prompt_embeds`` (b, tokens, width) of T5, ``pooled_prompt_embeds`` (b, w) of CLIP."""
        embeds, pooled, _ = parts.pipeline.encode_prompt(
            list(captions), None, device=device, max_sequence_length=self.max_sequence_length
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def embedding_settings(self) -> dict[str, Any]:
        """The length of T5's text."""
        return {"max_sequence_length": self.max_sequence_length}

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Call the transformer on packed latents."""
        from diffusers import FluxPipeline

        count, channels, height, width = noisy.shape
        _check_even(height, width)
        packed = FluxPipeline._pack_latents(noisy, count, channels, height, width)
        texts = to_model(conditioning["prompt_embeds"], model)
        output = model(
            hidden_states=to_model(packed, model),
            # The model multiplies by 1000 itself.
            timestep=timesteps.to(model.device) / 1000,
            guidance=self._guidance(count, model) if config_of(model).guidance_embeds else None,
            pooled_projections=to_model(conditioning["pooled_prompt_embeds"], model),
            encoder_hidden_states=texts,
            txt_ids=torch.zeros(texts.shape[1], 3, device=model.device),
            img_ids=FluxPipeline._prepare_latent_image_ids(
                count, height // _PATCH, width // _PATCH, model.device, torch.float32
            ),
            return_dict=False,
        )[0]
        unpacked: Tensor = FluxPipeline._unpack_latents(
            output, height=height, width=width, vae_scale_factor=1
        )
        return unpacked

    def drawing_arguments(self, drawing: Drawing, *, device: torch.device) -> dict[str, Any]:
        """Guidance is an input of distilled models; a negative prompt asks for true guidance.

        The model is then told the guidance it was trained with: it would otherwise be guided twice.
        """
        known = self.remembered(drawing.prompts, device=device)
        arguments: dict[str, Any] = {name: value.float() for name, value in known.items()}
        if not drawing.negative_prompt:
            return arguments | {"guidance_scale": drawing.guidance_scale}
        texts = [drawing.negative_prompt] * len(drawing.prompts)
        negative = self.remembered(texts, device=device)
        arguments |= {f"negative_{name}": value.float() for name, value in negative.items()}
        return arguments | {
            "guidance_scale": self.guidance,
            "true_cfg_scale": drawing.guidance_scale,
        }

    def unpacked(self, pipe: Any, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """Images of latents (n, c, h, w)."""
        images: Tensor = pipe._unpack_latents(latents, *size, pipe.vae_scale_factor)
        return images

    def default_size(self, model: Any) -> tuple[int, int]:  # noqa: ARG002 - the base's
        """1024² for Flux's VAE: 128 pixels of latents."""
        parts = self._needed("prompts")
        side = int(parts.pipeline.default_sample_size) * parts.scale
        return side, side

    def _guidance(self, count: int, model: Denoiser) -> Tensor:
        return torch.full((count,), self.guidance, device=model.device)


def _check_even(height: int, width: int) -> None:
    if height % _PATCH or width % _PATCH:
        raise DataError(
            "Flux packs latents into patches of 2 by 2",
            key="latents",
            value=(height, width),
            fix="use buckets whose sides are divisible by 16 pixels",
        )
