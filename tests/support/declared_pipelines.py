"""Complete tiny pipelines of the declared families; ``tests.support.pipelines`` has the others.

Their language models are tiny Qwen3 models, whatever the real ones are: pipelines use only hidden
states.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    GlmConfig,
    GlmModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLProcessor,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLModel,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.pipelines import (
    WIDTH,
    alive,
    clip,
    clip_tokenizer,
    flux_transformer,
    saved,
    t5,
    t5_tokenizer,
    vae,
)

_SEEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

WITH_VIDEOS = Qwen2VLProcessor.get_attributes


def without_videos() -> None:
    """Let transformers process images without torchvision, which only videos need."""
    Qwen2VLProcessor.get_attributes = classmethod(lambda _: ["image_processor", "tokenizer"])


_CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def letters(length: int = 512) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>",
        model_max_length=length, chat_template=_CHAT, padding_side="right",
    )  # fmt: skip


def language_model(layers: int = 2) -> Qwen3Model:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=260, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
    )  # fmt: skip
    return Qwen3Model(config)


def vision_language_model() -> Qwen3VLModel:
    torch.manual_seed(1)
    text = {
        "vocab_size": 260, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0,
        },
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": WIDTH, "patch_size": 4, "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }  # fmt: skip
    return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision))


def umt5() -> UMT5EncoderModel:
    torch.manual_seed(2)
    config = UMT5Config(
        vocab_size=32, d_model=WIDTH, d_ff=37, d_kv=8, num_layers=2, num_heads=4,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return UMT5EncoderModel(config)


def flow(**settings: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**{"shift": 1.0, **settings})


def _video_vae(kind: Any, **settings: Any) -> Any:
    torch.manual_seed(3)
    return kind(
        base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True],
        latents_mean=[0.1, -0.2, 0.0, 0.3], latents_std=[1.5, 0.8, 1.0, 2.0], **settings,
    )  # fmt: skip


def _qwen_transformer() -> Any:
    torch.manual_seed(4)
    return alive(
        diffusers.QwenImageTransformer2DModel(
            patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 6, 6),
        )
    )  # fmt: skip


def qwen_image(folder: Path) -> Path:
    pipeline = diffusers.QwenImagePipeline(
        vae=_video_vae(diffusers.AutoencoderKLQwenImage), text_encoder=language_model(),
        tokenizer=letters(2048), transformer=_qwen_transformer(),
        scheduler=flow(use_dynamic_shifting=True),
    )  # fmt: skip
    return saved(pipeline, folder)


def z_image(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        cap_feat_dim=WIDTH, axes_dims=[4, 6, 6], axes_lens=[1024, 64, 64],
    )  # fmt: skip
    pipeline = diffusers.ZImagePipeline(
        vae=vae(scaling_factor=0.3611, shift_factor=0.1159), text_encoder=language_model(),
        tokenizer=letters(), transformer=alive(transformer), scheduler=flow(shift=3.0),
    )  # fmt: skip
    return saved(pipeline, folder)


def _flux2_vae() -> Any:
    torch.manual_seed(3)
    found = diffusers.AutoencoderKLFlux2(
        block_out_channels=(16, 16), norm_num_groups=8, latent_channels=4, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=16,
    )  # fmt: skip
    found.bn.running_mean.uniform_(-0.2, 0.2)
    found.bn.running_var.uniform_(0.5, 2.0)
    return found


def _flux2_transformer(*, guidance: bool) -> Any:
    torch.manual_seed(4)
    return alive(
        diffusers.Flux2Transformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=3 * WIDTH, timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4), guidance_embeds=guidance,
        )
    )  # fmt: skip


def flux2(folder: Path) -> Path:
    pipeline = diffusers.Flux2Pipeline(
        vae=_flux2_vae(), text_encoder=language_model(31), tokenizer=letters(),
        transformer=_flux2_transformer(guidance=True), scheduler=flow(use_dynamic_shifting=True),
    )  # fmt: skip
    return saved(pipeline, folder)


def flux2_klein(folder: Path) -> Path:
    pipeline = diffusers.Flux2KleinPipeline(
        vae=_flux2_vae(), text_encoder=language_model(28), tokenizer=letters(),
        transformer=_flux2_transformer(guidance=False), scheduler=flow(use_dynamic_shifting=True),
    )  # fmt: skip
    return saved(pipeline, folder)


def _wan_transformer(seed: int, **settings: Any) -> Any:
    torch.manual_seed(seed)
    usual = {"in_channels": 4, "out_channels": 4, "text_dim": WIDTH, "num_layers": 2}
    return alive(
        diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, freq_dim=16, ffn_dim=32,
            rope_max_seq_len=128, **(usual | settings),
        )
    )  # fmt: skip


def _wan_parts() -> dict[str, Any]:
    return {
        "vae": _video_vae(
            diffusers.AutoencoderKLWan, scale_factor_temporal=2, scale_factor_spatial=2
        ),
        "text_encoder": umt5(),
        "tokenizer": t5_tokenizer(),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0,
            num_train_timesteps=1000,
        ),
    }  # fmt: skip


def _wan(folder: Path, **settings: Any) -> Path:
    parts = _wan_parts() | {"transformer": _wan_transformer(4)}
    return saved(diffusers.WanPipeline(**parts, **settings), folder)


def wan_i2v(folder: Path) -> Path:
    """Write a pipeline like Wan 2.1, which also encodes the image with CLIP."""
    torch.manual_seed(5)
    seeing = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=24, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            image_size=8, patch_size=4,
        )
    )  # fmt: skip
    size = {"height": 8, "width": 8}
    pipeline = diffusers.WanImageToVideoPipeline(
        **_wan_parts(), image_encoder=seeing,
        image_processor=CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=size),
        transformer=_wan_transformer(4, in_channels=10, image_dim=24, added_kv_proj_dim=24),
    )  # fmt: skip
    return saved(pipeline, folder)


def wan22_i2v(folder: Path) -> Path:
    """Write a pipeline like Wan 2.2 A14B, with two experts and without CLIP."""
    pipeline = diffusers.WanImageToVideoPipeline(
        **_wan_parts(), transformer=_wan_transformer(4, in_channels=10), boundary_ratio=0.9,
        transformer_2=_wan_transformer(5, in_channels=10),
    )  # fmt: skip
    return saved(pipeline, folder)


def wan22_ti2v(folder: Path) -> Path:
    """Write a pipeline like Wan 2.2's small model, which takes texts with and without an image."""
    return _wan(folder, expand_timesteps=True)


