"""SimpleTuner's files, read as SimpleTuner does; each translation is a decision."""

from __future__ import annotations

import json

import pytest

from tests.plan.styles import SIMPLETUNER
from zerotune import cli
from zerotune.errors import InvalidValueError, PlanConflictError, PlanError
from zerotune.plan import DeepSpeedPlan

MICRO = "train_micro_batch_size_per_gpu"


def keys(plan):
    return [decision.key for decision in plan.decisions]


def batch(plan, cuda, world_size=2):
    resolved = plan.resolve(platform=cuda, world_size=world_size)
    return (
        resolved.train_batch_size,
        resolved.micro_batch_size,
        resolved.gradient_accumulation_steps,
    )


@pytest.mark.parametrize("wrapped", [False, True])
def test_zero3_keys_at_the_top_level_are_read_as_launch_settings(wrapped):
    inner = {
        "zero_optimization": {"stage": 3},
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
    }
    plan = DeepSpeedPlan.from_dict({"deepspeed_config": inner} if wrapped else inner)
    assert plan.launch.zero3_init_flag is True
    assert plan.to_deepspeed() == {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    }
    assert keys(plan) == ["zero3_save_16bit_model", "zero3_init_flag"]


def test_a_top_level_key_that_contradicts_the_section_is_a_conflict():
    zero = {"stage": 3, "gather_16bit_weights_on_model_save": False}
    with pytest.raises(PlanConflictError, match="also set in zero_optimization") as caught:
        DeepSpeedPlan.from_dict({"zero_optimization": zero, "zero3_save_16bit_model": True})
    assert caught.value.key == "zero3_save_16bit_model"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ds2.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": true}')
    block = {"deepspeed_config_file": "ds2.json", "zero3_init_flag": False}
    (tmp_path / "config.json").write_text(json.dumps({"seed": 1, "deepspeed_config": block}))
    return tmp_path


def test_a_configuration_file_named_inside_the_block_is_read(folder):
    plan = DeepSpeedPlan.from_json(folder / "config.json")
    assert plan.stage == 2
    assert plan.precision == "bf16"
    assert plan.launch.zero3_init_flag is False
    assert plan.source == str(folder / "ds2.json")
    assert keys(plan)[0] == "deepspeed_config"


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ({"deepspeed_config_file": "ds2.json", "zero_stage": 2}, "zero_stage"),
        ({"deepspeed_config_file": "no.json"}, "no such file"),
        ({"deepspeed_config_file": {"bf16": {}, "deepspeed": "ds2.json"}}, "wrapped"),
        ({"deepspeed_config": "ds2.json"}, "wrapped"),
    ],
)
def test_a_malformed_reference_to_a_file_is_refused(folder, block, error):
    (folder / "config.json").write_text(json.dumps({"deepspeed_config": block}))
    with pytest.raises(PlanError, match=error):
        DeepSpeedPlan.from_json(folder / "config.json")


def test_an_empty_configuration_switches_deepspeed_off(cuda, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(SIMPLETUNER["switched off"])
    plan = DeepSpeedPlan.from_json(file)
    assert plan.stage == 0
    (found,) = [d for d in plan.decisions if d.key == "--deepspeed_config"]
    assert found.severity == "warning"
    assert "without DeepSpeed" in found.reason
    assert batch(plan, cuda) == (16, 4, 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("its page at stage 3", (8, 4, 1)),
        ("its batch beside a train batch", (16, 2, 4)),
        ("its batch beside the configuration's own", (6, 3, 1)),
        ("its batch where the others give it", (8, 4, 1)),
    ],
)
def test_simpletuners_train_batch_size_is_the_micro_batch(cuda, name, expected):
    plan = DeepSpeedPlan.from_json(SIMPLETUNER[name])
    assert batch(plan, cuda) == expected
    assert MICRO in keys(plan)


@pytest.mark.parametrize("written", [0, -1, 1.5, "four", [4]])
def test_an_invalid_batch_is_refused_by_name(written):
    with pytest.raises(InvalidValueError) as caught:
        DeepSpeedPlan.from_dict({"--train_batch_size": written, "deepspeed_config": {}})
    assert caught.value.key == "--train_batch_size"


@pytest.mark.parametrize("off", [None, "None", "none", "", " "])
@pytest.mark.parametrize("key", ["deepspeed_config", "--deepspeed_config", "deepspeed"])
def test_a_file_that_switches_deepspeed_off_trains_at_stage_0(off, key):
    plan = DeepSpeedPlan.from_dict({key: off, "mixed_precision": "bf16", "train_batch_size": 4})
    assert (plan.stage, plan.precision) == (0, "bf16")
    (found, _) = plan.decisions
    assert (found.key, found.severity) == (key, "warning")
    assert "train without DeepSpeed" in found.reason


WITHOUT = {
    "aspect_bucket_rounding": 2, "base_model_precision": "int8-quanto", "checkpointing_steps": 100,
    "data_backend_config": "config/multidatabackend.json", "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4, "lora_rank": 16, "lora_type": "standard", "lr_scheduler": "polynomial",
    "lr_warmup_steps": 100, "max_train_steps": 1000, "mixed_precision": "bf16",
    "model_family": "flux", "model_type": "lora", "optimizer": "adamw_bf16",
    "output_dir": "output", "pretrained_model_name_or_path": "a/b", "report_to": "none",
    "resolution": 1024, "resume_from_checkpoint": "latest", "seed": 42, "train_batch_size": 1,
    "use_ema": False, "validation_prompt": "a cat", "validation_steps": 100,
}  # fmt: skip


@pytest.mark.parametrize("dashes", ["", "--"])
def test_a_trainers_file_without_deepspeed_is_refused_with_one_error(dashes, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({f"{dashes}{key}": value for key, value in WITHOUT.items()}))
    with pytest.raises(InvalidValueError) as caught:
        DeepSpeedPlan.load(file)
    (error,) = caught.value.each()
    assert "training without DeepSpeed" in error.reason
    assert 'add "deepspeed_config": {"zero_optimization"' in error.fix
    assert cli.main(["plan", "check", str(file)]) == 1
    assert "config.json: 1 error at" in capsys.readouterr().out
