"""``zerotune train``: one command trains, resumes and exports what a file says."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from diffusers import DiffusionPipeline
from PIL import Image

from tests.support import pipelines
from tests.support.ranks import run_ranks
from zerotune import cli
from zerotune.checkpoint import latest_checkpoint


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(4):
        torch.manual_seed(number)
        pixels = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / "photos" / f"{number}.png")
        (tmp_path / "photos" / f"{number}.txt").write_text("a cat")
    model = pipelines.sd15(tmp_path / "model")
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": str(model),
                "data": {"folder": "photos", "resolution": 16},
                "plan": {
                    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                    "train_micro_batch_size_per_gpu": 2,
                },
                "ema": 0.9,
                "steps": 2,
                "output": "result",
                "checkpoints": {"every": 1},
                "validation": {"prompts": ["a cat"], "steps": 2},
            }
        )
    )
    return path


def trained(*arguments):
    torch.set_num_threads(1)
    return cli.main(["train", *arguments])


@pytest.mark.deepspeed
def test_one_command_trains_resumes_and_exports(run_file):
    result = run_file.parent / "result"
    assert run_ranks(trained, str(run_file)) == [0]
    assert latest_checkpoint(result / "checkpoints").name.endswith("2")
    assert list((result / "validation").glob("*.png"))
    pipeline = DiffusionPipeline.from_pretrained(result / "pipeline")
    assert pipeline.unet is not None
    assert run_ranks(trained, str(run_file), "--set", "steps=3") == [0]
    assert latest_checkpoint(result / "checkpoints").name.endswith("3")


@pytest.mark.deepspeed
def test_a_file_asks_for_the_update_on_the_device(run_file):
    content = yaml.safe_load(run_file.read_text())
    content["plan"] |= {"bf16": {"enabled": True}, "optimizer": {"type": "Adafactor"}}
    run_file.write_text(yaml.safe_dump({**content, "steps": 1, "update": "device:split"}))
    assert run_ranks(trained, str(run_file)) == [0]
    saved = latest_checkpoint(run_file.parent / "result" / "checkpoints")
    # Elsewhere, AdamW would have run in its place.
    assert "Adafactor" in (saved / "manifest.json").read_text()


@pytest.mark.deepspeed
def test_adapters_train_on_two_ranks_under_an_advised_plan(run_file):
    content = yaml.safe_load(run_file.read_text())
    content.pop("plan")
    content.pop("ema")
    run_file.write_text(yaml.safe_dump({**content, "adapters": {"rank": 2}}))
    assert run_ranks(trained, str(run_file), world_size=2) == [0, 0]
    assert list((run_file.parent / "result" / "adapters").glob("*.safetensors"))


def test_a_check_refuses_units_that_the_model_lacks(run_file, capsys):
    asked = ["train", str(run_file), "--check", "--set", "plan.bf16.enabled=true"]
    assert cli.main([*asked, "--set", "streamed.units=Foo"]) == 2
    assert "--set streamed.units = 'Foo': " in capsys.readouterr().err
    assert cli.main([*asked, "--set", "streamed.units=ResnetBlock2D"]) == 0


def test_a_check_names_the_line_of_a_plan_inside_the_file(run_file, capsys):
    content = yaml.safe_load(run_file.read_text())
    content["plan"] = {"optimizer": {"type": "LBFGS"}}
    run_file.write_text(yaml.safe_dump({"plan": content.pop("plan"), **content}, sort_keys=False))
    assert cli.main(["train", str(run_file), "--check"]) == 2
    assert "run.yaml, line 3: plan.optimizer.type = 'LBFGS': " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nosuch", "sdxl-controlnet", "nosuch:Family"])
def test_a_check_refuses_families_that_the_start_does_not_know(name, run_file, capsys):
    assert cli.main(["train", str(run_file), "--check", "--set", f"family={name}"]) == 2
    assert f"--set family = '{name}': " in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["nosuch", "run.yaml"])
def test_a_check_refuses_a_folder_without_images(folder, run_file, capsys):
    assert cli.main(["train", str(run_file), "--check", "--set", f"data.folder={folder}"]) == 2
    assert "--set data.folder = " in capsys.readouterr().err


def test_a_check_refuses_adapters_of_layers_that_the_model_lacks(run_file, capsys):
    asked = ["train", str(run_file), "--check", "--set", "adapters.targets=nosuch"]
    assert cli.main(asked) == 2
    assert "--set adapters.targets = " in capsys.readouterr().err


def test_a_check_takes_the_model_of_the_folder_before_the_family(run_file, capsys):
    assert cli.main(["train", str(run_file), "--check", "--set", "family=sd15"]) == 0
    small = capsys.readouterr().out
    assert "model           UNet2DConditionModel" in small
    assert "859," not in small


def test_a_check_resolves_the_plan_as_a_start_does(run_file, capsys):
    here = ["train", str(run_file), "--check", "--set", "plan.bf16.enabled=true"]
    asked = [*here, "--set", "streamed=true", "--set", "update=device:split"]
    assert cli.main(asked) == 0
    said = capsys.readouterr().out
    assert "streamed from host memory, with room for 3 units on the device" in said
    assert "on the device, with split master weights" in said
    assert "model           UNet2DConditionModel" in said
    # A start replaces what cannot run, and names the reason.
    assert cli.main([*asked, "--set", "plan.zero_optimization.offload_optimizer=null"]) == 0
    said = capsys.readouterr().out
    assert "[warning] update" in said
    assert "[warning] streamed" in said


def test_a_file_is_checked_without_training(run_file, capsys):
    assert cli.main(["train", str(run_file), "--check"]) == 0
    assert "stage" in capsys.readouterr().out
    assert not (run_file.parent / "result").exists()
    assert cli.main(["train", str(run_file), "--check", "--set", "stepps=3"]) == 2
    assert "'steps'" in capsys.readouterr().err


def test_the_schema_is_printed_and_a_file_is_needed(capsys):
    assert cli.main(["train", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["steps"]["type"] == "integer"
    assert cli.main(["train"]) == 2