def wan(folder: Path) -> Path:
    return _wan(folder)


def wan22(folder: Path) -> Path:
    return _wan(folder, transformer_2=_wan_transformer(5), boundary_ratio=0.875)


def sana(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=8,
        num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16,
        caption_channels=WIDTH, sample_size=32, patch_size=1,
    )  # fmt: skip
    torch.manual_seed(3)
    autoencoder = diffusers.AutoencoderDC(
        latent_channels=4, attention_head_dim=2, encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8), encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1), encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()), encoder_block_types="ResBlock",
        decoder_block_types="ResBlock", scaling_factor=0.41407,
    )  # fmt: skip
    pipeline = diffusers.SanaPipeline(
        tokenizer=letters(2048), text_encoder=language_model(), vae=autoencoder,
        transformer=alive(transformer),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )  # fmt: skip
    return saved(pipeline, folder)


def lumina2(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, hidden_size=24, num_layers=2,
        num_refiner_layers=1, num_attention_heads=2, num_kv_heads=1, multiple_of=8,
        axes_dim_rope=(4, 4, 4), axes_lens=(300, 64, 64), cap_feat_dim=WIDTH,
    )  # fmt: skip
    pipeline = diffusers.Lumina2Pipeline(
        vae=_eightfold(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=language_model(), tokenizer=letters(), transformer=alive(transformer),
        scheduler=flow(shift=6.0),
    )  # fmt: skip
    return saved(pipeline, folder)


def _eightfold(**settings: Any) -> Any:
    """Return a VAE with a factor of eight, for pipelines that support no other."""
    torch.manual_seed(3)
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8, 8), norm_num_groups=4, latent_channels=4, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        sample_size=64, **settings,
    )  # fmt: skip


