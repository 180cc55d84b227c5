"""Stable Diffusion 3 and 3.5: three text encoders, a transformer, flow matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from zerotune.diffusion.families.base import prediction_of, to_model
from zerotune.diffusion.families.text_to_image import TextToImage
from zerotune.diffusion.family import Conditioning, Denoiser
from zerotune.diffusion.pipeline import FrozenParts


@attrs.frozen(kw_only=True, eq=False)
class StableDiffusion3(TextToImage):
    """Conditioned on ``prompt_embeds`` and ``pooled_prompt_embeds``.

    Source: diffusers' ``examples/dreambooth/train_dreambooth_sd3.py``; Esser et al., "Scaling
    Rectified Flow Transformers".
    """

    pipeline: ClassVar[str] = "StableDiffusion3Pipeline"
    component: ClassVar[str] = "transformer"
    text_tensors: ClassVar[tuple[str, ...]] = ("prompt_embeds", "pooled_prompt_embeds")
    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
    )
    leaf_modules: ClassVar[tuple[str, ...]] = ("JointTransformerBlock",)
    flow_matching: ClassVar[bool] = True

    max_sequence_length: int = 256
    """Tokens of T5; the pipeline's default. diffusers' training script takes 77."""

    def embed(
        self, parts: FrozenParts, captions: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """``prompt_embeds`` (b, 77 + tokens of T5, w3), ``pooled_prompt_embeds`` (b, w1 + w2)."""
        texts = list(captions)
        embeds, _, pooled, _ = parts.pipeline.encode_prompt(
            texts,
            texts,
            texts,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def embedding_settings(self) -> dict[str, Any]:
        """The length of T5's text."""
        return {"max_sequence_length": self.max_sequence_length}

    def predict(
        self, model: Denoiser, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Call the transformer."""
        output = model(
            hidden_states=to_model(noisy, model),
            timestep=timesteps.to(model.device),
            encoder_hidden_states=to_model(conditioning["prompt_embeds"], model),
            pooled_projections=to_model(conditioning["pooled_prompt_embeds"], model),
        )
        return prediction_of(output, like=noisy)
