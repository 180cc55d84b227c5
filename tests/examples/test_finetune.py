"""The fine-tuning scripts run unchanged, with their own plans, on real photos."""

from __future__ import annotations

import importlib.resources
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from tests.examples.test_examples import saying
from tests.support import pipelines
from tests.support.ranks import run_ranks
from tests.support.sampling import nightly

EXAMPLES = Path(__file__).parents[2] / "examples"
PHOTOS = {
    "astronaut": "an astronaut smiling",
    "chelsea": "a cat",
    "coffee": "a cup of coffee",
    "motorcycle_left": "a motorcycle in a garage",
}
SMALL = ["--steps", "3", "--every", "2", "--draw-steps", "2", "--prompts", "a cat", "coffee"]
SIZE = ["--resolution", "16"]
LORA = ["--lora", "2"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    data = importlib.resources.files("skimage") / "data"
    for name, caption in PHOTOS.items():
        (folder / f"{name}.png").write_bytes((data / f"{name}.png").read_bytes())
        (folder / f"{name}.txt").write_text(caption)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            made[name] = pipelines.MAKERS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return make


def run(script: str, arguments: list[str]) -> list[float]:
    torch.set_num_threads(1)
    module = importlib.import_module(f"examples.{script}")
    return module.main(arguments)


def plan(name: str) -> list[str]:
    return ["--plan", str(EXAMPLES / "plans" / f"{name}.json")]


def test_command_line_options_override_the_plan():
    script = importlib.import_module("examples.finetune")
    shipped = script.plan_of(script.parse(plan("sdxl")))
    assert (shipped.optimizer.params["lr"], shipped.train_micro_batch_size_per_gpu) == (1e-5, 4)
    asked = script.parse([*plan("sdxl"), "--lr", "3e-4", "--batch", "2", "--resolution", "512"])
    changed = script.plan_of(asked)
    assert (changed.optimizer.params["lr"], changed.train_micro_batch_size_per_gpu) == (3e-4, 2)
    assert changed.optimizer.params["weight_decay"] == shipped.optimizer.params["weight_decay"]
    assert asked.resolution == 512


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("model", "chosen", "ranks"),
    [
        ("sd3", "sd3", 2),
        *nightly(("sd15", "sdxl", 1), ("sdxl", "sdxl", 2), ("sd3", "sd3", 1)),
    ],
)
def test_all_weights_are_trained_and_the_pipeline_loads(
    model, chosen, ranks, models, photos, tmp_path
):
    arguments = [str(models(model)), str(photos), str(tmp_path), *plan(chosen), *SMALL, *SIZE]
    results = run_ranks(run, "finetune", arguments, world_size=ranks)
    assert len(results[0]) == 3
    assert results[0] == results[-1], "the loss is the mean over ranks"
    check_folder(tmp_path)
    # diffusers cannot load a pipeline without T5 unless the call says so, even if diffusers saved
    # it.
    without = {"text_encoder_3": None, "tokenizer_3": None} if model == "sd3" else {}
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "pipeline", **without)
    pipeline.set_progress_bar_config(disable=True)
    known = {"max_sequence_length": 16} if model == "sd3" else {}
    drawn = pipeline("a cat", num_inference_steps=1, height=16, width=16, **known).images[0]
    assert drawn.size == (16, 16)


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("model", "chosen", "ranks"),
    [
        ("sdxl", "sdxl-lora", 1),
        *nightly(("flux", "flux-lora", 1), ("flux", "flux-lora", 2)),
    ],
)
def test_adapters_are_trained_and_load_in_the_pipeline(
    model, chosen, ranks, models, photos, tmp_path
):
    arguments = [str(models(model)), str(photos), str(tmp_path), *plan(chosen), *SMALL, *SIZE]
    run_ranks(run, "finetune", [*arguments, *LORA], world_size=ranks)
    check_folder(tmp_path)
    pipeline = DiffusionPipeline.from_pretrained(models(model))
    pipeline.load_lora_weights(tmp_path / "adapters")
    component = getattr(pipeline, "unet", None) or pipeline.transformer
    adapters = [p for name, p in component.named_parameters() if "lora_B" in name]
    assert adapters
    assert all(bool(p.abs().max() > 0) for p in adapters), "they have learned"


@pytest.mark.deepspeed
def test_a_stopped_run_exports_only_on_request_and_goes_on_bit_for_bit(models, photos, tmp_path):
    def command(output: str, steps: int, *more: str) -> list[str]:
        given = [str(models("sd15")), str(photos), str(tmp_path / output), *plan("sdxl"), *SMALL]
        return [*given, *SIZE, "--every", "100", "--steps", str(steps), *more]

    whole = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
    commands = [
        (command("whole", 2), None),
        (command("run", 2), 1),
        (command("run", 9, "--export-stopped"), 2),
        (command("other", 2, "--start", whole), None),
    ]
    ((whole, stopped, rest, started),) = run_ranks(run_and_stop, commands)
    assert stopped == (whole[0][:1], None)
    assert rest == (whole[0][1:], whole[1])
    assert started == ([], whole[1]), "no step, and the same bytes"


def run_and_stop(commands: list[tuple[list[str], int | None]]) -> list[tuple[list[float], Any]]:
    """Return each command's losses and export; a SIGTERM comes during the named step."""
    from zerotune.training import Callback

    class Terminate(Callback):
        def __init__(self, stop: int | None) -> None:
            self._stop = stop

        def on_step_end(self, trainer: Any, metrics: Any) -> None:  # noqa: ARG002
            if metrics.step == self._stop:
                os.kill(os.getpid(), signal.SIGTERM)

    script = importlib.import_module("examples.finetune")
    others, found = script.callbacks, []
    for arguments, stop in commands:
        script.callbacks = lambda options, stop=stop: [*others(options), Terminate(stop)]
        losses, _ = saying(run, "finetune", arguments)
        file = Path(arguments[2]) / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors"
        found.append((losses, file.read_bytes() if file.exists() else None))
    return found


@pytest.mark.deepspeed
@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_pixel_art_script_trains_and_the_pipeline_loads(ranks, models, photos, tmp_path):
    arguments = [str(models("sdxl")), str(photos), str(tmp_path), *SMALL, "--side", "16"]
    (losses, *_) = run_ranks(run, "pixel_art", arguments, world_size=ranks)
    assert len(losses) == 3
    check_folder(tmp_path)


@pytest.mark.parametrize("missing", ["NODES", "GPUS", "HEAD"])
def test_the_launch_file_names_its_requirements(missing):
    given = {"NODES": "2", "GPUS": "4", "HEAD": "node:29500"}
    del given[missing]
    done = subprocess.run(
        [str(EXAMPLES / "multi_node" / "launch.sh"), "script.py"],
        env={"PATH": os.environ["PATH"], **given}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert missing in done.stderr


def test_the_launch_file_passes_nodes_and_rendezvous_to_torchrun(tmp_path):
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    given = {"NODES": "2", "GPUS": "4", "HEAD": "node:29500"}
    done = subprocess.run(
        [str(EXAMPLES / "multi_node" / "launch.sh"), "script.py", "--steps", "3"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **given},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--nnodes 2 --nproc-per-node 4" in done.stdout
    assert "--rdzv-endpoint node:29500" in done.stdout
    assert done.stdout.endswith("script.py --steps 3\n")


def check_folder(folder: Path) -> None:
    assert (folder / "checkpoints").is_dir()
    drawn = sorted((folder / "validation").glob("*.png"))
    assert drawn
    with Image.open(drawn[-1]) as image:
        assert len(image.convert("L").getcolors(256)) > 10, "the grid is blank"
