from __future__ import annotations

from pathlib import Path

import pytest

from zerotune.errors import PlanConflictError, PlanError
from zerotune.plan import DeepSpeedPlan, RunFacts
from zerotune.plan.context import Context
from zerotune.plan.rules.rule import Finding
from zerotune.plan.rules.table import all_rules
from zerotune.plan.sections import LaunchSection

RULES = {rule.id: rule for rule in all_rules()}
ONE_BATCH = {"train_micro_batch_size_per_gpu": 1}


def zero(**keys):
    return {"zero_optimization": keys}


def find(rule, config, **context) -> list[Finding]:
    return RULES[rule](DeepSpeedPlan.from_dict(config), Context(**context))


def one(rule, config, **context) -> Finding:
    (finding,) = find(rule, config, **context)
    assert finding.rule == rule
    assert finding.severity == RULES[rule].severity
    assert finding.fix
    return finding


def test_every_rule_has_a_unique_id_and_a_sentence():
    assert len(RULES) == len(all_rules())
    for rule in all_rules():
        assert rule.id == rule.id.lower()
        assert rule.summary.endswith(".")
        assert rule.advice.endswith(".")
        assert rule.severity in ("error", "warning", "note")


def test_every_rule_has_a_test():
    here = Path(__file__).parent
    tested = "".join(file.read_text() for file in (Path(__file__), *here.glob("rulebook/test_*")))
    assert [rule for rule in RULES if f'"{rule}"' not in tested] == []


def test_a_plain_plan_has_no_findings():
    assert DeepSpeedPlan.build().check() == ()


def test_batch_triple():
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }
    assert find("batch-triple", config, world_size=1) == []
    finding = one("batch-triple", config, world_size=2)
    assert (finding.key, finding.value) == ("train_batch_size", 8)
    assert isinstance(finding.as_error(), PlanConflictError)


def test_precision_conflict_both_on():
    config = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert one("precision-conflict", config).key == "fp16.enabled"
    assert find("precision-conflict", {"bf16": {"enabled": True}}) == []


@pytest.mark.parametrize(
    ("config", "launched", "conflicts"),
    [
        ({"bf16": {"enabled": True}}, "fp16", True),
        ({"bf16": {"enabled": False}}, "bf16", True),
        ({"bf16": {"enabled": True}}, "fp32", True),
        ({"bf16": {"enabled": True}}, "bf16", False),
        ({"bf16": {"enabled": "auto"}}, "fp16", False),
        ({"bf16": {"enabled": False}}, "fp16", False),
        ({}, "fp8", True),
    ],
)
def test_precision_conflict_with_the_launcher(config, launched, conflicts):
    plan = DeepSpeedPlan(
        bf16=DeepSpeedPlan.from_dict(config).bf16,
        launch=LaunchSection(mixed_precision=launched),
    )
    findings = RULES["precision-conflict"](plan, Context())
    assert [finding.key for finding in findings] == ["launch.mixed_precision"] * conflicts


@pytest.mark.parametrize(("stage", "refused"), [(0, False), (1, True), (2, True), (3, False)])
def test_nvme_optimizer_below_stage_3(stage, refused):
    config = zero(stage=stage, offload_optimizer={"device": "nvme"})
    assert len(find("nvme-optimizer-below-stage-3", config)) == refused
    assert find("nvme-optimizer-below-stage-3", config, uses_deepspeed=False) == []


@pytest.mark.parametrize(
    ("section", "error", "warning"),
    [
        ({"buffer_count": 3}, 1, 0),
        ({"buffer_count": 4}, 0, 0),
        ({"buffer_count": 4, "pipeline_read": True}, 0, 1),
        ({"buffer_count": 8, "pipeline_read": True}, 0, 0),
        ({"buffer_count": 8, "pipeline_read": True, "pipeline_write": True}, 0, 1),
        ({"buffer_count": "auto"}, 0, 0),
        ({}, 0, 0),
    ],
)
def test_swap_buffers_of_an_adam_optimizer(section, error, warning):
    config = zero(stage=3, offload_optimizer={"device": "nvme", **section})
    assert len(find("nvme-optimizer-buffers", config)) == error
    assert len(find("nvme-pipeline-buffers", config)) == warning
    other = {**config, "optimizer": {"type": "Lion"}}
    assert find("nvme-optimizer-buffers", other) == find("nvme-pipeline-buffers", other) == []


@pytest.mark.parametrize(
    ("stage", "ratio", "error", "warning"),
    [(2, 0.5, 1, 0), (2, 1.0, 0, 0), (3, 0.5, 0, 1), (3, 1.0, 0, 0), (1, 0, 1, 0)],
)
def test_partial_offload(stage, ratio, error, warning):
    config = zero(stage=stage, offload_optimizer={"device": "cpu", "ratio": ratio})
    assert len(find("partial-offload-below-stage-3", config)) == error
    assert len(find("partial-offload", config)) == warning


