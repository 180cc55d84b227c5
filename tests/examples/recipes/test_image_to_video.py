"""The image-to-video recipe on clips that pan over photographs."""

from __future__ import annotations

import importlib
import importlib.resources
import itertools

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.support.declared_pipelines import hunyuan_video_i2v, wan_i2v
from tests.support.ranks import run_ranks

SMALL = [
    "--area",
    "256",
    "--bucket-step",
    "8",
    "--frames",
    "5",
    "--fps",
    "24",
    "--rank",
    "2",
    "--lr",
    "1e-2",
]
SMALL += ["--draw-steps", "2", "--every", "2"]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Write clips that pan to the right, each with a caption."""
    folder = tmp_path_factory.mktemp("clips")
    shipped = importlib.resources.files("skimage") / "data"
    for name, caption in {"chelsea": "a cat", "coffee": "a cup of coffee"}.items():
        (folder / f"{name}.txt").write_text(caption)
        (folder / name).mkdir()
        with Image.open(shipped / f"{name}.png") as photo:
            for number in range(5):
                left = 30 * number
                view = photo.convert("RGB").crop((left, 0, left + 240, 240))
                view.save(folder / name / f"{number}.png")
    return str(folder)


def run(starts: list[list[str]]) -> list[list[float]]:
    torch.set_num_threads(1)
    main = importlib.import_module("examples.recipes.image_to_video").main
    found = []
    for arguments in starts:
        torch.manual_seed(0)  # Adapters are initialised at random.
        found.append(main(arguments))
    return found


# diffusers adds zeros for CLIP's projections, of which peft warns.
@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters:RuntimeWarning")
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("make", "stage", "world_size"),
    [(wan_i2v, "2", 1), (hunyuan_video_i2v, "3", 2)]
    + [
        pytest.param(make, stage, n, marks=pytest.mark.nightly)
        for make, stage, n in itertools.product((wan_i2v, hunyuan_video_i2v), "23", (1, 2))
        if (make, stage, n) not in ((wan_i2v, "2", 1), (hunyuan_video_i2v, "3", 2))
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(make, stage, world_size, clips, tmp_path):
    base = make(tmp_path / "base")
    common = ["--base", str(base), "--data", clips, *SMALL, "--stage", stage]
    stopped, whole = ([*common, "--output", str(tmp_path / name)] for name in ("stopped", "whole"))
    starts = [[*whole, "--steps", "4"], [*stopped, "--steps", "2"], [*stopped, "--steps", "4"]]
    at_once, before, after = run_ranks(run, starts, world_size=world_size)[0]
    assert before + after == at_once
    (file,) = (tmp_path / "stopped" / "adapters").glob("*.safetensors")
    adapters = load_file(file)
    assert all(bool(t.abs().max() > 0) for name, t in adapters.items() if "lora_B" in name)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(base)
    pipeline.load_lora_weights(tmp_path / "stopped" / "adapters")
    loaded = dict(pipeline.transformer.named_parameters())
    assert any("lora_B" in name and bool(each.abs().max() > 0) for name, each in loaded.items())
    assert len(list((tmp_path / "whole" / "validation").iterdir())) == 3
