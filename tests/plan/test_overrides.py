from __future__ import annotations

import pytest

from zerotune.errors import InvalidValueError, PlanConflictError, PlanError, UnknownKeyError
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.read import SHORT_NAMES
from zerotune.plan.sections import LaunchSection, ZeroSection

START = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "stage3_prefetch_bucket_size": 5,
    },
    "fp16": {"enabled": True, "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "eps": 1e-8}},
}


@pytest.fixture
def plan() -> DeepSpeedPlan:
    return DeepSpeedPlan.from_dict(START)


def changed(**sections):
    return {**START, **sections}


@pytest.mark.parametrize(
    ("overrides", "path", "before", "after"),
    [
        ({"zero_optimization.stage": 3}, "zero_optimization.stage", 2, 3),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", 2, 3),
        ({"zero_stage": 3}, "zero_optimization.stage", 2, 3),
        ({"stage": 3}, "zero_optimization.stage", 2, 3),
        (
            {"offload_optimizer_device": "nvme"},
            "zero_optimization.offload_optimizer.device",
            "cpu",
            "nvme",
        ),
        ({"offload_param": "cpu"}, "zero_optimization.offload_param.device", None, "cpu"),
        (
            {"zero_optimization.offload_param": "cpu"},
            "zero_optimization.offload_param.device",
            None,
            "cpu",
        ),
        ({"overlap_comm": False}, "zero_optimization.overlap_comm", None, False),
        ({"micro_batch_size": 4}, "train_micro_batch_size_per_gpu", 1, 4),
        ({"max_grad_norm": 0.5}, "gradient_clipping", None, 0.5),
        ({"learning_rate": 3e-5}, "optimizer.params.lr", 1e-4, 3e-5),
        ({"optimizer": "Lion"}, "optimizer.type", "AdamW", "Lion"),
        ({"optimizer.name": "Lion"}, "optimizer.type", "AdamW", "Lion"),
        (
            {"prefetch_bucket_size": 7},
            "zero_optimization.stage3_prefetch_bucket_size",
            5,
            7,
        ),
        ({"num_processes": 2}, "launch.num_processes", None, 2),
        ({"offload_param_path": "/mnt/x"}, "launch.offload_param_path", None, "/mnt/x"),
        ({"fp16": False}, "fp16.enabled", True, False),
    ],
)
def test_a_setting_can_be_overridden_under_any_of_its_names(plan, overrides, path, before, after):
    new = plan.with_overrides(overrides)
    (decision,) = new.decisions
    assert (decision.key, decision.before, decision.after) == (path, before, after)
    assert new != plan
    node = {**new.to_deepspeed(), "launch": new.launch.to_dict() if new.launch else {}}
    for part in path.split("."):
        node = node[part]
    assert node == after
    assert plan.to_deepspeed() == START


def test_an_override_keeps_the_other_settings_of_the_section(plan):
    new = plan.with_overrides({"optimizer": {"type": "Lion", "params": {"lr": 1}}})
    assert new.to_deepspeed() == changed(
        optimizer={"type": "Lion", "params": {"lr": 1, "eps": 1e-8}}
    )


@pytest.mark.parametrize("name", ["optimizer", "fp16", "zero_optimization"])
def test_null_removes_a_setting(plan, name):
    new = plan.with_overrides({name: None})
    assert name not in new.to_deepspeed()
    assert [d.after for d in new.decisions] == [None]
    assert plan.with_overrides({"optimizer.params.eps": None}).optimizer.params == {"lr": 1e-4}


@pytest.mark.parametrize(
    ("asked", "precision", "bf16", "fp16"),
    [
        ("bf16", "bf16", True, False),
        ("fp16", "fp16", False, True),
        ("no", "fp32", False, False),
        ("auto", "auto", "auto", None),
    ],
)
def test_overriding_the_precision_replaces_all_its_settings(asked, precision, bf16, fp16):
    start = DeepSpeedPlan.from_dict(START).with_overrides({"launch.mixed_precision": "fp16"})
    new = start.with_overrides({"mixed_precision": asked})
    assert new.precision == precision
    assert new.bf16.enabled == bf16
    assert new.fp16.enabled == fp16
    assert new.fp16.loss_scale == 0
    assert new.launch is None or new.launch.mixed_precision is None
    assert not [each for each in new.check() if each.rule == "precision-conflict"]


def test_a_swap_folder_is_set_only_for_swapped_parts(plan):
    nvme = plan.with_overrides({"zero_stage": 3, "offload_param": "nvme"})
    zero = nvme.with_overrides({"nvme_path": "/mnt/x"}).zero_optimization
    assert zero.offload_param.nvme_path == "/mnt/x"
    assert zero.offload_optimizer.nvme_path is None
    with pytest.raises(PlanConflictError, match="offloads nothing to NVMe"):
        plan.with_overrides({"nvme_path": "/mnt/x"})


def test_numbers_as_text_are_normalised_and_recorded_after_the_override(plan):
    new = plan.with_overrides({"reduce_bucket_size": "5e8"})
    assert new.zero_optimization.reduce_bucket_size == 500_000_000
    assert [d.after for d in new.decisions] == ["5e8", 500_000_000]


def test_an_override_without_effect_is_not_recorded(plan):
    new = plan.with_overrides({"zero_stage": 2, "optimizer": "AdamW"})
    assert new == plan
    assert new.decisions == ()


def test_conflicting_overrides_of_one_setting_are_refused(plan):
    assert plan.with_overrides({"zero_stage": 3, "stage": 3}).stage == 3
    with pytest.raises(PlanConflictError, match="overridden twice"):
        plan.with_overrides({"zero_stage": 3, "zero_optimization": {"stage": 1}})


@pytest.mark.parametrize(
    ("overrides", "error", "key"),
    [
        ({"zero_stage": 7}, InvalidValueError, "zero_optimization.stage"),
        ({"zero_stagee": 2}, UnknownKeyError, "zero_stagee"),
        ({"launch.num_procesess": 2}, UnknownKeyError, "launch.num_procesess"),
        ({"optimizer.type.x": 2}, InvalidValueError, "optimizer.type.x"),
        ({"": 2}, InvalidValueError, "overrides"),
        ({"zero_optimization..stage": 2}, InvalidValueError, "overrides"),
        ({3: 2}, InvalidValueError, "overrides"),
        ({"mixed_precision": "fp64"}, InvalidValueError, "mixed_precision"),
        ([], InvalidValueError, "overrides"),
    ],
)
def test_invalid_overrides_are_named(plan, overrides, error, key):
    with pytest.raises(error) as caught:
        plan.with_overrides(overrides)
    assert caught.value.key == key


def test_allowed_unknown_keys_stay_allowed():
    plan = DeepSpeedPlan(
        extra={"brand_new": 1},
        zero_optimization=ZeroSection(stage=3, extra={"newer": 2}),
        launch=LaunchSection(extra={"newest": 3}),
    )
    new = plan.with_overrides({"zero_stage": 2})
    assert new.to_deepspeed() == {"brand_new": 1, "zero_optimization": {"stage": 2, "newer": 2}}
    assert new.launch.extra == {"newest": 3}


def test_every_short_name_leads_to_an_existing_setting(plan):
    for name in sorted(SHORT_NAMES):
        refusal = None
        try:
            plan.with_overrides({name: "auto"})
        except PlanError as error:  # an existing setting that may not be "auto"
            refusal = error
        assert not isinstance(refusal, UnknownKeyError)
