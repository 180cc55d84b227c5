from __future__ import annotations

import json

import attrs
import pytest

from zerotune.errors import (
    InvalidValueError,
    PlanConflictError,
    PlanError,
    PlanFileError,
    UnknownKeyError,
)
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.sections import (
    AioSection,
    Bf16Section,
    LaunchSection,
    OffloadSection,
    ZeroSection,
)


def test_reference_a_is_read_unchanged(reference_a):
    plan = DeepSpeedPlan.from_dict(reference_a)
    assert plan.train_batch_size == 8
    assert plan.stage == 2
    assert plan.zero_optimization.offload_optimizer == OffloadSection(device="cpu", pin_memory=True)
    assert plan.offload_param_device == "cpu"
    assert plan.optimizer.params["betas"] == [0.9, 0.999]
    assert plan.decisions == ()
    assert plan.to_deepspeed() == reference_a


def test_reference_b_reads_its_buffer_in_whole_elements(reference_b):
    plan = DeepSpeedPlan.from_dict(reference_b)
    section = plan.zero_optimization.offload_param
    assert section.buffer_size == 100_000_000
    assert isinstance(section.buffer_size, int)
    (decision,) = plan.decisions
    assert decision.key == "zero_optimization.offload_param.buffer_size"
    assert decision.severity == "note"


def test_keys_that_only_deepspeed_knows_pass_through():
    config = {
        "zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}},
        "flops_profiler": {"enabled": True},
        "_comment": "any",
    }
    plan = DeepSpeedPlan.from_dict(config)
    assert plan.extra == {"flops_profiler": {"enabled": True}, "_comment": "any"}
    assert plan.to_deepspeed() == config


def test_evolving_a_section_repeats_its_checks():
    with pytest.raises(InvalidValueError, match="stage"):
        attrs.evolve(ZeroSection(stage=2), stage=7)


def test_sections_created_in_code_accept_only_canonical_values():
    with pytest.raises(InvalidValueError, match="reduce_bucket_size"):
        ZeroSection(reduce_bucket_size=2e8)
    with pytest.raises(UnknownKeyError, match="move it to offload_param"):
        ZeroSection(offload_optimizer=OffloadSection(device="nvme", buffer_size=5))
    with pytest.raises(InvalidValueError, match="must be a Bf16Section"):
        DeepSpeedPlan(bf16={"enabled": True})
    with pytest.raises(InvalidValueError, match="is a regular field"):
        AioSection(extra={"block_size": 1})
    with pytest.raises(InvalidValueError, match="must be a LaunchSection"):
        DeepSpeedPlan(launch={})


BAD_VALUES = [
    ({"train_batch_size": "many"}, InvalidValueError, "train_batch_size"),
    ({"train_batch_size": 0}, InvalidValueError, "train_batch_size"),
    ({"gradient_accumulation_steps": -3}, InvalidValueError, "gradient_accumulation_steps"),
    ({"gradient_accumulation_steps": 0.5}, InvalidValueError, "gradient_accumulation_steps"),
    ({"gradient_clipping": -1}, InvalidValueError, "gradient_clipping"),
    ({"zero_optimization": {"stage": 4}}, InvalidValueError, "zero_optimization.stage"),
    ({"zero_optimization": {"stage": [2]}}, InvalidValueError, "zero_optimization.stage"),
    ({"zero_optimization": 2}, InvalidValueError, "zero_optimization"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "tpu"}}},
        InvalidValueError,
        "zero_optimization.offload_optimizer.device",
    ),
    (
        {"zero_optimization": {"offload_param": {"buffer_size": 0}}},
        InvalidValueError,
        "zero_optimization.offload_param.buffer_size",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"buffer_size": 5}}},
        UnknownKeyError,
        "zero_optimization.offload_optimizer.buffer_size",
    ),
    ({"bf16": {"enabled": "perhaps"}}, InvalidValueError, "bf16.enabled"),
    ({"fp16": {"loss_scale_window": -1}}, InvalidValueError, "fp16.loss_scale_window"),
    ({"optimizer": {"params": [1]}}, InvalidValueError, "optimizer.params"),
    ({"optimizer": {"type": "AdamW", "lr": 1}}, UnknownKeyError, "optimizer.lr"),
    ({"aio": {"block_size": "large"}}, InvalidValueError, "aio.block_size"),
    ({"zero_optimisation": {}}, UnknownKeyError, "zero_optimisation"),
    ({"wandb": {"enabled": {1, 2}}}, InvalidValueError, "wandb.enabled"),
    ({3: 4}, InvalidValueError, None),
    ({"zero_optimization": {3: 4}}, InvalidValueError, "zero_optimization"),
    ([], InvalidValueError, None),
    ("stage 2", InvalidValueError, None),
]


