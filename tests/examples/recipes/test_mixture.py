"""The mixture recipe on photographs: it stops, resumes, and diffusers loads the result."""

from __future__ import annotations

import contextlib
import importlib
import importlib.resources
import io
import re

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from safetensors.torch import load_file

from tests.support import pipelines
from tests.support.ranks import run_ranks

SETS = {"4_zoe": ["astronaut"], "1_people": ["chelsea", "coffee", "rocket"]}
SMALL = ["--areas", "256", "576", "--bucket-step", "4", "--batch", "1"]
SMALL += ["--trigger", "zoe=ohwx, ", "--every", "2", "--lr", "1e-3"]


@pytest.fixture
def data(tmp_path):
    shipped = importlib.resources.files("skimage") / "data"
    for name, photos in SETS.items():
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for photo in photos:
            ending = "jpg" if photo == "rocket" else "png"
            (folder / f"{photo}.{ending}").write_bytes((shipped / f"{photo}.{ending}").read_bytes())
            (folder / f"{photo}.txt").write_text(photo)
    return tmp_path / "photos"


def run(starts):
    torch.set_num_threads(1)
    main = importlib.import_module("examples.recipes.mixture").main
    found = []
    for arguments in starts:
        torch.manual_seed(0)  # Seed new adapters as in a fresh process.
        with contextlib.redirect_stdout(io.StringIO()) as said:
            found.append(main(arguments))
    return found, said.getvalue()


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("stage", "world_size"),
    [("3", 1), *(pytest.param(s, 2, marks=pytest.mark.nightly) for s in "23")],
)
def test_a_resumed_run_equals_an_uninterrupted_one(stage, world_size, data, tmp_path):
    base = pipelines.sdxl(tmp_path / "sdxl")
    common = ["--base", str(base), "--data", str(data), *SMALL, "--stage", stage]
    stopped, whole = ([*common, "--output", str(tmp_path / name)] for name in ("stopped", "whole"))
    starts = [[*stopped, "--steps", "2"], [*stopped, "--steps", "5"], [*whole, "--steps", "5"]]
    ((before, after, at_once), said), *_ = run_ranks(run, starts, world_size=world_size)
    assert before + after == at_once
    assert "zoe at 256 pixels: 1 images, each 4 times per epoch" in said
    used = [int(count) for count in re.findall(r"(\d+) used so far", said)]
    assert len(used) == 4
    assert sum(used) == 5 * world_size
    files = [tmp_path / name / "lora.safetensors" for name in ("stopped", "whole")]
    ours, theirs = map(load_file, files)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    pipeline = StableDiffusionXLPipeline.from_pretrained(base)
    pipeline.load_lora_weights(files[0])
    assert "default_0" in pipeline.get_list_adapters()["unet"]
