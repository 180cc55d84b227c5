"""Write the shapes and activation costs of known model families into the package.

``python -m tools.families [NAME …]``; takes about two minutes per family. The configurations
are those published with the models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs

from zerotune.diffusion.facts import configuration_digest, count_facts
from zerotune.plan.families import facts_to_json

TARGET = Path("src/zerotune/plan/families")

SD15: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 64,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
SD21 = SD15 | {
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
SDXL: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 128,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}
SD3: dict[str, Any] = {
    "_class_name": "SD3Transformer2DModel",
    "sample_size": 128,
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "out_channels": 16,
    "pos_embed_max_size": 192,
}
SD35_MEDIUM = SD3 | {
    "dual_attention_layers": list(range(13)),
    "qk_norm": "rms_norm",
    "pos_embed_max_size": 384,
}
SD35_LARGE = SD3 | {
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "qk_norm": "rms_norm",
}
FLUX: dict[str, Any] = {
    "_class_name": "FluxTransformer2DModel",
    "guidance_embeds": True,
}

# Those published are the defaults of diffusers' classes.
QWEN_IMAGE: dict[str, Any] = {"_class_name": "QwenImageTransformer2DModel"}
Z_IMAGE: dict[str, Any] = {"_class_name": "ZImageTransformer2DModel"}
FLUX2: dict[str, Any] = {"_class_name": "Flux2Transformer2DModel"}
FLUX2_KLEIN_4B = FLUX2 | {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
FLUX2_KLEIN_9B = FLUX2 | {
    "num_layers": 8,
    "num_single_layers": 24,
    "num_attention_heads": 32,
    "joint_attention_dim": 12288,
    "guidance_embeds": False,
}
CHROMA: dict[str, Any] = {"_class_name": "ChromaTransformer2DModel"}
KREA2: dict[str, Any] = {"_class_name": "Krea2Transformer2DModel"}
WAN_14B: dict[str, Any] = {"_class_name": "WanTransformer3DModel"}
WAN_1_3B = WAN_14B | {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
LTX_VIDEO: dict[str, Any] = {"_class_name": "LTXVideoTransformer3DModel"}
HUNYUAN_VIDEO: dict[str, Any] = {"_class_name": "HunyuanVideoTransformer3DModel"}

CONFIGURATIONS = {
    "sd15": (SD15, 512),
    "sd21": (SD21, 768),
    "sdxl": (SDXL, 1024),
    "sd3-medium": (SD3, 1024),
    "sd35-medium": (SD35_MEDIUM, 1024),
    "sd35-large": (SD35_LARGE, 1024),
    "flux": (FLUX, 1024),
    "qwen-image": (QWEN_IMAGE, 1024),
    "z-image": (Z_IMAGE, 1024),
    "flux2": (FLUX2, 1024),
    "flux2-klein-4b": (FLUX2_KLEIN_4B, 1024),
    "flux2-klein-9b": (FLUX2_KLEIN_9B, 1024),
    "chroma": (CHROMA, 1024),
    "krea2": (KREA2, 1024),
    "wan-1.3b": (WAN_1_3B, 640),
    "wan-14b": (WAN_14B, 640),
    "ltx-video": (LTX_VIDEO, 608),
    "hunyuan-video": (HUNYUAN_VIDEO, 960),
}
"""Configuration, and the side in pixels of images; of clips, of a square of their area: 832 x 480,
704 x 512 and 1280 x 720."""

FRAMES = {"wan-1.3b": 81, "wan-14b": 81, "ltx-video": 161, "hunyuan-video": 129}
"""Of those that are made for clips, as many as their pipelines draw."""


def _rounded(value: Any) -> Any:
    """The same with eight digits, which is more than anybody needs."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def main() -> None:
    for name in sys.argv[1:] or CONFIGURATIONS:
        config, resolution = CONFIGURATIONS[name]
        facts = attrs.evolve(count_facts(config), name=name)
        data = _rounded(facts_to_json(facts)) | {
            "class": config["_class_name"],
            "configuration": configuration_digest(config),
            "resolution": resolution,
        }
        if name in FRAMES:
            data["frames"] = FRAMES[name]
        TARGET.mkdir(parents=True, exist_ok=True)
        (TARGET / f"{name}.json").write_text(json.dumps(data, separators=(",", ":")) + "\n")
        print(name, f"{facts.numel:,}", data["activations"], flush=True)


if __name__ == "__main__":
    main()
