"""The preference recipe on photographs and noise: it stops, resumes, and diffusers loads it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image
from safetensors.torch import load_file

from tests.examples.recipes.starting import photographs, started
from tests.support import pipelines
from tests.support.ranks import run_ranks

PHOTOS = {"astronaut": "an astronaut", "chelsea": "a cat", "coffee": "a cup of coffee"}
SMALL = ["--area", "256", "--bucket-step", "4", "--accumulation", "1", "--rank", "2"]
SMALL += ["--every", "2", "--lr", "1e-2"]


@pytest.fixture
def data(tmp_path):
    """Write photographs with captions, and noisy copies of them."""
    random = np.random.default_rng(0)
    preferred = photographs(tmp_path / "pairs" / "preferred", PHOTOS)
    (tmp_path / "pairs" / "rejected").mkdir()
    for name in PHOTOS:
        with Image.open(preferred / f"{name}.png") as image:
            pixels = np.asarray(image.convert("RGB").resize((64, 64)))
        noisy = (pixels // 2 + random.integers(0, 128, pixels.shape)).astype(np.uint8)
        Image.fromarray(noisy).save(tmp_path / "pairs" / "rejected" / f"{name}.png")
    return tmp_path / "pairs"


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("stage", "world_size"),
    [
        ("2", 1),
        pytest.param("2", 2, marks=pytest.mark.nightly),
        pytest.param("3", 1, marks=pytest.mark.nightly),
        pytest.param("3", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(stage, world_size, data, tmp_path):
    base = pipelines.sdxl(tmp_path / "sdxl")
    common = ["--base", str(base), "--data", str(data), *SMALL, "--stage", stage]
    stopped, whole = ([*common, "--output", str(tmp_path / name)] for name in ("stopped", "whole"))
    starts = [[*stopped, "--steps", "2"], [*stopped, "--steps", "4"], [*whole, "--steps", "4"]]
    before, after, at_once = run_ranks(started, "preference", starts, world_size=world_size)[0]
    assert before + after == at_once
    assert at_once[0] == pytest.approx(math.log(2), rel=1e-6), "model and reference begin as one"
    assert max(abs(loss - at_once[0]) for loss in at_once) > 1e-3
    files = [tmp_path / name / "lora.safetensors" for name in ("stopped", "whole")]
    ours, theirs = map(load_file, files)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    pipeline = StableDiffusionXLPipeline.from_pretrained(base)
    pipeline.load_lora_weights(files[0])
    assert "default_0" in pipeline.get_list_adapters()["unet"]
