"""The ControlNet recipe on photographs and edges: it stops, resumes, and diffusers loads it."""

from __future__ import annotations

import importlib
import importlib.resources

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline
from PIL import Image
from safetensors.torch import load_file
from skimage.feature import canny

from tests.support import pipelines
from tests.support.ranks import run_ranks

PHOTOS = {"astronaut": "an astronaut", "chelsea": "a cat", "coffee": "a cup of coffee"}
SMALL = ["--area", "256", "--bucket-step", "4", "--batch", "1", "--draw-steps", "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write photographs with captions, and their edges under the same names in another folder."""
    folder, edges = tmp_path_factory.mktemp("photos"), tmp_path_factory.mktemp("edges")
    shipped = importlib.resources.files("skimage") / "data"
    for name, caption in PHOTOS.items():
        (folder / f"{name}.png").write_bytes((shipped / f"{name}.png").read_bytes())
        (folder / f"{name}.txt").write_text(caption)
        with Image.open(folder / f"{name}.png") as photo:
            found = canny(np.asarray(photo.convert("L")) / 255, sigma=2)
        Image.fromarray(found.astype(np.uint8) * 255).save(edges / f"{name}.png")
    return ["--data", str(folder), "--conditions", str(edges)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return pipelines.sdxl(tmp_path_factory.mktemp("sdxl"))


def run(starts: list[list[str]]) -> list[list[float]]:
    torch.set_num_threads(1)
    main = importlib.import_module("examples.recipes.controlnet").main
    return [main(arguments) for arguments in starts]


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("stage", "world_size"),
    [("2", 2), *(pytest.param("3", n, marks=pytest.mark.nightly) for n in (1, 2))],
)
def test_a_resumed_run_equals_an_uninterrupted_one(stage, world_size, data, base, tmp_path):
    common = ["--base", str(base), *data, *SMALL, "--stage", stage, "--every", "2", "--lr", "1e-3"]
    stopped, whole = ([*common, "--output", str(tmp_path / name)] for name in ("stopped", "whole"))
    starts = [[*whole, "--steps", "4"], [*stopped, "--steps", "2"], [*stopped, "--steps", "4"]]
    at_once, before, after = run_ranks(run, starts, world_size=world_size)[0]
    assert before + after == at_once
    files = [tmp_path / name / "controlnet" for name in ("stopped", "whole")]
    ours, theirs = (load_file(f / "diffusion_pytorch_model.safetensors") for f in files)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # These weights start at zero, and the EMA has followed them for four steps.
    assert ours["controlnet_mid_block.weight"].abs().max() > 0

    controlnet = ControlNetModel.from_pretrained(files[0])
    assert all(torch.equal(ours[name], tensor) for name, tensor in controlnet.state_dict().items())
    pipeline = StableDiffusionXLControlNetPipeline.from_pretrained(base, controlnet=controlnet)
    pipeline.set_progress_bar_config(disable=True)
    edges = Image.new("RGB", (16, 16), "white")
    drawn = pipeline("a cat", image=edges, num_inference_steps=1, height=16, width=16).images[0]
    assert drawn.size == (16, 16)
    assert len(list((tmp_path / "whole" / "validation").glob("*.png"))) == 3
