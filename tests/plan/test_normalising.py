from __future__ import annotations

import pytest

from zerotune.errors import PlanConflictError, PlanError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.sections import ZeroSection


def normalised(config):
    plan = DeepSpeedPlan.from_dict(config)
    return plan.to_deepspeed(), plan.decisions


@pytest.mark.parametrize(
    ("written", "becomes", "keys"),
    [
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            ["zero_optimization.cpu_offload"],
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_params": "true"}},
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            ["zero_optimization.cpu_offload_params"],
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": False}},
            {"zero_optimization": {"stage": 2}},
            ["zero_optimization.cpu_offload"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": "cpu", "offload_param": False}},
            {
                "zero_optimization": {
                    "offload_param": {"device": "none"},
                    "offload_optimizer": {"device": "cpu"},
                }
            },
            ["zero_optimization.offload_param", "zero_optimization.offload_optimizer"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "CPU"}}},
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ["zero_optimization.offload_optimizer.device"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": None}}},
            {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
            ["zero_optimization.offload_optimizer.device"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": None}},
            {"zero_optimization": {}},
            ["zero_optimization.offload_optimizer"],
        ),
        (
            {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}},
            {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}},
            ["zero_optimization.stage3_gather_fp16_weights_on_model_save"],
        ),
        (
            {"zero_optimization": {"stage3_param_persitance_threshold": 1e4}},
            {"zero_optimization": {"stage3_param_persistence_threshold": 10_000}},
            [
                "zero_optimization.stage3_param_persitance_threshold",
                "zero_optimization.stage3_param_persistence_threshold",
            ],
        ),
        ({"bfloat16": True}, {"bf16": {"enabled": True}}, ["bfloat16", "bfloat16"]),
        ({"fp16": "auto"}, {"fp16": {"enabled": "auto"}}, ["fp16"]),
        ({"optimizer": "adam"}, {"optimizer": {"type": "adam"}}, ["optimizer"]),
        (
            {"optimizer": {"name": "AdamW", "params": {}}},
            {"optimizer": {"type": "AdamW", "params": {}}},
            ["optimizer.name"],
        ),
        ({"aio": {"thread_count": 2}}, {"aio": {"intra_op_parallelism": 2}}, ["aio.thread_count"]),
        ({"train_batch_size": "32"}, {"train_batch_size": 32}, ["train_batch_size"]),
        ({"amp": {"enabled": False}}, {}, ["amp"]),
        ({"elasticity": False}, {}, ["elasticity"]),
        (
            {"zero_optimization": {"mics_shard_size": -1}},
            {"zero_optimization": {}},
            ["zero_optimization.mics_shard_size"],
        ),
    ],
)
def test_deprecated_and_short_spellings_are_translated_and_recorded(written, becomes, keys):
    result, decisions = normalised(written)
    assert result == becomes
    assert [decision.key for decision in decisions] == keys
    assert normalised(result) == (result, ())


@pytest.mark.parametrize("legacy", [True, False])
def test_legacy_offload_beside_its_section_is_refused_as_deepspeed_does(legacy):
    config = {"zero_optimization": {"cpu_offload": legacy, "offload_optimizer": {"device": "cpu"}}}
    with pytest.raises(PlanConflictError, match="DeepSpeed rejects a file with both"):
        normalised(config)


@pytest.mark.deepspeed
@pytest.mark.parametrize("legacy", [True, False])
def test_deepspeed_refuses_legacy_offload_beside_its_section(legacy):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    with pytest.raises(AssertionError, match="together"):
        DeepSpeedZeroConfig(cpu_offload=legacy, offload_optimizer={"device": "cpu"})


def test_an_enabled_removed_section_is_kept_for_the_rules_to_refuse():
    config = {"amp": {"enabled": True, "opt_level": "O1"}}
    assert normalised(config)[0] == config


def test_a_legacy_value_of_the_wrong_type_is_named():
    with pytest.raises(PlanError) as caught:
        DeepSpeedPlan.from_dict({"zero_optimization": {"cpu_offload": [1]}})
    assert caught.value.key == "zero_optimization.cpu_offload"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"aio": {"thread_count": 2}}, "aio.thread_count"),
        ({"optimizer": {"name": "AdamW"}}, "optimizer.name"),
        (
            {"zero_optimization": {"stage3_param_persitance_threshold": 5}},
            "zero_optimization.stage3_param_persitance_threshold",
        ),
    ],
)
def test_a_spelling_that_deepspeed_does_not_read_is_no_documented_one(config, key):
    (decision,) = DeepSpeedPlan.from_dict(config).decisions
    assert (decision.key, decision.severity) == (key, "warning")
    assert "DeepSpeed does not read this key" in decision.reason


@pytest.mark.deepspeed
def test_deepspeed_reads_the_other_spellings_of_its_keys():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    names = {*fields, *(field.alias for field in fields.values())}
    assert {name for name in ZeroSection.aliases if name not in names} == ZeroSection.unread


def test_a_device_that_deepspeed_rejects_is_reported_as_such():
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}
    (decision,) = DeepSpeedPlan.from_dict(config).decisions
    assert (decision.before, decision.after) == ("gpu", "none")
    assert decision.reason == "DeepSpeed rejects this spelling"


@pytest.mark.parametrize("section", [{"enabled": False}, False, None])
def test_a_removed_section_is_a_warning_even_if_it_is_disabled(section):
    (decision,) = DeepSpeedPlan.from_dict({"amp": section}).decisions
    assert (decision.severity, decision.after) == ("warning", None)
    assert "DeepSpeed 0.19 rejects the key even if disabled" in decision.reason


@pytest.mark.deepspeed
def test_deepspeed_rejects_a_removed_section_even_if_it_is_disabled():
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    with pytest.raises(DeepSpeedConfigError, match="AMP"):
        DeepSpeedConfig({"train_batch_size": 1, "amp": {"enabled": False}})