def ltx(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8,
        cross_attention_dim=16, num_layers=2, caption_channels=WIDTH,
    )  # fmt: skip
    torch.manual_seed(3)
    autoencoder = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        down_block_types=("LTXVideoDownBlock3D",) * 2, layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, False),
        decoder_spatio_temporal_scaling=(True, False), decoder_inject_noise=(False,) * 3,
        downsample_type=("conv", "conv"), upsample_residual=(False, False),
        upsample_factor=(1, 1), patch_size=2, patch_size_t=1,
    )  # fmt: skip
    autoencoder.latents_mean.uniform_(-0.3, 0.3)
    autoencoder.latents_std.uniform_(0.5, 1.5)
    pipeline = diffusers.LTXPipeline(
        vae=autoencoder, text_encoder=t5(), tokenizer=t5_tokenizer(),
        transformer=alive(transformer), scheduler=flow(use_dynamic_shifting=True),
    )  # fmt: skip
    return saved(pipeline, folder)


def _hunyuan_transformer(**settings: Any) -> Any:
    torch.manual_seed(4)
    usual = {"in_channels": 4, "out_channels": 4, "text_embed_dim": WIDTH}
    return alive(
        diffusers.HunyuanVideoTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, num_layers=1, num_single_layers=1,
            num_refiner_layers=1, pooled_projection_dim=WIDTH, rope_axes_dim=(4, 4, 4),
            **(usual | settings),
        )
    )  # fmt: skip


def _hunyuan_vae() -> Any:
    torch.manual_seed(3)
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=False,
    )


def hunyuan_video(folder: Path) -> Path:
    pipeline = diffusers.HunyuanVideoPipeline(
        text_encoder=language_model(3), tokenizer=letters(2048),
        transformer=_hunyuan_transformer(), vae=_hunyuan_vae(), scheduler=flow(shift=7.0),
        text_encoder_2=clip(projection=False, length=77),
        tokenizer_2=clip_tokenizer(folder / "made"),
    )  # fmt: skip
    return saved(pipeline, folder)


_LLAVA = {"crop_start": 103, "image": 5}
"""Positions of the caption and the image in the pipeline's template, with LLaMA's tokenizer."""


