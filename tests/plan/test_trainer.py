"""Trainers' files, read as transformers' ``HfTrainerDeepSpeedConfig`` fills its configuration."""

from __future__ import annotations

import copy
import dataclasses
import json
from types import SimpleNamespace

import pytest

from zerotune.errors import PlanConflictError
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform

AUTOMATIC = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
        ),
    },
}
TRAINED = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_grad_norm": 0.5,
    "max_steps": 1000,
    "num_train_epochs": 3,
}


def filled_by_transformers(config, trained):
    """Return the configuration that Hugging Face's trainer passes to DeepSpeed."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    defaults = {each.name: each.default for each in dataclasses.fields(TrainingArguments)}
    arguments = SimpleNamespace(**{**defaults, **trained, "world_size": 1})
    arguments.get_warmup_steps = lambda steps: TrainingArguments.get_warmup_steps(arguments, steps)
    filling = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    filling.trainer_config_process(arguments)
    filling.trainer_config_finalize(arguments, None, trained["max_steps"])
    return filling.config


def settled(plan):
    return plan.resolve(platform=Platform.synthetic("cuda"))


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "trained",
    [
        {"fp16": True, "learning_rate": 3e-5, "weight_decay": 0.1, "adam_beta2": 0.95,
         "warmup_steps": 100},
        {"bf16": True, "adam_beta1": 0.8, "adam_epsilon": 1e-6, "warmup_steps": 0},
        {"bf16": False, "fp16": False, "learning_rate": 1e-3, "warmup_steps": 7},
    ],
)  # fmt: skip
def test_auto_is_filled_as_by_hugging_faces_trainer(tmp_path, trained):
    file = tmp_path / "args.json"
    file.write_text(json.dumps({**TRAINED, **trained, "deepspeed": AUTOMATIC}))
    theirs = filled_by_transformers(AUTOMATIC, {**TRAINED, **trained})
    ours = settled(DeepSpeedPlan.load(file))
    assert ours.micro_batch_size == theirs["train_micro_batch_size_per_gpu"]
    assert ours.gradient_accumulation_steps == theirs["gradient_accumulation_steps"]
    assert ours.plan.gradient_clipping == theirs["gradient_clipping"]
    on = {name for name in ("bf16", "fp16") if theirs[name]["enabled"]}
    assert {ours.precision} == (on or {"fp32"})
    for name in ("optimizer", "scheduler"):
        params = getattr(ours, name).params
        for key, value in theirs[name]["params"].items():
            assert params[key] == (tuple(value) if key == "betas" else value), key


def read(tmp_path, content, name="config.json"):
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return DeepSpeedPlan.load(tmp_path / name)


AXOLOTL = """
base_model: x
micro_batch_size: 4
gradient_accumulation_steps: 2
bf16: auto
fp16:
optimizer: adamw_torch
learning_rate: 2e-5
weight_decay: 0.1
adam_beta2: 0.95
lr_scheduler: cosine
warmup_steps: 10
deepspeed: ds.json
"""


def test_the_optimizer_that_the_trainer_creates_is_the_plans(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    plan = read(tmp_path, AXOLOTL, "run.yaml")
    assert plan.train_micro_batch_size_per_gpu == 4
    assert plan.optimizer.to_dict() == {
        "type": "AdamW",
        "params": {"lr": 2e-5, "weight_decay": 0.1, "betas": [0.9, 0.95]},
    }
    assert settled(plan).precision == "bf16"


def test_what_is_not_read_is_reported(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    plan = read(tmp_path, AXOLOTL, "run.yaml")
    found = {each.key: each for each in plan.decisions if each.reason.startswith("not read")}
    assert {key for key, each in found.items() if each.severity == "warning"} == {
        "lr_scheduler",
        "warmup_steps",
    }
    (rest,) = (each for each in found.values() if each.severity == "note")
    assert rest.before == "base_model"


def test_numbers_in_the_configuration_take_precedence_over_the_trainers(tmp_path):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    plan = read(tmp_path, {"deepspeed_config": {"optimizer": optimizer}, "learning_rate": 2e-5})
    assert plan.optimizer.params["lr"] == 1e-4
    (found,) = (each for each in plan.decisions if each.key == "optimizer.params.lr")
    assert (found.severity, found.before, found.after) == ("warning", 2e-5, 1e-4)
    same = read(tmp_path, {"deepspeed_config": {"optimizer": optimizer}, "learning_rate": 1e-4})
    assert same.decisions == ()


def test_an_optimizer_that_zerotune_lacks_is_reported(tmp_path):
    content = {"deepspeed": {}, "learning_rate": 1e-4, "optim": "adamw_apex_quantum"}
    plan = read(tmp_path, content)
    assert plan.optimizer.type == "AdamW"
    (found,) = (each for each in plan.decisions if each.key == "optim")
    assert found.severity == "warning"
    assert "the plan uses AdamW" in found.reason


def test_two_precisions_are_a_conflict(tmp_path):
    with pytest.raises(PlanConflictError, match="only one precision") as caught:
        read(tmp_path, {"deepspeed": {}, "bf16": True, "fp16": True})
    assert caught.value.key == "fp16"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_changed_precision_is_saved_to_a_file_of_its_own(tmp_path, precision):
    content = {"deepspeed": {}, "bf16": False, "fp16": True, "learning_rate": 1e-4}
    plan = read(tmp_path, content)
    assert plan.launch.mixed_precision == "fp16"
    changed = plan.with_overrides({"mixed_precision": precision})
    changed.save(tmp_path / "plan.json")
    again = DeepSpeedPlan.load(tmp_path / "plan.json")
    assert settled(again).precision == precision
