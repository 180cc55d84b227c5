from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import yaml

from tests.plan.accelerate_runs import ACCUMULATION, MICRO, what_runs
from zerotune.errors import InvalidValueError
from zerotune.plan import DeepSpeedPlan, plan_document
from zerotune.plan.sections import LaunchSection

# Print what `accelerate launch` sets for a configuration file, and the configuration the script
# gets.
LAUNCH = """
import json, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from accelerate.commands import launch
from accelerate.utils import DeepSpeedPlugin
found = []
for file in sys.argv[1:]:
    arguments = launch.launch_command_parser().parse_args(["--config_file", file, "script.py"])
    sent = {}
    def take(prepared):
        _, environment = launch.prepare_deepspeed_cmd_env(prepared)
        sent.update({k: v for k, v in environment.items() if k.startswith("ACCELERATE_")})
    launch.deepspeed_launcher = take
    launch.launch_command(arguments)
    os.environ.update(sent)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(sent["ACCELERATE_MIXED_PRECISION"])
    config = {k: v for k, v in plugin.deepspeed_config.items() if k != "steps_per_print"}
    found.append([sent, config])
    for name in sent:
        del os.environ[name]
print("RESULT" + json.dumps(found))
"""
FULL = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/mnt/a folder"},
        "reduce_bucket_size": 30000000,
    },
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
}