def _llava_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per template word: the pipeline hard-codes positions."""
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video as module

    tokenizer = letters(2048)
    marks = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>", "\n\n")
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": list(marks)})
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    template = module.DEFAULT_PROMPT_TEMPLATE["template"]
    before = template.split("{}")[0]
    words = dict.fromkeys(re.findall(r" ?[A-Za-z]+", re.sub(r"<[^>]*>", "", template)))
    tokenizer.add_tokens(sorted(words, key=len, reverse=True))
    ids = tokenizer(before).input_ids
    assert ids.index(tokenizer.convert_tokens_to_ids("<image>")) == _LLAVA["image"]
    assert len(ids) == _LLAVA["crop_start"]
    return tokenizer


def _llava(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    torch.manual_seed(1)
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    seeing = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=48, patch_size=2,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=seeing, text_config=text, pad_token_id=tokenizer.pad_token_id,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=576,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


def hunyuan_video_i2v(folder: Path, kind: str = "token_replace") -> Path:
    """Write a pipeline whose image replaces the first latent frame or is added as channels."""
    replaces = kind == "token_replace"
    tokenizer = _llava_tokenizer()
    transformer = _hunyuan_transformer(
        in_channels=4 if replaces else 9, image_condition_type=kind, guidance_embeds=replaces
    )
    pipeline = diffusers.HunyuanVideoImageToVideoPipeline(
        text_encoder=_llava(tokenizer), tokenizer=tokenizer, transformer=transformer,
        vae=_hunyuan_vae(), scheduler=flow(shift=7.0),
        text_encoder_2=clip(projection=False, length=77),
        tokenizer_2=clip_tokenizer(folder / "made"),
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": 48}, crop_size={"height": 48, "width": 48}
        ),
    )  # fmt: skip
    return saved(pipeline, folder)


def chroma(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.ChromaTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1,
    )  # fmt: skip
    pipeline = diffusers.ChromaPipeline(
        scheduler=flow(), vae=vae(scaling_factor=0.3611, shift_factor=0.1159), text_encoder=t5(),
        tokenizer=t5_tokenizer(), transformer=alive(transformer),
    )  # fmt: skip
    return saved(pipeline, folder)


def aura_flow(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=8, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=WIDTH, caption_projection_dim=16,
        pos_embed_max_size=64,
    )  # fmt: skip
    pipeline = diffusers.AuraFlowPipeline(
        tokenizer=t5_tokenizer(), text_encoder=umt5(), vae=vae(scaling_factor=0.13025),
        transformer=alive(transformer), scheduler=flow(shift=1.73),
    )  # fmt: skip
    return saved(pipeline, folder)


def _pixart(folder: Path, kind: Any) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        cross_attention_dim=16, sample_size=8, patch_size=2, caption_channels=WIDTH,
        use_additional_conditions=False,
    )  # fmt: skip
    pipeline = kind(
        tokenizer=t5_tokenizer(), text_encoder=t5(), vae=vae(scaling_factor=0.13025),
        scheduler=diffusers.DPMSolverMultistepScheduler(), transformer=alive(transformer),
    )  # fmt: skip
    return saved(pipeline, folder)


def pixart_alpha(folder: Path) -> Path:
    return _pixart(folder, diffusers.PixArtAlphaPipeline)


def pixart_sigma(folder: Path) -> Path:
    return _pixart(folder, diffusers.PixArtSigmaPipeline)


def krea2(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, timestep_embed_dim=16, text_hidden_dim=WIDTH,
        num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=2,
        text_intermediate_size=24, num_layerwise_text_blocks=1, num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    pipeline = diffusers.Krea2Pipeline(
        scheduler=flow(use_dynamic_shifting=True), vae=_video_vae(diffusers.AutoencoderKLQwenImage),
        text_encoder=vision_language_model(), tokenizer=letters(2048),
        transformer=alive(transformer), text_encoder_select_layers=(1, 2),
    )  # fmt: skip
    return saved(pipeline, folder)


def hidream(folder: Path) -> Path:
    torch.manual_seed(4)
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1,
        attention_head_dim=8, num_attention_heads=2, caption_channels=[WIDTH, WIDTH],
        text_emb_dim=2 * WIDTH, num_routed_experts=2, num_activated_experts=1,
        axes_dims_rope=(4, 2, 2), max_resolution=(16, 16), llama_layers=[0, 1],
    )  # fmt: skip
    made = folder / "made"
    llama = language_model()
    llama.config._attn_implementation = "eager"
    pipeline = diffusers.HiDreamImagePipeline(
        scheduler=flow(shift=3.0), vae=vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=clip(projection=True, length=128), tokenizer=clip_tokenizer(made),
        text_encoder_2=clip(projection=True, length=128), tokenizer_2=clip_tokenizer(made),
        text_encoder_3=t5(), tokenizer_3=t5_tokenizer(), text_encoder_4=llama,
        tokenizer_4=letters(), transformer=alive(transformer),
    )  # fmt: skip
    return saved(pipeline, folder)


def flux_kontext(folder: Path) -> Path:
    pipeline = diffusers.FluxKontextPipeline(
        scheduler=flow(use_dynamic_shifting=True), text_encoder=clip(projection=False),
        vae=vae(scaling_factor=0.3611, shift_factor=0.1159),
        tokenizer=clip_tokenizer(folder / "made"), text_encoder_2=t5(), tokenizer_2=t5_tokenizer(),
        transformer=flux_transformer(),
    )  # fmt: skip
    return saved(pipeline, folder)


def _processor() -> Any:
    """Return a processor of texts and images, which makes images tiny."""
    without_videos()
    tokenizer = letters(4096)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SEEN)})
    images = Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    )
    return Qwen2VLProcessor(image_processor=images, tokenizer=tokenizer, video_processor=None)


def _seeing_language_model(tokenizer: Any) -> Any:
    torch.manual_seed(1)
    numbers = dict(zip(_SEEN, tokenizer.convert_tokens_to_ids(list(_SEEN)), strict=True))
    text = {
        "vocab_size": 264, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0,
        },
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": WIDTH, "patch_size": 14, "spatial_merge_size": 2, "window_size": 56,
        "temporal_patch_size": 2, "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=numbers["<|image_pad|>"],
        video_token_id=numbers["<|video_pad|>"], vision_end_token_id=numbers["<|vision_end|>"],
        vision_start_token_id=numbers["<|vision_start|>"],
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen_image_edit(folder: Path, kind: Any) -> Path:
    processor = _processor()
    pipeline = kind(
        vae=_video_vae(diffusers.AutoencoderKLQwenImage), transformer=_qwen_transformer(),
        text_encoder=_seeing_language_model(processor.tokenizer), processor=processor,
        tokenizer=processor.tokenizer, scheduler=flow(use_dynamic_shifting=True),
    )  # fmt: skip
    return saved(pipeline, folder)


def qwen_image_edit(folder: Path) -> Path:
    return _qwen_image_edit(folder, diffusers.QwenImageEditPipeline)


def qwen_image_edit_plus(folder: Path) -> Path:
    return _qwen_image_edit(folder, diffusers.QwenImageEditPlusPipeline)


def cogview4(folder: Path) -> Path:
    """Write CogView4, which pads texts to the batch's longest, on the left and without a mask."""
    torch.manual_seed(1)
    config = GlmConfig(
        vocab_size=260, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
        pad_token_id=0,
    )  # fmt: skip
    encoder = GlmModel(config)
    torch.manual_seed(4)
    transformer = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, text_embed_dim=WIDTH, time_embed_dim=8, condition_dim=4,
        pos_embed_max_size=8, sample_size=8, rope_axes_dim=(8, 8),
    )  # fmt: skip
    tokenizer = letters(2048)
    # Like GLM's tokenizer, begin every text with a special token.
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 1)]
    )
    pipeline = diffusers.CogView4Pipeline(
        tokenizer=tokenizer, text_encoder=encoder, vae=_eightfold(scaling_factor=0.36),
        transformer=alive(transformer),
        scheduler=flow(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75),
    )  # fmt: skip
    return saved(pipeline, folder)


