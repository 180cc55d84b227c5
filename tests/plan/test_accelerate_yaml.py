from __future__ import annotations

import base64
import json

import pytest

from zerotune import cli
from zerotune.errors import (
    InvalidValueError,
    PlanConflictError,
    PlanFileError,
    PlanSyntaxError,
    UnknownKeyError,
)
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.accelerate import OF_THE_SCRIPT
from zerotune.plan.launch_settings import LAUNCH_SETTINGS


@pytest.fixture
def read(tmp_path):
    def read_yaml(text: str) -> DeepSpeedPlan:
        file = tmp_path / "accelerate.yaml"
        file.write_text(text)
        return DeepSpeedPlan.from_yaml(file)

    return read_yaml


def test_every_accelerate_key_is_translated(read):
    plan = read(
        """
deepspeed_config:
  zero_stage: 3
  gradient_accumulation_steps: 2
  gradient_clipping: 0.7
  offload_optimizer_device: nvme
  offload_optimizer_nvme_path: /mnt/a
  offload_param_device: cpu
  offload_param_nvme_path: none
  zero3_save_16bit_model: true
  deepspeed_multinode_launcher: standard
  deepspeed_moe_layer_cls_names: Block
mixed_precision: NO
num_processes: 2
"""
    )
    assert plan.to_deepspeed() == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.7,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/a"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    assert plan.precision == "fp32"
    assert plan.launch.deepspeed_moe_layer_cls_names == "Block"
    assert plan.launch.extra["deepspeed_multinode_launcher"] == "standard"


def test_settings_missing_in_a_block_stay_auto_for_the_script(read):
    plan = read("deepspeed_config: {zero_stage: 2, gradient_clipping: null}")
    assert plan.to_deepspeed() == {
        **dict.fromkeys(OF_THE_SCRIPT, "auto"),
        "zero_optimization": {"stage": 2},
    }


