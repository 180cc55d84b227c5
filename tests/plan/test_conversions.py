"""Converting does not change the training: every format runs the same, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given

from tests.plan.conftest import REFERENCE_A, REFERENCE_B, REFERENCE_C
from tests.plan.styles import ACCELERATE, DEEPSPEED, SIMPLETUNER, TRAINERS
from tests.plan.test_properties import CONFIGS, SLOW
from tests.plan.test_round_trips import (
    GOOD_CONFIGS,
    GOOD_LAUNCHES,
    SMALL_CONFIGS,
    from_yaml_text,
    plan_of,
)
from zerotune.errors import InvalidValueError, OptimizerError, PlanError
from zerotune.offload.root import Roots, choose_root
from zerotune.plan import DeepSpeedPlan, plan_document
from zerotune.plan.accelerate import OF_THE_SCRIPT
from zerotune.platform import Platform

ROOT = Path(__file__).parents[2]
MACHINES = (
    Platform.synthetic("cuda"),
    Platform.synthetic("cuda", bf16=False),
    Platform.synthetic("mps", deepspeed=False),
)


READERS = {
    "deepspeed": DeepSpeedPlan.from_json,
    "accelerate": from_yaml_text,
}


def run(plan, machine, world_size):
    """Return what would run, including swap folders, or ``None`` if the plan is refused."""
    try:
        resolved = plan.resolve(platform=machine, world_size=world_size)
    except (PlanError, OptimizerError):
        return None
    config = resolved.plan.to_dict()
    roots = {}
    for part in resolved.nvme_paths:
        config["zero_optimization"][f"offload_{part}"].pop("nvme_path", None)
        root = choose_root(part, arguments=Roots(), resolved=resolved, environ={})
        roots[part] = root.path
    return config, roots, resolved.precision


def runs(plan):
    return {
        (machine.accelerator, machine.bf16, size): run(plan, machine, size)
        for machine in MACHINES
        for size in (1, 2)
    }


def converted(plan, to, lossy=()):
    """Write a plan in a format and read it again; return ``None`` if a launch key is refused."""
    try:
        document = plan_document(plan, to, lossy=lossy)
    except InvalidValueError as error:
        refusal = error
    else:
        return READERS[to](document.text)
    assert refusal.key.startswith("launch.")
    assert "--lossy" in refusal.in_shell().fix
    return None


def assert_same(expected, others):
    """Check that each different one of ``others`` runs what the original plan runs."""
    for number, again in enumerate(others):
        if again is None or again in others[:number]:
            continue
        found = runs(again)
        for where, one in expected.items():
            # A conversion may make a refused plan run; its decisions say so.
            assert one is None or found[where] == one, where


def assert_every_way(expected, plan, lossy=()):
    once = [again for to in READERS if (again := converted(plan, to, lossy)) is not None]
    twice = [converted(again, to, lossy) for again in once for to in READERS]
    assert_same(expected, once + twice)


@SLOW
@given(GOOD_CONFIGS | SMALL_CONFIGS | CONFIGS, GOOD_LAUNCHES)
@example({"bf16": {}}, {"mixed_precision": "auto"})
@example({"fp16": {"enabled": False}}, {"mixed_precision": "auto"})
@example(
    {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, {"gradient_accumulation_steps": 2}
)
def test_any_plan_converted_to_any_format_runs_the_same_or_is_refused(config, launch):
    plan = plan_of(config, launch)
    if plan is None:
        return
    assert_same(runs(plan), [converted(plan, to) for to in READERS])


FILES = {
    **{f"deepspeed: {name}": (DeepSpeedPlan.from_json, text) for name, text in DEEPSPEED.items()},
    **{f"trainer: {name}": (DeepSpeedPlan.from_json, text) for name, text in TRAINERS.items()},
    **{
        f"simpletuner: {name}": (DeepSpeedPlan.from_json, text)
        for name, text in SIMPLETUNER.items()
    },
    **{f"accelerate: {name}": (from_yaml_text, text) for name, text in ACCELERATE.items()},
    "reference a": (DeepSpeedPlan.from_dict, REFERENCE_A),
    "reference b": (DeepSpeedPlan.from_dict, REFERENCE_B),
    "reference c": (from_yaml_text, REFERENCE_C),
    **{
        str(file.relative_to(ROOT)): (DeepSpeedPlan.from_json, file)
        for folder in ("tests/plan/golden", "examples/plans")
        for file in sorted((ROOT / folder).glob("*.json"))
    },
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_runs_the_same_after_any_conversion(name):
    read, content = FILES[name]
    plan = read(content)
    expected = runs(plan)
    # DeepSpeed and zerotune refuse clipping among the optimizer's arguments.
    refused = name == "deepspeed: clipping in the optimizer"
    assert any(found is not None for found in expected.values()) is not refused
    assert_every_way(expected, plan, () if plan.launch is None else (*plan.launch.to_dict(),))


def test_lossy_settings_never_include_the_precision():
    for name in ACCELERATE:
        plan = from_yaml_text(ACCELERATE[name])
        lossy = set(plan.launch.to_dict()) - {"mixed_precision"}
        document = plan_document(plan, "deepspeed", lossy=lossy)
        again = DeepSpeedPlan.from_json(document.text)
        assert again.precision == plan.precision
        assert "mixed_precision" not in json.loads(document.text)


def test_launcher_defaults_are_dropped_without_permission():
    plan = from_yaml_text(ACCELERATE["the questionnaire, no precision"])
    document = plan_document(plan, "deepspeed")
    assert json.loads(document.text) == {
        **dict.fromkeys(OF_THE_SCRIPT, "auto"),
        "zero_optimization": {"stage": 1},
    }
    assert {d.severity for d in document.decisions} == {"note"}


ELSEWHERE = {"gpu_ids": "0,1", "machine_rank": 1, "main_process_ip": "10.0.0.1",
             "main_process_port": 29500, "num_machines": 2}  # fmt: skip
TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    ("batch", "kept"),
    [
        ({}, True),
        ({MICRO: 4}, True),
        ({MICRO: "auto"}, True),
        ({TRAIN: 32, MICRO: 4, "gradient_accumulation_steps": 4}, True),
        ({TRAIN: 32}, False),
        ({TRAIN: "auto", MICRO: 4}, True),
        ({TRAIN: 32, MICRO: 4}, False),
        ({TRAIN: 32, MICRO: 4, "gradient_accumulation_steps": "auto"}, False),
    ],
)
def test_num_processes_is_dropped_freely_unless_the_batch_depends_on_it(batch, kept):
    plan = DeepSpeedPlan.from_dict(batch)
    plan = plan.with_overrides({"launch": {**ELSEWHERE, "num_processes": 2}})
    if not kept:
        with pytest.raises(InvalidValueError, match=r"lossy=\['num_processes'\]") as caught:
            plan_document(plan, "deepspeed")
        assert caught.value.key == "launch.num_processes"
    document = plan_document(plan, "deepspeed", lossy=() if kept else ["num_processes"])
    told = {decision.key: decision.severity for decision in document.decisions}
    assert told == {
        **{f"launch.{key}": "note" for key in ELSEWHERE},
        "launch.num_processes": "note" if kept else "warning",
    }


@pytest.mark.parametrize("key", ["use_cpu", "dynamo_backend", "fsdp_config", "mixed_precision"])
def test_settings_that_change_training_are_dropped_only_with_permission(key):
    value = {"fsdp_config": {"a": 1}, "mixed_precision": "fp8", "use_cpu": True}.get(
        key, "inductor"
    )
    plan = DeepSpeedPlan().with_overrides({"launch": {key: value}})
    with pytest.raises(InvalidValueError, match=rf"lossy=\['{key}'\]"):
        plan_document(plan, "deepspeed")


@pytest.mark.parametrize(
    "said",
    [
        {"downcast_bf16": False},
        {"downcast_bf16": "no"},
        {"debug": True},
        {"debug": False},
        {"dynamo_backend": "NO"},
        {"dynamo_backend": False},
        {"dynamo_config": {"dynamo_backend": "NO"}},
    ],
)
def test_settings_without_effect_on_training_are_dropped_without_permission(said):
    plan = DeepSpeedPlan().with_overrides({"launch": said})
    document = plan_document(plan, "deepspeed")
    assert {decision.severity for decision in document.decisions} == {"note"}
    with pytest.raises(InvalidValueError, match=r"lossy=\['dynamo_config'\]"):
        plan_document(
            plan.with_overrides({"launch": {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}}),
            "deepspeed",
        )


@pytest.mark.parametrize("flag", [True, False])
def test_the_zero_init_flag_is_written_at_stage_3(flag):
    plan = DeepSpeedPlan.build(stage=3).with_overrides({"zero3_init_flag": flag})
    document = plan_document(plan, "deepspeed")
    assert json.loads(document.text)["zero3_init_flag"] is flag
    assert DeepSpeedPlan.from_json(document.text) == plan
    told = [decision.reason for decision in document.decisions]
    assert any("launch with --zero3_init_flag false" in reason for reason in told) is not flag
