"""Tiny pipelines of models without a built-in family; docs/families.md declares their families."""

from __future__ import annotations

from pathlib import Path

import diffusers
import torch
from tokenizers import processors

from tests.support.declared_pipelines import (
    _eightfold,
    _flux2_vae,
    flow,
    language_model,
    letters,
)
from tests.support.pipelines import WIDTH, alive, saved, t5, t5_tokenizer, vae


def ernie_image(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=32, in_channels=16,
        out_channels=16, text_in_dim=WIDTH, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    pipeline = diffusers.ErnieImagePipeline(
        transformer=alive(transformer), vae=_flux2_vae(), text_encoder=language_model(),
        tokenizer=letters(), scheduler=flow(shift=3.0), pe=None, pe_tokenizer=None,
    )  # fmt: skip
    return saved(pipeline, folder)


def longcat_image(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.LongCatImageTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
        axes_dims_rope=[4, 6, 6],
    )  # fmt: skip
    pipeline = diffusers.LongCatImagePipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae(16, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=language_model(), tokenizer=letters(2048), text_processor=letters(2048),
        transformer=alive(transformer),
    )  # fmt: skip
    return saved(pipeline, folder)


def lumina(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.LuminaNextDiT2DModel(
        sample_size=8, patch_size=2, in_channels=4, hidden_size=24, num_layers=2,
        num_attention_heads=3, num_kv_heads=1, multiple_of=8, cross_attention_dim=WIDTH,
    )  # fmt: skip
    tokenizer = letters()
    # Like Gemma's tokenizer, begin every text with a special token.
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 1)]
    )
    pipeline = diffusers.LuminaPipeline(
        vae=_eightfold(scaling_factor=0.18), text_encoder=language_model(), tokenizer=tokenizer,
        transformer=alive(transformer), scheduler=flow(),
    )  # fmt: skip
    return saved(pipeline, folder)


def mochi(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.MochiTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=12, text_embed_dim=WIDTH, time_embed_dim=4, max_sequence_length=16,
    )  # fmt: skip
    torch.manual_seed(3)
    autoencoder = diffusers.AutoencoderKLMochi(
        latent_channels=12, encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
        add_attention_block=(False,) * 5,
    )  # fmt: skip
    pipeline = diffusers.MochiPipeline(
        scheduler=flow(invert_sigmas=True), vae=autoencoder, text_encoder=t5(),
        tokenizer=t5_tokenizer(), transformer=alive(transformer),
    )  # fmt: skip
    return saved(pipeline, folder)


MAKERS = {
    "ernie-image": ernie_image, "longcat-image": longcat_image, "lumina": lumina, "mochi": mochi,
}  # fmt: skip