def test_a_named_file_makes_nothing_auto(read, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    plan = read("deepspeed_config: {deepspeed_config_file: ds.json}")
    assert plan.to_deepspeed() == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("block", ["{}", "{gradient_accumulation_steps: 2}"])
def test_the_default_stage_is_recorded(read, block):
    plan = read(f"deepspeed_config: {block}")
    assert plan.stage == 2
    (found,) = [d for d in plan.decisions if d.key == "zero_optimization.stage"]
    assert (found.before, found.after) == (None, 2)


def test_a_file_without_the_distributed_type_is_read_with_a_warning(read):
    plan = read("deepspeed_config: {zero_stage: 2}")
    (found,) = [d for d in plan.decisions if d.key == "launch.distributed_type"]
    assert found.severity == "warning"
    assert found.after == plan.launch.distributed_type == "DEEPSPEED"


@pytest.mark.parametrize("written", ["MULTI_GPU", "'NO'", "NO", "FSDP", "null"])
def test_a_block_that_accelerate_ignores_is_refused(read, written):
    with pytest.raises(InvalidValueError, match="without DeepSpeed") as caught:
        read(f"{{distributed_type: {written}, deepspeed_config: {{zero_stage: 3}}}}")
    assert caught.value.key == "distributed_type"


@pytest.mark.parametrize(
    ("settings", "block", "written"),
    [
        ("mixed_precision: fp32", "zero_stage: 2", "mixed_precision = 'fp32'"),
        ("mixed_precision: auto", "zero_stage: 2", "mixed_precision = 'auto'"),
        ("mixed_precision: fp9", "zero_stage: 2", "mixed_precision = 'fp9'"),
        ("mixed_precision: bf16", "zero_stage: auto", "deepspeed_config.zero_stage = 'auto'"),
        ("mixed_precision: bf16", "zero_stage: nine", "deepspeed_config.zero_stage = 'nine'"),
    ],
)
def test_values_that_crash_accelerates_launcher_are_refused_with_the_valid_ones(
    read, tmp_path, capsys, settings, block, written
):
    text = f"{{distributed_type: DEEPSPEED, {settings}, deepspeed_config: {{{block}}}}}"
    with pytest.raises(InvalidValueError) as caught:
        read(text)
    (error,) = caught.value.each()
    assert str(error).startswith(written)
    assert not {"'auto'", '"auto"', "fp32"} & set(str(error.fix).replace(",", " ").split())
    assert cli.main(["plan", "check", str(tmp_path / "accelerate.yaml")]) == 1
    assert capsys.readouterr().out.count("[error]") == 1


def test_auto_accumulation_in_the_block_warns_that_accelerator_fails(read):
    block = "{zero_stage: 2, gradient_accumulation_steps: auto}"
    plan = read(f"{{distributed_type: DEEPSPEED, deepspeed_config: {block}}}")
    assert plan.gradient_accumulation_steps == "auto"
    (warned,) = [d for d in plan.decisions if d.severity == "warning"]
    assert (warned.key, warned.before) == ("gradient_accumulation_steps", "auto")
    assert "omit the key" in warned.reason


def test_an_unquoted_no_is_read_with_a_warning_that_the_launcher_fails(read):
    plan = read("{distributed_type: DEEPSPEED, mixed_precision: NO, deepspeed_config: {}}")
    assert plan.precision == "fp32"
    told = [d for d in plan.decisions if d.severity == "warning"]
    assert [d.key for d in told] == ["launch.mixed_precision"]
    assert "write 'no'" in told[0].reason


@pytest.mark.parametrize("name", ["accelerate.yaml", "./accelerate.yaml", "other.yaml"])
def test_a_file_that_names_itself_or_another_accelerate_file_is_refused(read, tmp_path, name):
    text = f"{{distributed_type: DEEPSPEED, deepspeed_config: {{deepspeed_config_file: {name}}}}}"
    (tmp_path / "other.yaml").write_text(text)
    with pytest.raises(
        InvalidValueError, match=r"names (this file itself|another accelerate file)"
    ) as caught:
        read(text)
    assert caught.value.key == "deepspeed_config.deepspeed_config_file"


def test_a_precision_beside_a_named_file_is_kept_with_a_warning(read, tmp_path):
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": "auto"}}')
    plan = read(
        "{distributed_type: DEEPSPEED, mixed_precision: bf16,"
        " deepspeed_config: {deepspeed_config_file: ds.json}}"
    )
    assert plan.launch.mixed_precision == "bf16"
    assert [d.key for d in plan.decisions if d.severity == "warning"] == ["launch.mixed_precision"]


def test_clipping_0_is_kept_with_a_warning_that_accelerate_loses_it(read):
    plan = read("{distributed_type: DEEPSPEED, deepspeed_config: {gradient_clipping: 0}}")
    assert plan.gradient_clipping == 0
    (found,) = [d for d in plan.decisions if d.key == "gradient_clipping"]
    assert found.severity == "warning"


def test_a_key_that_belongs_inside_the_block_is_kept_with_a_warning(read):
    plan = read(
        "{distributed_type: DEEPSPEED, deepspeed_hostfile: hosts,"
        " deepspeed_config: {zero_stage: 1}}"
    )
    assert plan.launch.extra == {"deepspeed_hostfile": "hosts"}
    (found,) = [d for d in plan.decisions if d.key == "launch.deepspeed_hostfile"]
    assert found.severity == "warning"


@pytest.mark.parametrize("encode", [False, True])
def test_the_file_key_may_hold_the_configuration_itself_as_in_accelerate(read, encode):
    text = json.dumps({"zero_optimization": {"stage": 3}})
    written = base64.urlsafe_b64encode(text.encode()).decode() if encode else text
    plan = read(json.dumps({"deepspeed_config": {"deepspeed_config_file": written}}))
    assert plan.stage == 3
    assert plan.launch.deepspeed_config_file is None


def test_accelerates_json_is_not_read_as_a_trainers_file(tmp_path):
    file = tmp_path / "default_config.json"
    file.write_text(
        json.dumps(
            {
                "compute_environment": "LOCAL_MACHINE",
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"zero_stage": 1},
                "num_machines": 2,
            }
        )
    )
    plan = DeepSpeedPlan.from_json(file)
    assert plan.stage == 1
    assert plan.launch.num_machines == 2