@pytest.mark.parametrize(
    ("device", "ratio", "optimizer", "error"),
    [
        ("cpu", 0.5, None, 0), ("cpu", 0.5, "AdamW", 0), ("cpu", 1.0, "Lion", 0),
        ("cpu", 0.5, "Adam", 1), ("cpu", 0.5, "AdamWBF16States", 1), ("nvme", 0.5, "AdamW", 1),
    ],
)  # fmt: skip
def test_only_adamw_in_host_memory_can_be_partially_offloaded(device, ratio, optimizer, error):
    config = zero(stage=3, offload_optimizer={"device": device, "ratio": ratio})
    if optimizer is not None:
        config["optimizer"] = {"type": optimizer}
    assert len(find("partial-offload-optimizer", config)) == error


@pytest.mark.parametrize(
    "key",
    [
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
        "fp16.fp16_master_weights_and_grads",
    ],
)
def test_low_precision_master_weights_are_refused(key):
    section, name = key.split(".")
    config = {
        **zero(stage=2, offload_optimizer={"device": "cpu"}),
        section: {"enabled": True, name: True},
    }
    assert one("bf16-master-weights", config).key == key
    config[section][name] = False
    assert find("bf16-master-weights", config) == []


def test_removed_sections_are_refused():
    config = {"amp": {"enabled": True}, **zero(stage=3, mics_shard_size=4)}
    keys = {finding.key for finding in find("removed-section", config)}
    assert keys == {"amp", "zero_optimization.mics_shard_size"}


def test_unknown_keys_set_in_code_are_found():
    plan = DeepSpeedPlan(extra={"train_batch": 3, "_note": 1, "wandb": {}})
    (finding,) = RULES["unknown-key"](plan, Context())
    assert finding.key == "train_batch"
    assert "'train_batch_size'" in finding.fix


def test_zenflow_is_refused_only_for_models_with_convolutions(unet):
    config = zero(stage=2, zenflow={"topk_ratio": 0.1})
    assert "conv_in.weight" in one("zenflow-convolutions", config, model=unet).reason
    assert find("zenflow-convolutions", config) == []


def test_offload_at_stage_0():
    config = zero(stage=0, offload_optimizer={"device": "cpu"}, offload_param={"device": "none"})
    assert one("offload-at-stage-0", config).key == "zero_optimization.offload_optimizer"
    assert one("offload-at-stage-0", config).after is None


@pytest.mark.parametrize(("stage", "warned"), [(1, 1), (2, 1), (3, 0)])
def test_offload_param_below_stage_3(stage, warned):
    config = zero(stage=stage, offload_param={"device": "nvme"})
    assert len(find("offload-param-below-stage-3", config)) == warned


def test_zero_plus_plus_below_stage_3():
    config = zero(stage=2, zero_quantized_weights=True, zero_hpz_partition_size=1)
    finding = one("zero-plus-plus-below-stage-3", config)
    assert finding.key == "zero_optimization.zero_quantized_weights"
    assert find("zero-plus-plus-below-stage-3", zero(stage=3, zero_quantized_weights=True)) == []


@pytest.mark.parametrize("name", ["OneBitAdam", "1bit", "ZeroOneAdam", "onebit_lamb", "AdamW"])
def test_one_bit_optimizers(name):
    expected = name not in ("1bit", "AdamW")
    assert bool(find("one-bit-optimizer", {"optimizer": {"type": name}})) == expected


def test_accumulation_and_clipping_set_twice():
    plan = DeepSpeedPlan.from_dict(
        {
            "deepspeed_config": {
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 1.0,
            },
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5,
        }
    )
    found = {
        finding.key: finding
        for name in ("accumulation-set-twice", "clipping-set-twice")
        for finding in RULES[name](plan, Context())
    }
    assert found.keys() == {
        "launch.gradient_accumulation_steps",
        "launch.gradient_clipping",
    }
    assert "is also set, to 4," in found["launch.gradient_accumulation_steps"].reason


def test_parameters_offloaded_alone():
    config = zero(stage=3, offload_param={"device": "cpu"})
    assert one("param-offload-alone", config).severity == "note"
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    assert find("param-offload-alone", config) == []


def test_no_micro_batch():
    assert one("micro-batch-unset", {"gradient_accumulation_steps": 4}).severity == "note"
    assert find("micro-batch-unset", ONE_BATCH) == []
    assert find("micro-batch-unset", {}, run=RunFacts(micro_batch_size=1)) == []


def test_check_reports_errors_first_and_raises_nothing():
    plan = DeepSpeedPlan.from_dict(
        {
            **zero(stage=2, offload_param={"device": "cpu"}, offload_optimizer={"device": "nvme"}),
            "bf16": {"enabled": True},
            "fp16": {"enabled": True},
            "gradient_clipping": 1.0,
        }
    )
    severities = [finding.severity for finding in plan.check()]
    assert severities == ["error", "error", "warning", "note"]


@pytest.mark.parametrize(
    "config",
    [
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        zero(stage=1, offload_optimizer={"device": "nvme"}),
        {"amp": {"enabled": True}},
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
    ],
)
def test_resolve_raises_the_error_of_a_rule_for_impossible_combinations(config, cuda):
    plan = DeepSpeedPlan.from_dict(config)
    first = plan.check(platform=cuda)[0]
    with pytest.raises(PlanError) as caught:
        plan.resolve(platform=cuda)
    assert caught.value.key == first.key
    assert caught.value.fix == first.fix
    assert str(caught.value) in str(first)
