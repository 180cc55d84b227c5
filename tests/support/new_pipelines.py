"""Tiny pipelines of models without a built-in family; docs/families.md declares their families."""

from __future__ import annotations

from pathlib import Path

import diffusers
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from tokenizers import processors
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

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


def hunyuan_video15(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=WIDTH, text_embed_2_dim=WIDTH,
        image_embed_dim=12, rope_axes_dim=(4, 6, 6), target_size=16, task_type="t2v",
    )  # fmt: skip
    torch.manual_seed(3)
    autoencoder = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(16, 16, 16), layers_per_block=1,
        spatial_compression_ratio=4, temporal_compression_ratio=4,
    )  # fmt: skip
    torch.manual_seed(2)
    config = T5Config(vocab_size=384, d_model=WIDTH, d_ff=37, d_kv=8, num_layers=1, num_heads=4)
    pipeline = diffusers.HunyuanVideo15Pipeline(
        scheduler=flow(shift=7.0), vae=autoencoder, text_encoder=language_model(3),
        tokenizer=letters(2048), text_encoder_2=T5EncoderModel(config),
        tokenizer_2=ByT5Tokenizer(), transformer=alive(transformer),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )  # fmt: skip
    return saved(pipeline, folder)


def ltx2(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8,
        cross_attention_dim=16, audio_in_channels=8, audio_out_channels=8,
        audio_num_attention_heads=2, audio_attention_head_dim=4, audio_cross_attention_dim=8,
        num_layers=2, caption_channels=WIDTH, rope_double_precision=False,
    )  # fmt: skip
    torch.manual_seed(3)
    autoencoder = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,),
        layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
        down_block_types=("LTX2VideoDownBlock3D",), spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,), decoder_inject_noise=(False, False),
        downsample_type=("spatiotemporal",), upsample_type=("spatiotemporal",),
        upsample_residual=(False,), upsample_factor=(1,), patch_size=2,
    )  # fmt: skip
    autoencoder.latents_mean.uniform_(-0.3, 0.3)
    autoencoder.latents_std.uniform_(0.5, 1.5)
    audio = diffusers.AutoencoderKLLTX2Audio(
        base_channels=8, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2,
        mel_bins=16,
    )  # fmt: skip
    connectors = LTX2TextConnectors(
        caption_channels=WIDTH, text_proj_in_factor=3, video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=8, video_connector_num_layers=1,
        video_connector_num_learnable_registers=32, audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=8, audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=32, rope_double_precision=False,
    )  # fmt: skip
    vocoder = LTX2Vocoder(
        in_channels=32, hidden_channels=32, out_channels=2, upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2], resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]],
    )  # fmt: skip
    pipeline = diffusers.LTX2Pipeline(
        scheduler=flow(use_dynamic_shifting=True), vae=autoencoder, audio_vae=audio,
        text_encoder=language_model(), tokenizer=letters(), connectors=alive(connectors),
        transformer=alive(transformer), vocoder=vocoder,
    )  # fmt: skip
    return saved(pipeline, folder)


MAKERS = {
    "ernie-image": ernie_image, "longcat-image": longcat_image, "lumina": lumina, "mochi": mochi,
    "hunyuan-video-1.5": hunyuan_video15, "ltx-2": ltx2,
}  # fmt: skip
