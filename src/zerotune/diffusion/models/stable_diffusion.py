"""Families of Stable Diffusion: two with U-Nets, and the first with a transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from zerotune.diffusion.models.family import Conditioning
from zerotune.diffusion.models.pipeline import FrozenParts
from zerotune.diffusion.models.pipeline_family import PipelineFamily

POOLED: Final = ("prompt_embeds", "pooled_prompt_embeds")
_POOLED_PAIRS = (
    "prompt_embeds",
    "negative_prompt_embeds",
    "pooled_prompt_embeds",
    "negative_pooled_prompt_embeds",
)

_UNET = ("to_k", "to_q", "to_v", "to_out.0")

_SIZES = ("original_sizes", "crop_corners", "target_sizes")

_TIME_IDS = "time_ids"


def _take_any_size(pipe: Any) -> None:
    # check_inputs requires sides divisible by 8 even if the VAE's scale is smaller.
    pipe.check_inputs = lambda *_, **__: None


class StableDiffusion(PipelineFamily):
    """Stable Diffusion 1.5, 2.1 and derived models.

    Most of these models predict noise; some, such as Stable Diffusion 2.1 at 768², predict
    velocity. The scheduler's ``prediction_type`` records the kind of prediction.
    """

    pipeline: ClassVar[str] = "StableDiffusionPipeline"
    component: ClassVar[str] = "unet"
    lora_targets: ClassVar[tuple[str, ...]] = _UNET
    encoded: ClassVar[tuple[str, ...]] = ("prompt_embeds", "negative_prompt_embeds")
    flow_matching: ClassVar[bool] = False
    by_class: ClassVar[bool] = True

    def embedding_settings(self) -> dict[str, Any]:
        """Return an empty dictionary; no setting affects the embeddings."""
        return {}

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Disable the pipeline's size check, which rejects some sizes that the VAE supports."""
        _take_any_size(pipe)


class StableDiffusionXL(PipelineFamily):
    """Stable Diffusion XL, with two CLIP text encoders and a U-Net conditioned on size and crop.

    A batch may contain ``original_sizes``, ``crop_corners`` and ``target_sizes``, each (b, 2), with
    the vertical value first; ``PreparedImages`` yields all three. If a batch lacks any of these
    tensors, its images are treated as uncropped and at their original size (Podell et al., "SDXL",
    section 2.2).

    If the pipeline sets ``force_zeros_for_empty_prompt``, the empty text is encoded as zeros, both
    in training and in sampling. The training script of diffusers embeds the empty text instead.
    """

    pipeline: ClassVar[str] = "StableDiffusionXLPipeline"
    component: ClassVar[str] = "unet"
    text_tensors: ClassVar[tuple[str, ...]] = POOLED
    lora_targets: ClassVar[tuple[str, ...]] = _UNET
    encoded: ClassVar[tuple[str, ...]] = _POOLED_PAIRS
    flow_matching: ClassVar[bool] = False
    by_class: ClassVar[bool] = True

    def embed(
        self, parts: FrozenParts, captions: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """Return ``prompt_embeds`` (b, 77, w1 + w2) and ``pooled_prompt_embeds`` (b, w2)."""
        texts = super().embed(parts, captions, device)
        if not parts.pipeline.config.force_zeros_for_empty_prompt:
            return texts
        written = torch.tensor([caption != "" for caption in captions], device=device)
        return {
            name: value * written.view(-1, *(1,) * (value.ndim - 1))
            for name, value in texts.items()
        }

    def embed_negative(
        self, parts: FrozenParts, texts: Sequence[str], device: torch.device
    ) -> dict[str, Tensor]:
        """Encode negative prompts in the same way as prompts."""
        return self.embed(parts, texts, device)

    def embedding_settings(self) -> dict[str, Any]:
        """Return the setting that encodes the empty text as zeros."""
        config = self._needed("captions").pipeline.config
        return {"force_zeros_for_empty_prompt": config.force_zeros_for_empty_prompt}

    def conditioning(self, batch: Mapping[str, Tensor], generator: torch.Generator) -> Conditioning:
        """Return embeddings and ``time_ids`` (b, 6): original size, crop corner, target size."""
        return {**super().conditioning(batch, generator), _TIME_IDS: self._time_ids(batch)}

    def _time_ids(self, batch: Mapping[str, Tensor]) -> Tensor:
        if all(name in batch for name in _SIZES):
            return torch.cat([batch[name] for name in _SIZES], dim=1).float()
        scale = self.latent_space().scale if "latents" in batch else 1
        images = batch["latents" if "latents" in batch else "images"]
        height, width = (side * scale for side in images.shape[2:])
        return torch.tensor([[height, width, 0, 0, height, width]]).float().repeat(len(images), 1)

    def _call_kwargs(
        self, noisy: Tensor, conditioning: Conditioning, device: torch.device
    ) -> dict[str, Any]:
        sizes = {_TIME_IDS: conditioning[_TIME_IDS].to(device)}
        return super()._call_kwargs(noisy, conditioning, device) | sizes

    def adjust(self, pipe: Any, call_kwargs: dict[str, Any]) -> None:
        """Pass each sample's sizes to the model; the pipeline supports only one size per call."""
        _take_any_size(pipe)
        sizes = call_kwargs.pop(_TIME_IDS, None)

        def put_in_place(_model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            added = {**kwargs["added_cond_kwargs"], _TIME_IDS: sizes}
            return args, {**kwargs, "added_cond_kwargs": added}

        for name in ("unet", "controlnet"):
            model = getattr(pipe, name, None)
            if sizes is not None and model is not None:
                model.register_forward_pre_hook(put_in_place, with_kwargs=True)

    def example(
        self, model: Any, *, batch: int, side: int | tuple[int, int], frames: int = 2
    ) -> tuple[Tensor, Conditioning]:
        """Return example latents and conditioning, including ``time_ids``."""
        latents, texts = super().example(model, batch=batch, side=side, frames=frames)
        return latents, {**texts, _TIME_IDS: self._time_ids({"latents": latents})}

    def example_text(self, name: str, config: Any, batch: int) -> Tensor:
        """Return an example text tensor of the width that the U-Net expects."""
        if name != "pooled_prompt_embeds":
            return super().example_text(name, config, batch)
        width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        return torch.empty(batch, width, device="meta")


class StableDiffusion3(PipelineFamily):
    """Stable Diffusion 3 and 3.5, with two CLIP models and optionally T5 as text encoders.

    T5 encodes 256 tokens, as in the pipeline; the training script of diffusers uses 77 tokens.
    """

    pipeline: ClassVar[str] = "StableDiffusion3Pipeline"
    text_tensors: ClassVar[tuple[str, ...]] = POOLED
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
    encoded: ClassVar[tuple[str, ...]] = _POOLED_PAIRS
    by_class: ClassVar[bool] = True