def accelerate(*files):
    """Return per file the variables of accelerate's launcher, and its plugin's configuration."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition("RESULT")[2])


def with_launch(plan, launch):
    return plan.with_overrides({"launch": launch})


def written(config, launch=None, lossy=()):
    plan = with_launch(DeepSpeedPlan.from_dict(config), launch or {})
    return plan, plan_document(plan, "accelerate", lossy=lossy)


def reread(document, tmp_path):
    file = tmp_path / "written.yaml"
    file.write_text(document.text)
    return DeepSpeedPlan.from_yaml(file)


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": "auto"},
        {"zero_optimization": {"stage": "auto"}, "train_micro_batch_size_per_gpu": 2},
        {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"},
        {"zero_optimization": {"stage": 2}, "train_batch_size": 8},
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": True}},
        {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {}}},
        FULL,
    ],
)
def test_a_configuration_is_written_whole(config, tmp_path):
    plan, document = written(config)
    block = yaml.safe_load(document.text)["deepspeed_config"]
    assert list(block) == ["deepspeed_config_file"]
    held = json.loads(block["deepspeed_config_file"])
    assert held == {"zero_optimization": {}, **config}
    assert document.decisions == ()
    assert reread(document, tmp_path) == plan


@pytest.mark.parametrize(
    "config",
    [{}, {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}],
)
def test_batch_sizes_that_the_plan_leaves_open_are_taken_from_the_script(config, tmp_path):
    plan, document = written(config)
    (tmp_path / "written.yaml").write_text(document.text)
    runs = what_runs("--num_processes", "1", "--config_file", str(tmp_path / "written.yaml"))
    steps = config.get("gradient_accumulation_steps", ACCUMULATION)
    assert runs["train_micro_batch_size_per_gpu"] == MICRO
    assert runs["gradient_accumulation_steps"] == steps
    assert [one.key for one in document.decisions] == ["train_batch_size"]
    sizes = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    held = DeepSpeedPlan.from_dict({**dict.fromkeys(sizes, "auto"), **plan.to_dict()})
    assert reread(document, tmp_path) == held


def test_a_configuration_for_several_machines_has_no_characters_that_shells_drop(tmp_path):
    plan, document = written(FULL, {"num_machines": 2})
    text = yaml.safe_load(document.text)["deepspeed_config"]["deepspeed_config_file"]
    assert not set(" ;<>\n") & set(text)
    assert reread(document, tmp_path) == plan


@pytest.mark.parametrize(
    ("config", "precision", "becomes", "severity"),
    [
        ({}, "bf16", {"bf16": {"enabled": True}}, "note"),
        ({}, "no", {}, "note"),
        ({"bf16": {"enabled": "auto"}}, "bf16", {"bf16": {"enabled": True}}, "note"),
        (
            {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0}},
            "fp16",
            {"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 0}},
            "note",
        ),
        ({"bf16": {"enabled": "auto"}}, "no", {"bf16": {"enabled": False}}, "note"),
        ({"fp16": {"enabled": True}}, "bf16", {"fp16": {"enabled": True}}, "warning"),
        ({"bf16": {"enabled": False}}, "bf16", {"bf16": {"enabled": False}}, "warning"),
        ({}, "fp8", {}, "warning"),
    ],
)
def test_a_launcher_precision_moves_into_the_configuration(
    config, precision, becomes, severity, tmp_path
):
    big = {"zero_optimization": {"stage": 2}, "train_batch_size": 8}
    lossy = ["mixed_precision"] if precision == "fp8" else []
    _, document = written({**big, **config}, {"mixed_precision": precision}, lossy)
    content = yaml.safe_load(document.text)
    assert "mixed_precision" not in content
    held = json.loads(content["deepspeed_config"]["deepspeed_config_file"])
    assert held == {**big, **becomes}
    (decision,) = document.decisions
    assert (decision.key, decision.severity) == ("launch.mixed_precision", severity)
    again = plan_document(reread(document, tmp_path), "accelerate")
    assert (again.text, again.decisions) == (document.text, ())


def test_an_auto_precision_is_still_auto_when_zerotune_reads_the_file(tmp_path):
    _, document = written({"train_batch_size": 8}, {"mixed_precision": "auto"})
    assert reread(document, tmp_path).precision == "auto"
    assert [d.key for d in document.decisions] == ["launch.mixed_precision"]


def test_trainer_settings_beside_the_configuration_are_written_into_it():
    launch = {"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    config = {**batch, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    _, document = written(config, launch)
    block = yaml.safe_load(document.text)["deepspeed_config"]
    held = json.loads(block["deepspeed_config_file"])
    assert held == {**config, "gradient_accumulation_steps": 4}
    assert [(d.key, d.before, d.after) for d in document.decisions] == [
        ("launch.gradient_accumulation_steps", 4, 4),
        ("launch.gradient_clipping", 0.5, None),
    ]


def test_a_setting_that_accelerate_refuses_is_left_out_only_if_named_in_lossy():
    launch = LaunchSection(extra={"brand_new": 1})
    plan = DeepSpeedPlan(train_batch_size=8, launch=launch)
    with pytest.raises(InvalidValueError, match="brand_new"):
        plan_document(plan, "accelerate")
    document = plan_document(plan, "accelerate", lossy=["launch.brand_new"])
    assert "brand_new" not in document.text
    assert [d.severity for d in document.decisions] == ["warning"]


def test_changes_for_accelerate_are_logged(caplog):
    config = {"train_batch_size": 31}
    plan = with_launch(DeepSpeedPlan.from_dict(config), {"mixed_precision": "fp8"})
    with pytest.raises(InvalidValueError, match="fp8"):
        plan.to_yaml()
    plan.to_yaml(lossy=["mixed_precision"])
    assert "launch.mixed_precision: 'fp8' -> unset" in caplog.text


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Run the real accelerate on a written file."""
    if not all(importlib.util.find_spec(name) for name in ("accelerate", "deepspeed")):
        pytest.skip("needs accelerate and deepspeed")
    file = tmp_path_factory.mktemp("accelerate") / "plan.yaml"
    launch = {"num_processes": 1, "mixed_precision": "bf16"}
    with_launch(DeepSpeedPlan.from_dict(FULL), launch).save(file)
    return accelerate(file)


def test_accelerate_loads_the_written_file(launched):
    ((_, config),) = launched
    assert config == {**FULL, "fp16": {"enabled": False}}


def test_launch_settings_are_written_where_accelerate_reads_them(tmp_path):
    launch = {
        "zero3_init_flag": False,
        "deepspeed_moe_layer_cls_names": "Block",
        "num_machines": 2,
        "deepspeed_hostfile": "hosts",
        "gpu_ids": "0,1",
    }
    plan, document = written({"train_batch_size": 8, "zero_optimization": {"stage": 3}}, launch)
    content = yaml.safe_load(document.text)
    block = content.pop("deepspeed_config")
    assert content == {"distributed_type": "DEEPSPEED", "num_machines": 2, "gpu_ids": "0,1"}
    assert block.keys() - launch.keys() == {"deepspeed_config_file"}
    assert document.decisions == ()
    assert reread(document, tmp_path) == plan
