"""Scripts of diffusers with the changes that the page on embedding shows."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from tests.examples.of_diffusers import (
    CHANGES,
    changed,
    embedded,
    original,
    photos,
    run_of_diffusers,
    weights_of,
)
from tests.support import pipelines
from tests.support.needs import needs
from tests.support.ranks import run_ranks
from zerotune.checkpoint.folders import verify_checkpoint

SDXL, FLUX = "train_text_to_image_sdxl", "train_dreambooth_lora_flux"
PAGE = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()
HOST = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}


def changed_lines(difference: str) -> int:
    """Count the lines changed, added or removed; a replaced line counts once."""
    lines = [line for line in difference.splitlines() if not line.startswith(("---", "+++"))]
    count = 0
    for touched, run in groupby(lines, lambda line: line[:1] in "+-" and line[:1] != ""):
        signs = [line[0] for line in run] if touched else []
        count += max(signs.count("+"), signs.count("-"))
    return count


@pytest.mark.parametrize(("name", "most"), [(SDXL, 15), (FLUX, 10)])
def test_embedding_a_plan_changes_few_lines_of_the_diffusers_scripts(name, most):
    """The changes are the same at stages 2 and 3, and as many as the page says."""
    count = changed_lines((CHANGES / f"{name}.diff").read_text())
    assert count <= most
    assert f"| `{name}.py` | {count} |" in PAGE
    assert changed_lines("--- a\n+++ b\n x\n-one\n+two\n+three\n x\n-four\n") == 3


def plan(zero: dict) -> dict:
    """Return the page's plan with another ``zero_optimization``."""
    (given,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    return json.loads(given) | {"zero_optimization": zero}


def flags(base: Path, output: Path, steps: int, *more: str) -> list[str]:
    cache = output.parent / f"cache-{output.name}-{steps}"
    return [
        *("--pretrained_model_name_or_path", str(base), "--output_dir", str(output)),
        *("--resolution", "16", "--train_batch_size", "1", "--max_train_steps", str(steps)),
        *("--gradient_accumulation_steps", "2", "--learning_rate", "1e-3", "--seed", "3"),
        # No warm-up: the scripts count its steps differently from the plan.
        *("--lr_scheduler", "constant_with_warmup", "--lr_warmup_steps", "0"),
        *("--checkpointing_steps", "3", "--mixed_precision", "no"),
        *("--cache_dir", str(cache), *more),
    ]


def stopped_and_resumed(base: Path, output: Path, *more: str) -> list[tuple[list[str], dict]]:
    """Return flags and plans for three steps at stage 2, and two more at stage 3."""
    resume = ("--resume_from_checkpoint", "latest")
    return [
        (flags(base, output, 3, *more), plan(HOST)),
        (flags(base, output, 5, *more, *resume), plan(SHARDED)),
    ]


def trained(name: str, folder: Path, base: Path, *more: str) -> dict[str, list[float]]:
    """Return the losses of the original script, and of the changed one, stopped and resumed."""
    losses = {}
    for kind in ("before", "after"):
        place, output = folder / kind, folder / f"{kind}-output"
        place.mkdir()
        script = changed(name, place) if kind == "after" else original(name, place)
        # No checkpoint: saving in the original script draws random numbers to build a model.
        whole = flags(base, output, 5, *more, "--checkpointing_steps", "9")
        calls = stopped_and_resumed(base, output, *more) if kind == "after" else [(whole, {})]
        (losses[kind],) = run_ranks(run_of_diffusers, str(script), *calls)
    return losses


@pytest.mark.deepspeed
def test_the_sdxl_script_trains_saves_and_resumes_as_before(tmp_path):
    needs("datasets")
    from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel

    base, photo = pipelines.sdxl(tmp_path / "base"), photos(tmp_path / "photos", captions=True)
    more = ("--train_data_dir", str(photo), "--use_ema", "--validation_prompt", "a b")
    losses = trained(SDXL, tmp_path, base, *more, "--num_validation_images", "1")
    assert len(losses["before"]) == 5
    assert losses["after"] == pytest.approx(losses["before"], rel=5e-5)
    output = tmp_path / "after-output"
    begun, before, after = (
        weights_of(folder / "unet", UNet2DConditionModel)
        for folder in (base, tmp_path / "before-output", output)
    )
    assert np.linalg.norm(after - before) < 1e-3 * np.linalg.norm(before - begun)
    manifest = verify_checkpoint(output / "checkpoint-3")
    assert list(manifest.shadows) == ["ema"]
    StableDiffusionXLPipeline.from_pretrained(output)


@pytest.mark.deepspeed
@pytest.mark.nightly
def test_the_flux_lora_script_trains_saves_and_resumes_as_before(tmp_path):
    needs("datasets")
    from diffusers import FluxPipeline

    base, photo = pipelines.flux(tmp_path / "base"), photos(tmp_path / "photos", captions=False)
    # The script pads prompts to the real tokenizer's length.
    pipelines.clip(projection=False, length=77).save_pretrained(base / "text_encoder")
    more = ("--instance_data_dir", str(photo), "--instance_prompt", "a b", "--rank", "2")
    losses = trained(FLUX, tmp_path, base, *more)
    assert len(losses["before"]) == 10
    assert losses["after"] == pytest.approx(losses["before"], rel=5e-5)
    before, after = (
        FluxPipeline.lora_state_dict(tmp_path / f"{kind}-output") for kind in ("before", "after")
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (after[name] - tensor).norm() < 1e-3 * tensor.norm(), name


OTHERS = {
    "train_text_to_image": ("--train_data_dir",),
    "train_text_to_image_lora": ("--rank", "2", "--train_data_dir"),
    "train_dreambooth": ("--instance_prompt", "a b", "--instance_data_dir"),
    "train_controlnet": ("--conditioning_image_column", "image", "--train_data_dir"),
}


def controlnet(base: Path) -> Path:
    """Save a ControlNet that shrinks its images as little as the small pipeline's VAE."""
    from diffusers import ControlNetModel, UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet")
    made = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8))
    made.save_pretrained(base / "controlnet")
    return base / "controlnet"


@pytest.mark.deepspeed
@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_in_other_scripts_keeps_their_losses(name, tmp_path):
    needs("datasets")
    base = pipelines.sd15(tmp_path / "base")
    photo = photos(tmp_path / "photos", captions=name != "train_dreambooth")
    more = (*OTHERS[name], str(photo), "--checkpointing_steps", "9")
    if name == "train_controlnet":
        more += ("--controlnet_model_name_or_path", str(controlnet(base)))
    losses = []
    for script in (original, embedded):
        place, output = tmp_path / script.__name__, tmp_path / f"{script.__name__}-output"
        place.mkdir()
        given = flags(base, output, 3, *more)
        if name == "train_dreambooth":  # Its images are not a dataset with a cache.
            given = [each for each in given if "cache" not in each]
        losses += run_ranks(run_of_diffusers, str(script(name, place)), (given, plan(HOST)))
    assert len(losses[0]) >= 3
    assert losses[1] == pytest.approx(losses[0], rel=5e-5)
    assert f"`{name}.py`" in PAGE
