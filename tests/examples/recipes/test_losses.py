"""The losses recipe on photographs: it stops, resumes, and differs from the default loss."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers import DiffusionPipeline

from tests.examples.recipes.starting import photographs, started
from tests.support import pipelines
from tests.support.ranks import run_ranks

PHOTOS = ("astronaut", "chelsea", "coffee")
SMALL = ["--area", "256", "--bucket-step", "4", "--batch", "1", "--every", "2", "--lr", "1e-3"]


@pytest.fixture
def data(tmp_path: Any) -> Any:
    return photographs(tmp_path / "photos", {photo: photo for photo in PHOTOS})


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("model", "stage", "world_size"),
    [
        ("sdxl", "2", 1),
        pytest.param("flux", "3", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(model, stage, world_size, data, tmp_path):
    base = pipelines.MAKERS[model](tmp_path / model)
    common = ["--base", str(base), "--data", str(data), *SMALL, "--rank", "2", "--stage", stage]
    stopped, whole, usual = (
        [*common, "--output", str(tmp_path / name)] for name in ("stopped", "whole", "usual")
    )
    starts = [[*stopped, "--steps", "2"], [*stopped, "--steps", "4"], [*whole, "--steps", "4"]]
    starts.append([*usual, "--steps", "2", "--loss", "squared"])
    before, after, at_once, squared = run_ranks(started, "losses", starts, world_size=world_size)[0]
    assert before + after == at_once
    assert set(squared).isdisjoint(before)
    files = [tmp_path / name / "lora.safetensors" for name in ("stopped", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
    pipeline = DiffusionPipeline.from_pretrained(base)
    pipeline.load_lora_weights(files[0])
