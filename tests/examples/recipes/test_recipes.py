"""Each recipe on photographs: it stops and goes on to the bit, and diffusers loads the result."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from diffusers import (
    ControlNetModel,
    DiffusionPipeline,
    EDMEulerScheduler,
    StableDiffusionXLControlNetPipeline,
)
from PIL import Image
from safetensors.torch import load_file
from skimage.feature import canny

from tests.examples.recipes.starting import photographs, started
from tests.support import pipelines
from tests.support.declared_pipelines import hunyuan_video_i2v, wan_i2v
from tests.support.needs import needs
from tests.support.ranks import run_ranks

PHOTOS = {"astronaut": "an astronaut", "chelsea": "a cat", "coffee": "a cup of coffee"}
SMALL = "--area 256 --bucket-step 4 --batch 1 --lr 1e-3"


@attrs.frozen(kw_only=True)
class Ran:
    """Results of a recipe: one run was stopped after two steps and went on, another was not."""

    base: Path
    folder: Path
    losses: list[float]
    said: str
    """Output of the last start."""
    result: Path
    """The export of the run that was not stopped."""


# -- Data. Each function writes them to a folder, and returns the arguments that name them.


def pictures(folder: Path, _base: Path) -> list[str]:
    return ["--data", str(photographs(folder / "photos", PHOTOS))]


def with_edges(folder: Path, base: Path) -> list[str]:
    (folder / "edges").mkdir()
    given = pictures(folder, base)
    for name in PHOTOS:
        with Image.open(folder / "photos" / f"{name}.png") as photo:
            found = canny(np.asarray(photo.convert("L")) / 255, sigma=2)
        Image.fromarray(found.astype(np.uint8) * 255).save(folder / "edges" / f"{name}.png")
    return [*given, "--conditions", str(folder / "edges")]


def with_noisy_copies(folder: Path, _base: Path) -> list[str]:
    preferred = photographs(folder / "pairs" / "preferred", PHOTOS)
    random = np.random.default_rng(0)
    (folder / "pairs" / "rejected").mkdir()
    for name in PHOTOS:
        with Image.open(preferred / f"{name}.png") as photo:
            pixels = np.asarray(photo.convert("RGB").resize((64, 64)))
        noisy = (pixels // 2 + random.integers(0, 128, pixels.shape)).astype(np.uint8)
        Image.fromarray(noisy).save(folder / "pairs" / "rejected" / f"{name}.png")
    return ["--data", str(folder / "pairs")]


def in_sets(folder: Path, _base: Path) -> list[str]:
    for name, photos in {"4_zoe": ("astronaut",), "1_people": ("chelsea", "coffee")}.items():
        photographs(folder / "sets" / name, {photo: PHOTOS[photo] for photo in photos})
    return ["--data", str(folder / "sets")]


def with_priors(folder: Path, _base: Path) -> list[str]:
    one = photographs(folder / "one", {"chelsea": "a photo of sks cat"})
    return ["--data", str(one), "--priors", str(photographs(folder / "cats", PHOTOS))]


def in_a_shard(folder: Path, base: Path) -> list[str]:
    needs("webdataset")
    pictures(folder, base)
    with tarfile.open(folder / "0.tar", "w") as archive:
        for path in sorted((folder / "photos").iterdir()):
            archive.add(path, path.name)
    return ["--data", str(folder / "0.tar")]


def panning_clips(folder: Path, base: Path) -> list[str]:
    photos = photographs(folder / "photos", PHOTOS)
    for name in PHOTOS:
        (folder / "clips" / name).mkdir(parents=True)
        shutil.copy(photos / f"{name}.txt", folder / "clips")
        with Image.open(photos / f"{name}.png") as photo:
            for number in range(5):
                view = photo.convert("RGB").crop((30 * number, 0, 30 * number + 240, 240))
                view.save(folder / "clips" / name / f"{number}.png")
    kind = "wan" if "Wan" in (base / "model_index.json").read_text() else "hunyuan-video"
    return ["--data", str(folder / "clips"), "--family", kind]


# -- Results.


def adapters(ran: Ran) -> Any:
    """Load the adapters, which have learned, and return the pipeline."""
    pipeline = DiffusionPipeline.from_pretrained(ran.base)
    pipeline.load_lora_weights(ran.result)
    component = getattr(pipeline, "unet", None) or pipeline.transformer
    learned = [p for name, p in component.named_parameters() if "lora_B" in name]
    assert any(bool(p.abs().max() > 0) for p in learned)
    return pipeline


def of_text_encoders(ran: Ran) -> None:
    assert {"text_encoder"} < set(adapters(ran).get_list_adapters())


def of_preferences(ran: Ran) -> None:
    adapters(ran)
    assert ran.losses[0] == pytest.approx(0.693147, rel=1e-5), "model and reference begin as one"
    assert max(abs(loss - ran.losses[0]) for loss in ran.losses) > 1e-3


def of_clips(ran: Ran) -> None:
    adapters(ran)
    assert len(list((ran.folder / "validation").iterdir())) == 3


def of_a_controlnet(ran: Ran) -> None:
    controlnet = ControlNetModel.from_pretrained(ran.result)
    # These weights start at zero, and the EMA has followed them for four steps.
    assert controlnet.controlnet_mid_block.weight.abs().max() > 0
    pipeline = StableDiffusionXLControlNetPipeline.from_pretrained(ran.base, controlnet=controlnet)
    pipeline.set_progress_bar_config(disable=True)
    edges = Image.new("RGB", (16, 16), "white")
    drawn = pipeline("a cat", image=edges, num_inference_steps=1, height=16, width=16).images[0]
    assert drawn.size == (16, 16)
    assert len(list((ran.folder / "validation").glob("*.png"))) == 3


def of_a_word(ran: Ran) -> None:
    pipeline = DiffusionPipeline.from_pretrained(ran.base)
    pipeline.set_progress_bar_config(disable=True)
    found = load_file(ran.result)
    parts = {"clip_l": ("text_encoder", "tokenizer"), "clip_g": ("text_encoder_2", "tokenizer_2")}
    for key, vectors in found.items():
        encoder, tokenizer = (getattr(pipeline, each) for each in parts.get(key, parts["clip_l"]))
        words = tokenizer("a", add_special_tokens=False).input_ids
        begun = encoder.get_input_embeddings().weight[words[0]].detach().clone()
        assert vectors.shape == (2, len(begun))
        assert all(not torch.equal(vector, begun) for vector in vectors)
        assert not torch.equal(*vectors)
        pipeline.load_textual_inversion(
            {"zoe": vectors}, token="zoe", text_encoder=encoder, tokenizer=tokenizer
        )
        (number,) = tokenizer("zoe", add_special_tokens=False).input_ids
        assert torch.equal(encoder.get_input_embeddings().weight[number], vectors[0])
    drawn = pipeline("zoe on a wall", num_inference_steps=1, height=16, width=16).images[0]
    assert drawn.size == (16, 16)


@attrs.frozen
class Recipe:
    """Data, further arguments, the name of the export, and the check of a run."""

    data: Callable[[Path, Path], list[str]]
    options: str
    result: str
    check: Callable[[Ran], Any]
    unlike: str = ""
    """Arguments that change every loss."""


LORA = "lora.safetensors"
CLIPS = "--area 256 --bucket-step 8 --frames 5 --fps 24 --rank 2 --lr 1e-2 --draw-steps 2"
PAIRS = "--area 256 --bucket-step 4 --accumulation 1 --rank 2 --lr 1e-2"
SETS = f"{SMALL} --trigger zoe=ohwx"
RECIPES = {
    "controlnet": Recipe(
        with_edges, f"{SMALL} --draw-steps 2 --base-dtype fp32", "controlnet", of_a_controlnet
    ),
    "edm": Recipe(pictures, f"{SMALL} --rank 2", LORA, adapters, "--paper"),
    "image_to_video": Recipe(panning_clips, CLIPS, "adapters", of_clips),
    "losses": Recipe(pictures, f"{SMALL} --rank 2", LORA, adapters, "--loss squared"),
    "mixture": Recipe(in_sets, SETS, LORA, adapters),
    "preference": Recipe(with_noisy_copies, PAIRS, LORA, of_preferences),
    "prior_preservation": Recipe(with_priors, "--side 16 --rank 2 --lr 1e-2", LORA, adapters),
    "streamed": Recipe(in_a_shard, "--area 256 --bucket-step 4 --rank 2", LORA, adapters),
    "textual_inversion": Recipe(
        pictures,
        "--area 256 --bucket-step 4 --lr 1e-2 --word zoe --like a --vectors 2",
        "learned.safetensors",
        of_a_word,
    ),
    "text_encoder": Recipe(
        pictures, f"{SMALL} --trigger ohwx --text-lr 1e-3 --text-steps 3", LORA, of_text_encoders
    ),
}


def edm(folder: Path) -> Path:
    made = pipelines.sdxl(folder)
    EDMEulerScheduler().save_pretrained(made / "scheduler")
    return made


MAKERS = pipelines.MAKERS | {
    "edm sdxl": edm,
    "wan_i2v": wan_i2v,
    "hunyuan_i2v": hunyuan_video_i2v,
}
RUNS = [
    ("text_encoder", "sdxl", "2", 1),
    ("text_encoder", "flux", "3", 1),
    ("textual_inversion", "sd15", "0", 1),
    ("textual_inversion", "sdxl", "2", 2),
    ("controlnet", "sdxl", "2", 2),
    ("controlnet", "sdxl", "3", 1),
    ("edm", "edm sdxl", "2", 1),
    ("image_to_video", "wan_i2v", "2", 1),
    ("image_to_video", "hunyuan_i2v", "3", 2),
    ("losses", "sdxl", "2", 1),
    ("losses", "flux", "3", 2),
    ("mixture", "sdxl", "3", 1),
    ("mixture", "sdxl", "2", 2),
    ("preference", "sdxl", "2", 1),
    ("preference", "sdxl", "3", 2),
    ("prior_preservation", "sdxl", "2", 1),
    ("prior_preservation", "sdxl", "2", 2),
    ("streamed", "sdxl", "2", 1),
    ("streamed", "sdxl", "2", 2),
]


# diffusers adds zeros for CLIP's projections, of which peft warns.
@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters:RuntimeWarning")
@pytest.mark.deepspeed
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "model", "stage", "world_size"), RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one(name, model, stage, world_size, tmp_path):
    recipe, base = RECIPES[name], MAKERS[model](tmp_path / "base")
    common = ["--base", str(base), *recipe.data(tmp_path, base), *recipe.options.split()]
    common += ["--stage", stage, "--every", "2"]
    stopped, whole = ([*common, "--output", str(tmp_path / kind)] for kind in ("stopped", "whole"))
    starts = [[*stopped, "--steps", "2"], [*stopped, "--steps", "4"], [*whole, "--steps", "4"]]
    if recipe.unlike:
        other = ["--output", str(tmp_path / "other"), "--steps", "2", *recipe.unlike.split()]
        starts.append([*common, *other])
    (before, after, at_once, *others), said = run_ranks(
        started, name, starts, world_size=world_size
    )[0]
    assert before + after == at_once
    assert all(set(other).isdisjoint(before) for other in others)
    folder = tmp_path / "whole"
    for file in (folder / recipe.result, *(folder / recipe.result).rglob("*")):
        if file.suffix == ".safetensors":
            ours = load_file(tmp_path / "stopped" / file.relative_to(folder))
            theirs = load_file(file)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    recipe.check(
        Ran(base=base, folder=folder, losses=at_once, said=said, result=folder / recipe.result)
    )
