"""Pipelines that are exported as single files, and diffusers' own loader for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from tests.support import pipelines
from zerotune.checkpoint import export_pipeline

PUBLISHED_WIDTH = 3072
COMPONENTS = {
    "sd15": "unet", "sd21": "unet", "sdxl": "unet", "sd3": "transformer", "flux": "transformer",
}  # fmt: skip
WHOLE = ("sd15", "sd21", "sdxl")
"""Pipelines whose single file contains the text encoders too."""


def open_clip(kind: Any, width: int) -> Any:
    """Return OpenCLIP's text encoder; its width distinguishes it from SDXL's first text encoder."""
    torch.manual_seed(5)
    config = CLIPTextConfig(
        vocab_size=54, hidden_size=width, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, projection_dim=width,
        bos_token_id=0, eos_token_id=1, pad_token_id=1, hidden_act="gelu",
    )  # fmt: skip
    return kind(config)


def sd21(folder: Path) -> Path:
    made = pipelines.sd15(folder / "first")
    encoder = open_clip(CLIPTextModel, pipelines.WIDTH)
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(
        made, text_encoder=encoder, safety_checker=None, feature_extractor=None
    )
    return pipelines.saved(pipe, folder / "second")


def sdxl(folder: Path) -> Path:
    made = pipelines.sdxl(folder / "narrow")
    second = open_clip(CLIPTextModelWithProjection, 48)
    unet = pipelines.unet(
        cross_attention_dim=pipelines.WIDTH + 48, addition_embed_type="text_time",
        addition_time_embed_dim=8, transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=48 + 6 * 8, use_linear_projection=True,
    )  # fmt: skip
    pipe = diffusers.StableDiffusionXLPipeline.from_pretrained(
        made, text_encoder_2=second, unet=unet
    )
    return pipelines.saved(pipe, folder / "wide")


MAKERS = {**pipelines.MAKERS, "sd21": sd21, "sdxl": sdxl}


def narrow_flux(monkeypatch: Any, width: int = 32) -> None:
    """Patch diffusers' converter, which hard-codes the published width, for a tiny model."""
    from diffusers.loaders import single_file_utils as theirs

    convert = theirs.convert_flux_transformer_checkpoint_to_diffusers
    code = convert.__code__
    constants = tuple(width if each == PUBLISHED_WIDTH else each for each in code.co_consts)
    assert constants != code.co_consts
    monkeypatch.setattr(convert, "__code__", code.replace(co_consts=constants))


def reloaded(kind: str, file: Path, folder: Path) -> Any:
    """Load a pipeline with plain diffusers; components missing in the file are the folder's."""
    made = {
        "sd15": diffusers.StableDiffusionPipeline,
        "sd21": diffusers.StableDiffusionPipeline,
        "sdxl": diffusers.StableDiffusionXLPipeline,
        "sd3": diffusers.StableDiffusion3Pipeline,
        "flux": diffusers.FluxPipeline,
    }[kind]
    absent = dict.fromkeys(
        name
        for name, entry in json.loads((folder / "model_index.json").read_text()).items()
        if entry == [None, None]
    )
    given: dict[str, Any] = {}
    if kind not in WHOLE:
        pipe = made.from_pretrained(folder, transformer=None, **absent)
        lacking = ("text_encoder", "text_encoder_2") + (("vae",) if kind == "flux" else ())
        given = {name: getattr(pipe, name) for name in lacking}
    return made.from_single_file(
        str(file), config=str(folder), local_files_only=True, **given, **absent
    )


def original(kind: str, folder: Path) -> Any:
    """Load the pipeline in the folder."""
    absent = {"text_encoder_3": None, "tokenizer_3": None} if kind == "sd3" else {}
    if kind == "sd3":
        absent |= {"image_encoder": None, "feature_extractor": None}
    return diffusers.DiffusionPipeline.from_pretrained(folder, **absent)


def in_one_file(engine: Any, folder: Path, file: Path) -> Path:
    """Write an engine's pipeline as a single file, by the recipe."""
    from examples.recipes.one_file import main

    whole = file.with_name(f"{file.stem}-folder")
    export_pipeline(whole, engine=engine, base=folder)
    if engine.group.is_main:
        main([str(whole), str(file)])
    engine.group.barrier("the file is there")
    return file
