"""Pipelines with random weights: real classes and real sizes, written shard by shard."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tools.families import CONFIGURATIONS

SEED: Final = 0
SHARD_BYTES: Final = 2**30
_STEM: Final = "diffusion_pytorch_model"
_COMMON: Final = {
    "unet": ["diffusers", "UNet2DConditionModel"],
    "scheduler": ["diffusers", "DDPMScheduler"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
}
_PIPELINES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "sd15": (
        "StableDiffusionPipeline",
        _COMMON | {"safety_checker": [None, None], "feature_extractor": [None, None]},
    ),
    "sdxl": (
        "StableDiffusionXLPipeline",
        _COMMON
        | {
            "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
            "tokenizer_2": ["transformers", "CLIPTokenizer"],
        },
    ),
}


def configuration(model: str, scale: float) -> dict[str, Any]:
    """Return the U-Net's published configuration, with widths and depths times ``scale``."""
    config = dict(CONFIGURATIONS[model][0])
    if scale == 1:
        return config
    channels = config.get("block_out_channels", [320, 640, 1280, 1280])
    config["block_out_channels"] = [max(32, int(scale * width) // 32 * 32) for width in channels]
    texts = max(64, int(scale * config["cross_attention_dim"]) // 64 * 64)
    config |= {"cross_attention_dim": texts, "attention_head_dim": 8}
    if model == "sdxl":
        depths = config["transformer_layers_per_block"]
        sizes = 6 * config["addition_time_embed_dim"]
        config["transformer_layers_per_block"] = [math.ceil(scale * depth) for depth in depths]
        config["projection_class_embeddings_input_dim"] = sizes + texts
    return config


def empty_model(config: Mapping[str, Any]) -> torch.nn.Module:
    """Return a diffusers model on the ``meta`` device."""
    import diffusers

    with torch.device("meta"):
        made: torch.nn.Module = getattr(diffusers, config["_class_name"]).from_config(dict(config))
    return made


def write_pipeline(folder: Path, model: str, config: Mapping[str, Any]) -> Iterator[int]:
    """Write what training from caches reads: the fp16 U-Net, the scheduler and configurations.

    At most one shard is in memory.

    Yields:
        The bytes written so far, after each shard.
    """
    import diffusers

    unet = folder / "unet"
    unet.mkdir(parents=True)
    empty = empty_model(config)
    _write(unet / "config.json", {**config, **dict(empty.config)})
    diffusers.DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
    ).save_pretrained(folder / "scheduler")
    # Of the VAE, training from caches reads only the configuration.
    with torch.device("meta"):
        vae = diffusers.AutoencoderKL(sample_size=512, block_out_channels=(128, 256, 512, 512),
                                      down_block_types=("DownEncoderBlock2D",) * 4,
                                      up_block_types=("UpDecoderBlock2D",) * 4)  # fmt: skip
    vae.save_config(folder / "vae")
    kind, parts = _PIPELINES[model]
    version = diffusers.__version__
    _write(
        folder / "model_index.json", {"_class_name": kind, "_diffusers_version": version, **parts}
    )
    yield from _write_shards(unet, empty)


def _write_shards(folder: Path, empty: torch.nn.Module) -> Iterator[int]:
    generator = torch.Generator().manual_seed(SEED)
    plans = list(_shards(empty.state_dict()))
    places: dict[str, str] = {}
    written = 0
    for number, names in enumerate(plans, start=1):
        name = f"{_STEM}-{number:05}-of-{len(plans):05}.safetensors"
        shard = {
            key: _random(key, shape, generator).to(torch.float16) for key, shape in names.items()
        }
        save_file(shard, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
        written += sum(tensor.nbytes for tensor in shard.values())
        yield written
    index = {"metadata": {"total_size": written}, "weight_map": places}
    _write(folder / f"{_STEM}.safetensors.index.json", index)


def _shards(state: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Size]]:
    shard: dict[str, torch.Size] = {}
    size = 0
    for name, tensor in state.items():
        if size + 2 * tensor.numel() > SHARD_BYTES and shard:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.shape
        size += 2 * tensor.numel()
    yield shard


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(shape) > 1:
        return torch.empty(shape).normal_(std=0.02, generator=generator)
    return torch.full(shape, 1.0 if name.endswith("weight") else 0.0)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, default=list), encoding="utf-8")


@attrs.frozen
class Tensors:
    """Names, shapes and finiteness of the tensors in a folder's safetensors files."""

    shapes: Mapping[str, tuple[int, ...]]
    not_finite: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Tensors:
        """Read every tensor, one at a time."""
        shapes: dict[str, tuple[int, ...]] = {}
        broken = []
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - ``safe_open`` does not iterate
                    tensor = file.get_tensor(name)
                    shapes[name] = tuple(tensor.shape)
                    if not bool(torch.isfinite(tensor).all()):
                        broken.append(name)
        return cls(shapes, tuple(broken))
