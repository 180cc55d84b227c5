"""Complete diffusers pipelines with a few hundred thousand random weights, written to a folder.

They have the classes, components and files of real pipelines, so that the real loading code runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

WIDTH = 32
SIDE = 8
"""Latents are 8 x 8; the VAE has a factor of two, so images are 16 x 16."""


def clip_tokenizer(folder: Path) -> CLIPTokenizer:
    """Return a tokenizer of single characters with CLIP's class and files."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {word: number for number, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16
    )


def t5_tokenizer() -> T5TokenizerFast:
    letters = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    letters += [(chr(code), -2.0) for code in range(ord("a"), ord("z") + 1)] + [("▁", -1.0)]
    tokenizer = Tokenizer(models.Unigram(letters, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return T5TokenizerFast(tokenizer_object=tokenizer, model_max_length=16)


def clip(projection: bool, length: int = 16) -> Any:
    torch.manual_seed(1)
    config = CLIPTextConfig(
        vocab_size=54, hidden_size=WIDTH, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=length, projection_dim=WIDTH,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


def t5() -> Any:
    torch.manual_seed(2)
    return T5EncoderModel(
        T5Config(
            vocab_size=32,
            d_model=WIDTH,
            d_ff=37,
            d_kv=8,
            num_layers=2,
            num_heads=4,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def vae(channels: int = 4, **settings: Any) -> AutoencoderKL:
    torch.manual_seed(3)
    return AutoencoderKL(
        block_out_channels=(16, 16), norm_num_groups=8, latent_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=2 * SIDE, **settings,
    )  # fmt: skip


def unet(**settings: Any) -> UNet2DConditionModel:
    torch.manual_seed(4)
    return UNet2DConditionModel(
        sample_size=SIDE, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(16, 32), norm_num_groups=8, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **settings,
    )  # fmt: skip


def sdxl_unet() -> UNet2DConditionModel:
    return unet(
        cross_attention_dim=2 * WIDTH, addition_embed_type="text_time",
        addition_time_embed_dim=8, transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=WIDTH + 6 * 8, use_linear_projection=True,
    )  # fmt: skip


def sd3_transformer() -> SD3Transformer2DModel:
    torch.manual_seed(4)
    model = SD3Transformer2DModel(
        sample_size=SIDE, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=2 * WIDTH, caption_projection_dim=32,
        pooled_projection_dim=2 * WIDTH, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip
    return alive(model)


def flux_transformer(*, guidance: bool = True) -> FluxTransformer2DModel:
    torch.manual_seed(4)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8), guidance_embeds=guidance,
    )  # fmt: skip
    return alive(model)


def alive(model: Any) -> Any:
    """Randomise parameters that start as zeros, which would make most gradients zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.abs().max() == 0:
                parameter.normal_(0, 0.02)
    return model


def sd15(folder: Path) -> Path:
    pipeline = StableDiffusionPipeline(
        vae=vae(scaling_factor=0.18215, force_upcast=False), text_encoder=clip(projection=False),
        tokenizer=clip_tokenizer(folder / "made"), unet=unet(cross_attention_dim=WIDTH),
        scheduler=PNDMScheduler(skip_prk_steps=True, steps_offset=1), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    return saved(pipeline, folder)


def sdxl(folder: Path) -> Path:
    pipeline = StableDiffusionXLPipeline(
        vae=vae(scaling_factor=0.13025, force_upcast=True),
        text_encoder=clip(projection=False), text_encoder_2=clip(projection=True),
        tokenizer=clip_tokenizer(folder / "made"), tokenizer_2=clip_tokenizer(folder / "made"),
        unet=sdxl_unet(),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
        ),
    )  # fmt: skip
    return saved(pipeline, folder)


def sd3(folder: Path) -> Path:
    pipeline = StableDiffusion3Pipeline(
        vae=vae(scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False,
                use_post_quant_conv=False),
        text_encoder=clip(projection=True), text_encoder_2=clip(projection=True),
        text_encoder_3=None, tokenizer=clip_tokenizer(folder / "made"),
        tokenizer_2=clip_tokenizer(folder / "made"), tokenizer_3=None,
        transformer=sd3_transformer(), scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip
    return saved(pipeline, folder)


def flux(folder: Path) -> Path:
    pipeline = FluxPipeline(
        vae=vae(scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False,
                use_post_quant_conv=False),
        text_encoder=clip(projection=False), tokenizer=clip_tokenizer(folder / "made"),
        text_encoder_2=t5(), tokenizer_2=t5_tokenizer(), transformer=flux_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    )  # fmt: skip
    return saved(pipeline, folder)


MAKERS = {"sd15": sd15, "sdxl": sdxl, "sd3": sd3, "flux": flux}


def saved(pipeline: Any, folder: Path) -> Path:
    pipeline.save_pretrained(folder)
    return folder
