"""The single-file recipe on photographs: it stops, resumes, and diffusers loads its file."""

from __future__ import annotations

import importlib
import importlib.resources

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from safetensors.torch import load_file

from tests.examples.recipes.starting import photographs
from tests.support import single_files
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, start
from zerotune.checkpoint import export_pipeline
from zerotune.diffusion import load_pretrained

PHOTOS = {"astronaut": "an astronaut", "chelsea": "a cat", "coffee": "a cup of coffee"}
SMALL = ["--area", "256", "--bucket-step", "4", "--batch", "1", "--every", "2", "--lr", "1e-3"]


@pytest.fixture
def data(tmp_path):
    return photographs(tmp_path / "photos", PHOTOS)


def in_one_file(folder, file):
    """Write the single file that the recipe starts from."""
    engine = start(PLAIN, load_pretrained(folder, parts=False).model)
    export_pipeline(file, engine=engine, base=folder)
    engine.close()


def run(starts):
    torch.set_num_threads(1)
    main = importlib.import_module("examples.recipes.single_file").main
    return [main(arguments) for arguments in starts]


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("stage", "world_size"),
    [("3", 1), *(pytest.param(s, 2, marks=pytest.mark.nightly) for s in "23")],
)
def test_a_resumed_run_equals_an_uninterrupted_one(stage, world_size, data, tmp_path):
    folder, base = single_files.sdxl(tmp_path / "sdxl"), tmp_path / "base.safetensors"
    run_ranks(in_one_file, folder, base)
    common = ["--base", str(base), "--config", str(folder), "--data", str(data), *SMALL]
    common += ["--stage", stage]
    stopped, whole = ([*common, "--output", str(tmp_path / name)] for name in ("stopped", "whole"))
    starts = [[*stopped, "--steps", "2"], [*stopped, "--steps", "4"], [*whole, "--steps", "4"]]
    before, after, at_once = run_ranks(run, starts, world_size=world_size)[0]
    assert before + after == at_once
    files = [tmp_path / name / "model.safetensors" for name in ("stopped", "whole")]
    ours, theirs, first = (load_file(file) for file in (*files, base))
    assert ours.keys() == theirs.keys() == first.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    read = StableDiffusionXLPipeline.from_single_file(
        str(files[0]), config=str(folder), local_files_only=True
    )
    start_of = StableDiffusionXLPipeline.from_pretrained(folder)
    bias = ours["model.diffusion_model.out.2.bias"]
    assert bias.dtype == torch.float16
    assert torch.equal(read.unet.conv_out.bias, bias.float())
    assert not torch.equal(read.unet.conv_out.bias, start_of.unet.conv_out.bias)
    assert torch.equal(read.vae.decoder.conv_in.weight, start_of.vae.decoder.conv_in.weight)
    read.set_progress_bar_config(disable=True)
    assert read("a cat", num_inference_steps=1, height=16, width=16).images[0].size == (16, 16)
