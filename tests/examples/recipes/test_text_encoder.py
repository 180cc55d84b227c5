"""The text-encoder recipe on photographs: it stops, resumes, and diffusers loads the result."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers import DiffusionPipeline

from tests.examples.recipes.starting import photographs, started
from tests.support import pipelines
from tests.support.ranks import run_ranks

PHOTOS = ("astronaut", "chelsea", "coffee")
SMALL = ["--area", "256", "--bucket-step", "4", "--batch", "1", "--trigger", "ohwx, "]
SMALL += ["--every", "2", "--lr", "1e-3", "--text-lr", "1e-3", "--text-steps", "3"]


@pytest.fixture
def data(tmp_path: Any) -> Any:
    return photographs(tmp_path / "photos", {photo: photo for photo in PHOTOS})


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("model", "extra", "world_size"),
    [
        ("sdxl", [], 1),
        pytest.param("sd15", ["--all"], 2, marks=pytest.mark.nightly),
        pytest.param("flux", ["--stage", "3"], 1, marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(model, extra, world_size, data, tmp_path):
    base = pipelines.MAKERS[model](tmp_path / model)
    common = ["--base", str(base), "--data", str(data), *SMALL, *extra]
    stopped, whole = ([*common, "--output", str(tmp_path / name)] for name in ("stopped", "whole"))
    starts = [[*stopped, "--steps", "2"], [*stopped, "--steps", "5"], [*whole, "--steps", "5"]]
    before, after, at_once = run_ranks(started, "text_encoder", starts, world_size=world_size)[0]
    assert before + after == at_once
    if "--all" in extra:
        DiffusionPipeline.from_pretrained(tmp_path / "whole" / "pipeline")
        return
    files = [tmp_path / name / "lora.safetensors" for name in ("stopped", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
    pipeline = DiffusionPipeline.from_pretrained(base)
    pipeline.load_lora_weights(files[0])
    assert {"text_encoder"} < set(pipeline.get_list_adapters())
