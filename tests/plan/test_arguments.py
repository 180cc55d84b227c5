from __future__ import annotations

import argparse

import pytest

from zerotune.errors import InvalidValueError, PlanError
from zerotune.plan import DeepSpeedPlan, add_plan_arguments, plan_from_arguments


def plan_of(*arguments) -> DeepSpeedPlan:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    add_plan_arguments(parser)
    return plan_from_arguments(parser.parse_args(arguments))


@pytest.fixture
def file(tmp_path, reference_c):
    (tmp_path / "c.yaml").write_text(reference_c)
    return str(tmp_path / "c.yaml")


def test_a_file_alone_is_the_plan(file):
    assert plan_of("--deepspeed_config", file) == DeepSpeedPlan.load(file)


def test_arguments_stand_above_the_file(file):
    plan = plan_of(
        "--deepspeed-config", file, "--zero_stage=3", "--offload-param-device", "cpu",
        "--mixed_precision", "no", "--set", "overlap_comm=false", "--set", "optimizer=Lion",
    )  # fmt: skip
    assert plan.stage == 3
    assert plan.offload_param_device == "cpu"
    assert plan.precision == "fp32"
    assert plan.zero_optimization.overlap_comm is False
    assert plan.optimizer.type == "Lion"
    assert plan.gradient_accumulation_steps == 4
    given = [each for each in plan.decisions if each.reason == "given on the command line"]
    assert ("zero_optimization.stage", 1, 3) in [(d.key, d.before, d.after) for d in given]


def test_without_a_file_it_starts_from_the_common_case():
    plan = plan_of("--zero_stage", "3")
    assert plan == DeepSpeedPlan.build(stage=3)
    assert plan.decisions[0].key == "deepspeed_config"


def test_numbers_are_numbers_and_automatic_is_a_word():
    plan = plan_of("--micro_batch_size", "auto", "--gradient_clipping", "0.5")
    assert plan.train_micro_batch_size_per_gpu == "auto"
    assert plan.gradient_clipping == 0.5


@pytest.mark.parametrize("written", ["overlap_comm", "=3", " =x"])
def test_a_setting_without_key_or_value_is_named(written):
    with pytest.raises(InvalidValueError, match="KEY=VALUE"):
        plan_of("--set", written)


def test_a_bad_value_is_a_plan_error():
    with pytest.raises(PlanError) as caught:
        plan_of("--zero_stage", "9")
    assert caught.value.key == "zero_optimization.stage"


def test_a_namespace_of_another_parser_gives_the_common_case():
    assert plan_from_arguments(argparse.Namespace()) == DeepSpeedPlan.build()
