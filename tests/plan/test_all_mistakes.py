"""All mistakes of a file are reported at once, for every kind of file."""

from __future__ import annotations

import json

import pytest

from zerotune import DeepSpeedPlan, Platform, RunFacts
from zerotune.errors import PlanError
from zerotune.plan.accelerate import OF_THE_SCRIPT
from zerotune.plan.context import Context
from zerotune.plan.plan import raised
from zerotune.plan.read import plan_from_mapping, read_partly

FOUR = {
    "train_batch_siz": 8,
    "zero_optimization": {"stage": 5, "foo": 1, "offload_optimizer": {"devise": "cpu"}},
    "bf16": {"enabled": "ja"},
}
KEYS = [
    "train_batch_siz",
    "zero_optimization.stage",
    "zero_optimization.foo",
    "zero_optimization.offload_optimizer.devise",
    "bf16.enabled",
]
YAML = """\
distributed_type: DEEPSPEED
mixed_precision: fp9
num_processes: two
nonsense: 1
deepspeed_config:
  zero_stage: 7
  gradient_accumulation_steps: x
  offload_optimizer_device: disc
  zero3_init_flag: maybe
  more_nonsense: 2
"""


def mistakes_of(read):
    with pytest.raises(PlanError) as caught:
        read()
    return [error.key for error in caught.value.each()]


def inspected(plan, mistakes=()):
    return plan.inspect(
        Context(),
        resolve_in=Context(platform=Platform.synthetic("cuda"), run=RunFacts(lr=1e-4)),
        mistakes=mistakes,
    )


def test_all_mistakes_of_a_configuration_are_reported(tmp_path):
    assert mistakes_of(lambda: DeepSpeedPlan.from_dict(FOUR)) == KEYS
    assert mistakes_of(lambda: DeepSpeedPlan.from_json(json.dumps(FOUR))) == KEYS
    file = tmp_path / "ds.yaml"
    file.write_text(json.dumps(FOUR))
    assert mistakes_of(lambda: DeepSpeedPlan.load(file)) == KEYS


def test_all_mistakes_of_a_trainers_file_are_reported():
    around = {"mixed_precision": "fp9", "train_batch_size": 0, "deepspeed_config": FOUR}
    assert mistakes_of(lambda: DeepSpeedPlan.from_dict(around)) == [
        *KEYS, "train_batch_size", "launch.mixed_precision",
    ]  # fmt: skip


def test_all_mistakes_of_an_accelerate_yaml_are_reported(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(YAML)
    assert sorted(mistakes_of(lambda: DeepSpeedPlan.load(file))) == [
        "deepspeed_config.more_nonsense",
        "gradient_accumulation_steps",
        "launch.mixed_precision",
        "launch.num_processes",
        "launch.zero3_init_flag",
        "nonsense",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.stage",
    ]


def test_all_mistakes_of_overrides_are_reported():
    plan = DeepSpeedPlan.build()
    asked = {"zero_stage": 9, "gradient_clipping": -1, "launch.num_processes": "two"}
    assert len(mistakes_of(lambda: plan.with_overrides(asked))) == 3


def test_deprecated_forms_are_reported_like_other_mistakes():
    config = {
        "zero_optimization": {
            "stage": 2, "cpu_offload": "perhaps", "cpu_offload_params": True,
            "offload_param": {"device": "nvme", "ratio": 0.5}, "overlap_comm": 3,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "zero3_save_16bit_model": True,
        "steps_per_print": 0,
    }  # fmt: skip
    assert mistakes_of(lambda: DeepSpeedPlan.from_dict(config)) == [
        "zero3_save_16bit_model",
        "zero_optimization.cpu_offload",
        "zero_optimization.cpu_offload_params",
        "zero_optimization.offload_param.ratio",
        "zero_optimization.overlap_comm",
        "steps_per_print",
    ]


def test_all_refusals_of_resolution_are_reported():
    plan = DeepSpeedPlan.from_dict(
        {
            "train_batch_size": 3,
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}},
        }
    )
    assert mistakes_of(lambda: plan.resolve(platform=Platform.synthetic("cuda"))) == [
        "train_batch_size", "fp16.enabled", "zero_optimization.offload_optimizer.device",
    ]  # fmt: skip


def test_all_refusals_of_optimizer_and_schedule_are_reported():
    plan = DeepSpeedPlan.from_dict(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": "x", "eps": -1, "foo": 3}},
            "scheduler": {"type": "WarmupLR", "params": {"bar": 1, "warmup_num_steps": "y"}},
        }
    )
    assert [each.error.key for each in inspected(plan).refusals] == [
        "optimizer.params.foo", "optimizer.params.lr", "optimizer.params.eps",
        "scheduler.params.bar", "scheduler.params.warmup_num_steps",
    ]  # fmt: skip
    plan = plan.with_overrides({"optimizer.type": "AdamWW", "scheduler.type": "Warm"})
    assert {each.error.key for each in inspected(plan).refusals} == {
        "optimizer.type", "scheduler.type",
    }  # fmt: skip


