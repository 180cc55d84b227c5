"""Stable Diffusion XL: two text encoders, and a U-Net that is told sizes and crops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from zerotune.diffusion.families.base import call_unet, to_model
from zerotune.diffusion.families.text_to_image import TextToImage
from zerotune.diffusion.family import Conditioning, Denoiser
from zerotune.diffusion.pipeline import FrozenParts

_SIZES = ("original_sizes", "crop_corners", "target_sizes")
_LATENT_SCALE = 8


@attrs.frozen(kw_only=True, eq=False)
class StableDiffusionXL(TextToImage):
    """Conditioned on ``prompt_embeds``, ``pooled_prompt_embeds`` and micro-conditioning.

    A batch may hold ``original_sizes``, ``crop_corners`` and ``target_sizes``, each (b, 2),
    vertical before horizontal, as ``PreparedImages`` gives them; without them images count as
    uncropped and of their own size.

    The empty text becomes zeros where the pipeline's ``force_zeros_for_empty_prompt`` says so: it
    is what the model meets as the unconditional case when images are drawn. diffusers' training
    script embeds the empty text instead.

    Source: diffusers' ``examples/text_to_image/train_text_to_image_sdxl.py``; Podell et al.,
    "SDXL", section 2.2.
    """

    pipeline: ClassVar[str] = "StableDiffusionXLPipeline"
    component: ClassVar[str] = "unet"
    text_tensors: ClassVar[tuple[str, ...]] = ("prompt_embeds", "pooled_prompt_embeds")
    lora_targets: ClassVar[tuple[str, ...]] = ("to_k", "to_q", "to_v", "to_out.0")
    leaf_modules: ClassVar[tuple[str, ...]] = ("ResnetBlock2D", "BasicTransformerBlock")

    def embed(
        self, parts: FrozenParts, captions: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """``prompt_embeds`` (b, 77, w1 + w2) and ``pooled_prompt_embeds`` (b, w2)."""
        embeds, _, pooled, _ = parts.pipeline.encode_prompt(
            list(captions),
            device=device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=False,
        )
        if parts.pipeline.config.force_zeros_for_empty_prompt:
            told = torch.tensor([caption != "" for caption in captions], device=embeds.device)
            embeds, pooled = embeds * told[:, None, None], pooled * told[:, None]
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def embedding_settings(self) -> dict[str, Any]:
        """What becomes of the empty text."""
        config = self._needed("captions").pipeline.config
        return {"force_zeros_for_empty_prompt": config.force_zeros_for_empty_prompt}

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """Embeddings, and ``time_ids`` (b, 6): original size, crop corner, target size."""
        texts = super().conditioning(batch, generator)
        return {**texts, "time_ids": self._time_ids(batch)}

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Call the U-Net with its added conditions."""
        added = {
            "text_embeds": to_model(conditioning["pooled_prompt_embeds"], model),
            # Exact sizes: bf16 would round 1023 to 1024.
            "time_ids": conditioning["time_ids"].to(model.device),
        }
        return call_unet(model, noisy, timesteps, conditioning, added_cond_kwargs=added)

    def _time_ids(self, batch: Mapping[str, Tensor]) -> Tensor:
        if all(name in batch for name in _SIZES):
            return torch.cat([batch[name] for name in _SIZES], dim=1).float()
        height, width = self._pixels(batch)
        count = len(batch["latents"] if "latents" in batch else batch["images"])
        row = torch.tensor([height, width, 0, 0, height, width], dtype=torch.float32)
        return row.repeat(count, 1)

    def _pixels(self, batch: Mapping[str, Tensor]) -> tuple[int, int]:
        if "latents" not in batch:
            return int(batch["images"].shape[2]), int(batch["images"].shape[3])
        scale = _LATENT_SCALE if self.parts is None else self.parts.scale
        height, width = batch["latents"].shape[2:]
        return int(height) * scale, int(width) * scale
