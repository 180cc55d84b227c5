"""Other forms of a DeepSpeed configuration than JSON: a live dictionary and plain YAML."""

from __future__ import annotations

import math

import pytest

from zerotune.errors import InvalidValueError
from zerotune.plan import DeepSpeedPlan

LIVE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None},
        "stage3_gather_16bit_weights_on_model_save": False,
    },
    "gradient_clipping": 0.5,
    "steps_per_print": math.inf,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
}
PLAIN = """\
train_micro_batch_size_per_gpu: 2
bf16: {enabled: true}
zero_optimization: {stage: 2, reduce_bucket_size: 5e8}
"""


def written(folder, name, text):
    (folder / name).write_text(text)
    return folder / name


def test_accelerates_runtime_dictionary_is_read(cuda):
    plan = DeepSpeedPlan.from_dict(LIVE)
    (found,) = [d for d in plan.decisions if d.key == "steps_per_print"]
    assert found.before == "inf"
    rendered = plan.resolve(platform=cuda).to_deepspeed()
    assert all(step % rendered["steps_per_print"] for step in (1, 10, 10**9))
    assert (rendered["gradient_accumulation_steps"], rendered["gradient_clipping"]) == (2, 0.5)
    assert DeepSpeedPlan.from_json(plan.to_json()) == plan


def test_the_dictionary_of_the_installed_accelerate_is_read(monkeypatch):
    pytest.importorskip("deepspeed")
    utils = pytest.importorskip("accelerate.utils")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    config = utils.DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=4).deepspeed_config
    plan = DeepSpeedPlan.from_dict(config)
    assert (plan.stage, plan.gradient_accumulation_steps) == (2, 4)


def test_infinite_steps_per_print_with_a_minus_sign_is_refused():
    with pytest.raises(InvalidValueError, match="steps_per_print"):
        DeepSpeedPlan.from_dict({"steps_per_print": -math.inf})


@pytest.mark.parametrize("name", ["ds.yaml", "ds.yml"])
def test_yaml_with_deepspeeds_own_keys_is_read(tmp_path, name):
    plan = DeepSpeedPlan.load(written(tmp_path, name, PLAIN))
    assert plan == DeepSpeedPlan.from_dict(
        {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000},
        }
    )
    assert plan.launch is None


@pytest.mark.parametrize("key", ["deepspeed", "deepspeed_config", "--deepspeed_config"])
def test_a_trainers_yaml_may_name_its_configuration_file(tmp_path, key):
    written(tmp_path, "ds.yaml", PLAIN)
    plan = DeepSpeedPlan.load(
        written(tmp_path, "train.yaml", f"{key}: ds.yaml\nlr: 1.0\nmax_grad_norm: 0.5\n")
    )
    assert plan.stage == 2
    assert plan.launch.gradient_clipping == 0.5


def test_an_accelerate_yaml_without_its_block_is_refused_as_such(tmp_path):
    text = "distributed_type: DEEPSPEED\ngradient_clipping: 1.0\n"
    with pytest.raises(InvalidValueError) as caught:
        DeepSpeedPlan.load(written(tmp_path, "a.yaml", text))
    assert caught.value.key == "deepspeed_config"


@pytest.mark.parametrize("kind", ["MULTI_GPU", "FSDP"])
def test_a_file_for_other_training_gets_no_advice_that_accelerate_would_ignore(tmp_path, kind):
    text = f"distributed_type: {kind}\nmixed_precision: bf16\n"
    with pytest.raises(InvalidValueError, match="without DeepSpeed") as caught:
        DeepSpeedPlan.load(written(tmp_path, "a.yaml", text))
    assert caught.value.key == "distributed_type"
    assert "choose DeepSpeed" in caught.value.fix
    assert "add a deepspeed_config block" not in caught.value.fix
    assert ("FULL_SHARD" in caught.value.fix) == (kind == "FSDP")