def partly(config):
    return read_partly(
        lambda log: raised(DeepSpeedPlan, plan_from_mapping(config, log, source="dict"))
    )


@pytest.mark.parametrize("rest", [{}, {"gradient_accumulation_steps": 2}])
def test_rules_are_applied_to_the_valid_rest(rest):
    config = {
        "train_batch_size": 7, "train_micro_batch_size_per_gpu": 3, **rest,
        "zero_optimization": {"stage": 2, "foo": 1, "offload_optimizer": {"device": "nvme"}},
    }  # fmt: skip
    plan, mistakes = partly(config)
    assert [error.key for error in mistakes] == ["zero_optimization.foo"]
    found = inspected(plan, mistakes)
    assert {finding.key for finding in found.findings} == {
        "train_batch_size", "zero_optimization.offload_optimizer.device",
    }  # fmt: skip
    assert found.resolved is None


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": "x", "train_micro_batch_size_per_gpu": 3},
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": "x",
         "gradient_accumulation_steps": 4},
        {"zero_optimization": {"stage": 9, "compute_grad_norm": False}, "gradient_clipping": 0},
        {"zero_optimization": {"stage": "three", "offload_optimizer": {"device": "nvme"}}},
        {"bf16": {"enabled": "ja"}, "fp16": {"enabled": True}},
        {"optimizer": {"type": 3, "params": {"momentum": 0.9}}},
    ],
)  # fmt: skip
def test_one_mistake_causes_no_others(config):
    plan, mistakes = partly(config)
    assert len(mistakes) == 1
    found = inspected(plan, mistakes)
    assert (found.findings, found.refusals) == ((), ())


def test_many_unknown_keys_stop_after_twenty_mistakes():
    config = {f"key{number}": 1 for number in range(100_000)} | {"train_batch_size": 1}
    assert len(mistakes_of(lambda: DeepSpeedPlan.from_dict(config))) == 20


READERS = {
    "a file": lambda path, keys: DeepSpeedPlan.load(path / "ds.json", also_known=keys),
    "JSON": lambda path, keys: DeepSpeedPlan.from_json(path / "ds.json", also_known=keys),
    "text": lambda path, keys: DeepSpeedPlan.from_json(
        (path / "ds.json").read_text(), also_known=keys
    ),
    "a trainer's": lambda path, keys: DeepSpeedPlan.load(path / "config.json", also_known=keys),
    "YAML": lambda path, keys: DeepSpeedPlan.from_yaml(path / "ds.yaml", also_known=keys),
    "accelerate's": lambda path, keys: DeepSpeedPlan.load(path / "a.yaml", also_known=keys),
    "a block": lambda path, keys: DeepSpeedPlan.load(path / "b.yaml", also_known=keys),
    "settings": lambda _, keys: DeepSpeedPlan.from_accelerate(
        {"distributed_type": "DEEPSPEED", "deepspeed_config": NEW}, also_known=keys
    ),
}
NEW = {"zero_optimization": {"stage": 2, "brand_new": 1}, "also_new": {"a": 1}}
NEW_KEYS = ("zero_optimization.brand_new", "also_new")


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_can_allow_new_keys(reader, tmp_path):
    around = {"distributed_type": "DEEPSPEED"}
    (tmp_path / "ds.json").write_text(json.dumps(NEW))
    (tmp_path / "config.json").write_text(json.dumps({"deepspeed_config": NEW}))
    (tmp_path / "ds.yaml").write_text(json.dumps(NEW))
    named = {"deepspeed_config_file": "ds.json"}
    (tmp_path / "a.yaml").write_text(json.dumps({**around, "deepspeed_config": named}))
    (tmp_path / "b.yaml").write_text(json.dumps({**around, "deepspeed_config": NEW}))
    plan = READERS[reader](tmp_path, NEW_KEYS)
    left = dict.fromkeys(OF_THE_SCRIPT, "auto") if reader in ("a block", "settings") else {}
    assert plan.to_dict() == {**left, **NEW}
    with pytest.raises(PlanError):
        READERS[reader](tmp_path, ())


def test_a_new_launcher_key_can_be_allowed():
    settings = {"distributed_type": "DEEPSPEED", "newer": 1, "deepspeed_config": {"zero_stage": 2}}
    plan = DeepSpeedPlan.from_accelerate(settings, also_known=["launch.newer"])
    assert plan.launch.extra == {"newer": 1}