@pytest.mark.parametrize(("config", "error", "key"), BAD_VALUES)
def test_an_invalid_value_gives_one_error_that_names_key_and_fix(config, error, key):
    with pytest.raises(error) as caught:
        DeepSpeedPlan.from_dict(config)
    assert caught.value.key == key
    assert caught.value.fix
    if key:
        assert str(caught.value).startswith(key)


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("gradient_acumulation_steps", "'gradient_accumulation_steps'"),
        ("zero_optimisation", "'zero_optimization'"),
        ("max_grad_norm", "'gradient_clipping'"),
        ("sequence_parallel", "'sequence_parallel_size'"),
        ("monitor_config", "'wandb'"),
    ],
)
def test_unknown_keys_give_a_suggestion(key, guess):
    with pytest.raises(UnknownKeyError) as caught:
        DeepSpeedPlan.from_dict({key: 1})
    assert guess in caught.value.fix
    assert caught.value.value == 1


def test_a_key_written_under_two_names_is_a_conflict():
    with pytest.raises(PlanConflictError, match="set under two names") as caught:
        DeepSpeedPlan.from_dict({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}})
    assert caught.value.key == "bf16"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PlanFileError, match=r"nothing\.json.*no such file.*Fix: "):
        DeepSpeedPlan.from_json(tmp_path / "nothing.json")


def test_a_folder_is_refused_as_a_file(tmp_path):
    with pytest.raises(PlanFileError, match="is a folder"):
        DeepSpeedPlan.from_json(tmp_path)


def test_a_binary_file_is_named(tmp_path):
    file = tmp_path / "ds.json"
    file.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(PlanFileError, match="UTF-8"):
        DeepSpeedPlan.from_json(file)


def test_json_text_is_read_like_a_file(reference_a):
    assert DeepSpeedPlan.from_json(json.dumps(reference_a)).to_deepspeed() == reference_a
    assert DeepSpeedPlan.from_json(" {}").source == "<string>"


@pytest.mark.parametrize("key", ["deepspeed_config", "--deepspeed_config", "deepspeed"])
def test_a_trainers_file_is_unwrapped(key, reference_a, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(reference_a))
    for inner in (reference_a, json.dumps(reference_a), "ds.json", str(tmp_path / "ds.json")):
        file = tmp_path / "config.json"
        file.write_text(json.dumps({key: inner, "--learning_rate": 1e-5}))
        assert DeepSpeedPlan.from_json(file).to_deepspeed() == reference_a


def test_trainer_settings_beside_the_plan_are_kept_for_resolution():
    plan = DeepSpeedPlan.from_dict(
        {
            "deepspeed_config": {"zero_optimization": {"stage": 2}},
            "--mixed_precision": "no",
            "--gradient_accumulation_steps": 4,
            "--max_grad_norm": 0.5,
            "--seed": 3,
        }
    )
    assert plan.launch == LaunchSection(
        mixed_precision="fp32", gradient_accumulation_steps=4, gradient_clipping=0.5
    )
    assert "launch" not in plan.to_deepspeed()


def test_a_missing_config_file_lists_the_searched_folders(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"deepspeed_config": "missing.json"}')
    with pytest.raises(PlanFileError) as caught:
        DeepSpeedPlan.from_json(file)
    assert caught.value.key == "deepspeed_config"
    assert str(tmp_path / "missing.json") in caught.value.reason


@pytest.mark.parametrize("inner", [5, [1], {"deepspeed_config": {}}, '{"a": 1'])
def test_an_invalid_configuration_inside_a_trainers_file_is_refused(inner):
    with pytest.raises(PlanError):
        DeepSpeedPlan.from_dict({"deepspeed_config": inner})


def test_build_creates_a_plan_from_common_arguments():
    plan = DeepSpeedPlan.build(
        stage=3,
        offload="cpu",
        offload_param="nvme",
        nvme_path="/mnt/x",
        precision="bf16",
        micro_batch_size="auto",
        scheduler={"type": "WarmupLR"},
        overlap_comm=False,
    )
    assert plan.stage == 3
    assert plan.precision == "bf16"
    assert plan.offload_optimizer_device == "cpu"
    assert plan.zero_optimization.offload_param == OffloadSection(device="nvme", nvme_path="/mnt/x")
    assert plan.zero_optimization.overlap_comm is False
    assert plan.optimizer.type == "AdamW"
    assert plan.bf16 == Bf16Section(enabled=True)
    assert plan.source == "code"


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [
        ({"stage": 5}, "zero_optimization.stage"),
        ({"offload": "gpu"}, "offload_optimizer"),
        ({"precision": "fp8"}, "precision"),
        ({"no_such_key": 1}, "zero_optimization.no_such_key"),
        ({"optimizer": 3}, "optimizer"),
    ],
)
def test_build_names_invalid_arguments(kwargs, key):
    with pytest.raises(PlanError) as caught:
        DeepSpeedPlan.build(**kwargs)
    assert caught.value.key == key


def test_a_file_that_is_not_a_deepspeed_configuration_is_recognised():
    model = {"hidden_size": 64, "architectures": ["UNet"], "vocab_size": 3, "dropout": 0.1}
    with pytest.raises(InvalidValueError, match="contains no DeepSpeed configuration"):
        DeepSpeedPlan.from_dict(model)
