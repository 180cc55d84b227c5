"""Messages that suffice to fix a mistake, in the terms of the user's own file."""

from __future__ import annotations

import json

import pytest

from zerotune import DeepSpeedPlan, Platform
from zerotune.errors import InvalidValueError, PlanConflictError, PlanError

YAML = """\
distributed_type: DEEPSPEED
mixed_precision: fp8
num_processes: 2
deepspeed_config:
  zero_stage: 2
  gradient_clipping: 0
  offload_optimizer_device: nvme
"""


def message(read):
    with pytest.raises(PlanError) as caught:
        read()
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "'zero_optimization.offload_optimizer'"),
        ({"stage": 2}, "'zero_optimization.stage'"),
        ({"reduce_bucket_size": 1}, "'zero_optimization.reduce_bucket_size'"),
        ({"mixed_precision": "bf16"}, "set bf16.enabled to true"),
        ({"fp16": {"enabled": True, "loss_scale": "dynamic"}}, "(0 means dynamic)"),
        ({"zero_optimization": 2}, 'write {"stage": 2}'),
        ({"zero_optimization": "3"}, 'write {"stage": 3}'),
        ({"zero_optimization": [1]}, 'write {"stage": 1}'),
        ({"zero_optimization": 9}, 'write {"name": value'),
    ],
)
def test_the_fix_shows_the_valid_form(config, fix):
    assert fix in message(lambda: DeepSpeedPlan.from_dict(config)).partition("Fix: ")[2]


@pytest.mark.parametrize("path", ["$SCRATCH/swap", "/a/${USER}", "/a/{{ user }}", "<folder>"])
def test_a_folder_with_a_placeholder_is_recognised_as_a_template(path):
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": path}}
    with pytest.raises(InvalidValueError, match="template"):
        DeepSpeedPlan.from_dict({"zero_optimization": zero})


@pytest.mark.parametrize("path", ["/mnt/a$", "/mnt/50%", "/mnt/{a}", "/mnt/a<b", "C:/x"])
def test_folders_with_unusual_characters_are_accepted(path):
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": path}}
    plan = DeepSpeedPlan.from_dict({"zero_optimization": zero})
    assert plan.to_dict()["zero_optimization"] == zero


def test_messages_show_the_yaml_key_beside_deepspeeds(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(YAML)
    told = {finding.rule: str(finding) for finding in DeepSpeedPlan.load(file).check()}
    assert told["precision-conflict"].startswith("mixed_precision = 'fp8'")
    assert told["world-size"].startswith("num_processes = 2")
    swap = told["nvme-optimizer-below-stage-3"]
    ours = "(zero_optimization.offload_optimizer.device)"
    assert swap.startswith(f"deepspeed_config.offload_optimizer_device = 'nvme' {ours}: ")
    assert "Fix: set zero_optimization.stage to 3" in swap
    clipping = [str(one) for one in DeepSpeedPlan.load(file).decisions if "clip" in one.reason]
    assert clipping[0].startswith("deepspeed_config.gradient_clipping: ")


def test_finding_keys_are_deepspeeds_paths(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(YAML)
    plan = DeepSpeedPlan.load(file)
    keys = {finding.rule: finding.key for finding in plan.check()}
    assert keys["nvme-optimizer-below-stage-3"] == "zero_optimization.offload_optimizer.device"
    with pytest.raises(PlanConflictError, match=r"^mixed_precision = 'fp8'") as caught:
        plan.resolve(platform=Platform.synthetic("cuda"))
    assert caught.value.key == "launch.mixed_precision"
    file.write_text(YAML.replace("zero_stage: 2", "zero_stage: two"))
    with pytest.raises(InvalidValueError, match=r"^deepspeed_config\.zero_stage = 'two'") as wrong:
        DeepSpeedPlan.load(file)
    assert wrong.value.key == "zero_optimization.stage"


def test_deepspeeds_own_keys_keep_their_names_in_a_block_and_in_a_file(tmp_path):
    file = tmp_path / "a.yaml"
    head = "distributed_type: DEEPSPEED\ndeepspeed_config:\n"
    file.write_text(f"{head}  zero_optimization: {{stage: 7}}\n")
    text = message(lambda: DeepSpeedPlan.load(file))
    assert text.startswith("deepspeed_config.zero_optimization.stage = 7")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 7}}')
    file.write_text(f"num_processes: x\n{head}  deepspeed_config_file: ds.json\n")
    first, second = message(lambda: DeepSpeedPlan.load(file)).splitlines()
    assert first.startswith("num_processes = 'x'")
    assert second.startswith("zero_optimization.stage = 7")


def test_messages_about_a_trainers_file_use_its_keys():
    around = {"--max_grad_norm": "x", "--mixed_precision": "bf16", "deepspeed_config": {}}
    assert message(lambda: DeepSpeedPlan.from_dict(around)).startswith("--max_grad_norm = 'x'")
    around["--max_grad_norm"] = 0.5
    around["deepspeed_config"] = {"fp16": {"enabled": True}, "gradient_clipping": 1.0}
    told = [str(finding) for finding in DeepSpeedPlan.from_json(json.dumps(around)).check()]
    assert any(each.startswith("--mixed_precision = 'bf16'") for each in told)
    assert any(each.startswith("--max_grad_norm = 0.5") for each in told)


@pytest.mark.parametrize(
    "value", [10**4300, -(10**4300), "9" * 5000, [10**4300]], ids=["long", "below", "text", "list"]
)
def test_a_huge_number_is_refused_like_any_other(value):
    for key in ("contiguous_gradients", "sub_group_size", "stage"):
        text = message(lambda key=key: DeepSpeedPlan.from_dict({"zero_optimization": {key: value}}))
        assert text.startswith(f"zero_optimization.{key} = ")
        assert len(text) < 500


def test_no_message_repeats_a_long_value(tmp_path):
    name = "a" * 50_000
    plans = [
        {"deepspeed_config": f"{name}.json"},
        {name: 1},
        {"zero_optimization": {name: name}},
        {"optimizer": {"type": name, name: 1}},
        {"zero_optimization": {"stage": name}},
        {"deepspeed_config": {"deepspeed_config_file": name, name: 1}},
        {name: 1, f"{name}b": 1, "c": 1, "d": 1},
    ]
    for plan in plans:
        (tmp_path / "config.json").write_text(json.dumps(plan))
        with pytest.raises(PlanError) as caught:
            DeepSpeedPlan.load(tmp_path / "config.json")
        assert all(len(str(error)) < 3000 for error in caught.value.each())