def test_the_known_keys_equal_those_of_the_installed_accelerate():
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    fields = set(config_args.ClusterConfig.__dataclass_fields__)
    translated = {"fp16", "dynamo_backend"}  # by BaseConfig.process_config, from older files
    known = {name for name, row in LAUNCH_SETTINGS.items() if row.place == "top"}
    assert (fields - {"deepspeed_config"}) | translated == known


def test_a_relative_configuration_file_is_searched_in_two_folders(read, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    text = "deepspeed_config: {deepspeed_config_file: ds.json}"
    with pytest.raises(PlanFileError) as caught:
        read(text)
    assert str(tmp_path / "ds.json") in caught.value.reason
    (elsewhere / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert read(text).stage == 1
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert read(text).stage == 3


def test_settings_beside_a_named_file_are_refused_by_name(read, tmp_path):
    (tmp_path / "ds.json").write_text("{}")
    with pytest.raises(PlanConflictError, match="gradient_clipping, zero_stage"):
        read(
            "deepspeed_config: {deepspeed_config_file: ds.json, zero_stage: 2,"
            " gradient_clipping: 1}"
        )


def test_inline_deepspeed_json_is_merged_with_a_warning(read):
    plan = read(
        """
deepspeed_config:
  gradient_accumulation_steps: 4
  train_micro_batch_size_per_gpu: 2
  zero_optimization: {stage: 2, reduce_bucket_size: 5e8}
"""
    )
    assert plan.to_deepspeed() == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000},
    }
    assert any("discard" in decision.reason for decision in plan.decisions)


def test_one_setting_in_both_forms_is_a_conflict(read):
    with pytest.raises(PlanConflictError, match=r"deepspeed_config\.zero_optimization"):
        read("deepspeed_config: {zero_stage: 2, zero_optimization: {stage: 3}}")


@pytest.mark.parametrize(
    ("text", "error", "line"),
    [
        ("deepspeed_config:\n  zero_stage: 2\n  zero_stage: 3\n", PlanSyntaxError, 3),
        ("deepspeed_config: [1\n", PlanSyntaxError, 2),
        ("a: b: c", PlanSyntaxError, 1),
        ("\tdeepspeed_config: 1", PlanSyntaxError, 1),
    ],
)
def test_malformed_yaml_gives_line_and_column(read, text, error, line):
    with pytest.raises(error) as caught:
        read(text)
    assert caught.value.line == line
    assert caught.value.column >= 1


@pytest.mark.parametrize(
    ("text", "error", "key"),
    [
        ("distributed_type: MULTI_GPU", InvalidValueError, "distributed_type"),
        ("deepspeed_config:", InvalidValueError, "deepspeed_config"),
        ("- 1", InvalidValueError, None),
        ("deepspeed_config: {zero_stag: 2}", UnknownKeyError, "deepspeed_config.zero_stag"),
        ("{deepspeed_config: {zero_stage: 2}, num_procesess: 2}", UnknownKeyError, "num_procesess"),
        ("{deepspeed_config: {zero_stage: 9}}", InvalidValueError, "zero_optimization.stage"),
        ("{deepspeed_config: {3: 9}}", InvalidValueError, "deepspeed_config"),
        (
            "{deepspeed_config: {zero_stage: 1}, num_machines: 0}",
            InvalidValueError,
            "launch.num_machines",
        ),
        (
            "{deepspeed_config: {zero_stage: 1}, gpu_ids: 2020-01-01}",
            InvalidValueError,
            "launch.gpu_ids",
        ),
        (
            "{deepspeed_config: {deepspeed_config_file: 3}}",
            InvalidValueError,
            "deepspeed_config.deepspeed_config_file",
        ),
    ],
)
def test_invalid_settings_are_named(read, text, error, key):
    with pytest.raises(error) as caught:
        read(text)
    assert caught.value.key == key


def test_a_key_of_zero_optimization_in_the_block_is_refused_with_its_place(read):
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, overlap_comm: true}\n"
    with pytest.raises(UnknownKeyError, match="accelerate silently discards") as caught:
        read(text)
    assert caught.value.key == "deepspeed_config.overlap_comm"
