from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import yaml

from zerotune.errors import InvalidValueError
from zerotune.plan import DeepSpeedPlan, plan_document
from zerotune.plan.accelerate import OF_THE_SCRIPT
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


def test_reference_c_is_written_with_accelerates_own_keys(reference_c, tmp_path):
    (tmp_path / "c.yaml").write_text(reference_c)
    plan = DeepSpeedPlan.from_yaml(tmp_path / "c.yaml")
    document = plan_document(plan, "accelerate")
    assert yaml.safe_load(document.text) == yaml.safe_load(reference_c)
    assert document.decisions == ()
    assert reread(document, tmp_path) == plan


def test_settings_with_an_accelerate_key_are_written_with_it(tmp_path):
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.7,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    launch = {
        "mixed_precision": "no",
        "zero3_init_flag": False,
        "deepspeed_moe_layer_cls_names": "Block",
        "num_machines": 2,
        "deepspeed_hostfile": "hosts",
        "gpu_ids": "0,1",
    }
    plan, document = written(config, launch)
    assert yaml.safe_load(document.text) == {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "no",
        "num_machines": 2,
        "gpu_ids": "0,1",
        "deepspeed_config": {
            "zero_stage": 3,
            "offload_optimizer_device": "cpu",
            "offload_param_device": "none",
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.7,
            "zero3_save_16bit_model": True,
            "zero3_init_flag": False,
            "deepspeed_moe_layer_cls_names": "Block",
            "deepspeed_hostfile": "hosts",
        },
    }
    assert document.decisions == ()
    assert reread(document, tmp_path) == plan


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"zero_optimization": {"stage": "auto"}},
        {"zero_optimization": {"stage": 2}, "gradient_clipping": 0},
        {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"},
        {"zero_optimization": {"stage": 2}, "train_batch_size": 8},
        {"zero_optimization": {"stage": 2, "overlap_comm": True}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}},
        FULL,
    ],
)
def test_settings_without_an_accelerate_key_are_written_as_a_whole_configuration(config, tmp_path):
    plan, document = written(config)
    block = yaml.safe_load(document.text)["deepspeed_config"]
    assert list(block) == ["deepspeed_config_file"]
    held = json.loads(block["deepspeed_config_file"])
    assert held == {"zero_optimization": {}, **config}
    assert document.decisions == ()
    assert reread(document, tmp_path) == plan


def test_auto_settings_of_the_script_are_left_out_of_the_block(tmp_path):
    plan, document = written(
        {**dict.fromkeys(OF_THE_SCRIPT, "auto"), "zero_optimization": {"stage": 2}}
    )
    assert yaml.safe_load(document.text)["deepspeed_config"] == {"zero_stage": 2}
    assert document.decisions == ()
    assert reread(document, tmp_path) == plan


def test_unset_settings_are_reported_as_left_to_the_script(tmp_path, cuda):
    plan, document = written({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5})
    (told,) = document.decisions
    assert (told.key, told.before, told.after) == ("train_batch_size", None, "auto")
    assert "train_micro_batch_size_per_gpu, gradient_accumulation_steps" in told.reason
    again = reread(document, tmp_path).resolve(platform=cuda)
    assert again.to_deepspeed() == plan.resolve(platform=cuda).to_deepspeed()


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
def test_a_launcher_precision_moves_into_the_whole_configuration(
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
    _, document = written({"zero_optimization": {"stage": 2}}, {"mixed_precision": "auto"})
    assert reread(document, tmp_path).precision == "auto"
    assert [d.key for d in document.decisions] == ["launch.mixed_precision"]


def test_trainer_settings_beside_the_configuration_are_written_into_the_block():
    launch = {"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    config = {**batch, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    _, document = written(config, launch)
    block = yaml.safe_load(document.text)["deepspeed_config"]
    assert block == {"zero_stage": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    assert [(d.key, d.before, d.after) for d in document.decisions] == [
        ("launch.gradient_accumulation_steps", 4, 4),
        ("launch.gradient_clipping", 0.5, None),
    ]


def test_a_setting_that_accelerate_refuses_is_left_out_only_if_named_in_lossy():
    plan = DeepSpeedPlan(launch=LaunchSection(extra={"brand_new": 1}))
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


SMALL = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.7,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
BY_HAND = (
    "{distributed_type: DEEPSPEED, num_processes: 1, deepspeed_config: {zero_stage: 3,"
    " gradient_clipping: 0, offload_param_device: nvme, offload_param_nvme_path: /mnt/a}}"
)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Run the real accelerate on both written forms, and on one written by hand."""
    if not all(importlib.util.find_spec(name) for name in ("accelerate", "deepspeed")):
        pytest.skip("needs accelerate and deepspeed")
    folder = tmp_path_factory.mktemp("accelerate")
    launch = {"num_processes": 1, "mixed_precision": "bf16"}
    plans = [with_launch(DeepSpeedPlan.from_dict(each), launch) for each in (SMALL, FULL)]
    files = [plan.save(folder / f"{n}.yaml").paths[0] for n, plan in enumerate(plans)]
    (folder / "hand.yaml").write_text(BY_HAND)
    return plans, accelerate(*files, folder / "hand.yaml")


def test_accelerate_loads_the_written_file(launched):
    _, ((_, of_block), (_, of_whole), _) = launched
    assert of_block["zero_optimization"]["stage"] == 3
    assert of_block["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert of_block["gradient_accumulation_steps"] == 2
    assert of_block["gradient_clipping"] == 0.7
    assert of_block["bf16"] == {"enabled": True}
    assert of_whole == {**FULL, "fp16": {"enabled": False}}


def test_accelerate_would_lose_the_settings_that_are_never_written_as_keys(launched):
    _, (_, _, (sent, config)) = launched
    assert not [name for name in sent if "NVME_PATH" in name]
    assert config["zero_optimization"]["offload_param"]["nvme_path"] == "none"
    assert "gradient_clipping" not in config


def test_a_block_only_setting_is_reported_when_training_without_deepspeed():
    settings = {"distributed_type": "NO", "deepspeed_hostfile": None, "deepspeed_config": {}}
    plan = DeepSpeedPlan.from_accelerate(settings)
    document = plan_document(plan, "accelerate", lossy=["deepspeed_hostfile"])
    assert "deepspeed_hostfile" not in document.text
    assert [(each.key, each.before) for each in document.decisions] == [
        ("launch.deepspeed_hostfile", None)
    ]
