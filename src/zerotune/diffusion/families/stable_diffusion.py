"""Stable Diffusion 1.5, 2.1 and what descends from them: one text encoder, a U-Net."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from zerotune.diffusion.families.base import call_unet
from zerotune.diffusion.families.text_to_image import TextToImage
from zerotune.diffusion.family import Conditioning, Denoiser
from zerotune.diffusion.pipeline import FrozenParts


@attrs.frozen(kw_only=True, eq=False)
class StableDiffusion(TextToImage):
    """Conditioned on ``prompt_embeds`` (b, tokens, width) of one CLIP encoder.

    2.1 learns velocities at 768²; its scheduler's ``prediction_type`` says so.

    Source: diffusers' ``examples/text_to_image/train_text_to_image.py``.
    """

    pipeline: ClassVar[str] = "StableDiffusionPipeline"
    component: ClassVar[str] = "unet"
    text_tensors: ClassVar[tuple[str, ...]] = ("prompt_embeds",)
    lora_targets: ClassVar[tuple[str, ...]] = ("to_k", "to_q", "to_v", "to_out.0")
    leaf_modules: ClassVar[tuple[str, ...]] = ("ResnetBlock2D", "BasicTransformerBlock")

    def embed(
        self, parts: FrozenParts, captions: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """``prompt_embeds`` (b, tokens, width)."""
        embeds, _ = parts.pipeline.encode_prompt(
            list(captions), device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"prompt_embeds": embeds}

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Call the U-Net with ``encoder_hidden_states``."""
        return call_unet(model, noisy, timesteps, conditioning)