def ovis_image(folder: Path) -> Path:
    """Write a pipeline without a built-in family; docs/families.md declares one."""
    torch.manual_seed(4)
    transformer = diffusers.OvisImageTransformer2DModel(
        in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    pipeline = diffusers.OvisImagePipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae(scaling_factor=0.3611, shift_factor=0.1159), text_encoder=language_model(),
        tokenizer=letters(), transformer=alive(transformer),
    )  # fmt: skip
    return saved(pipeline, folder)


MAKERS = {
    "qwen-image": qwen_image,
    "qwen-image-edit": qwen_image_edit,
    "qwen-image-edit-plus": qwen_image_edit_plus,
    "z-image": z_image,
    "flux2": flux2,
    "flux2-klein": flux2_klein,
    "wan": wan,
    "wan22": wan22,
    "sana": sana,
    "lumina2": lumina2,
    "ltx": ltx,
    "hunyuan-video": hunyuan_video,
    "chroma": chroma,
    "aura-flow": aura_flow,
    "pixart-alpha": pixart_alpha,
    "pixart-sigma": pixart_sigma,
    "krea2": krea2,
    "hidream": hidream,
    "flux-kontext": flux_kontext,
}
EXPERTS = {"wan22-low": wan22}
"""Pipelines whose tests train a named model instead of the default one."""
