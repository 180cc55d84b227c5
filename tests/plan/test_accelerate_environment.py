from __future__ import annotations

import base64
import json

import pytest

from zerotune.errors import InvalidValueError, PlanConflictError, PlanFileError
from zerotune.plan import DeepSpeedPlan

USE = {"ACCELERATE_USE_DEEPSPEED": "true"}


def read(**variables) -> DeepSpeedPlan:
    environ = {f"ACCELERATE_{name}": value for name, value in variables.items()}
    return DeepSpeedPlan.from_accelerate_environment({**USE, **environ})


def found(plan, key):
    (decision,) = [each for each in plan.decisions if each.key == key]
    return decision


@pytest.mark.parametrize("environ", [{}, {"ACCELERATE_USE_DEEPSPEED": "false"}])
def test_an_environment_without_deepspeed_is_refused(environ):
    with pytest.raises(InvalidValueError, match="accelerate launch --use_deepspeed") as caught:
        DeepSpeedPlan.from_accelerate_environment(environ)
    assert caught.value.key == "ACCELERATE_USE_DEEPSPEED"


def test_without_an_argument_the_environment_of_the_process_is_read(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    assert DeepSpeedPlan.from_accelerate_environment().stage == 1


def test_every_accelerate_variable_is_translated():
    plan = read(
        MIXED_PRECISION="bf16",
        CONFIG_DS_FIELDS="zero_stage,mixed_precision",
        GRADIENT_ACCUMULATION_STEPS="4",
        GRADIENT_CLIPPING="0.5",
        DEEPSPEED_ZERO_STAGE="3",
        DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu",
        DEEPSPEED_OFFLOAD_PARAM_DEVICE="nvme",
        DEEPSPEED_OFFLOAD_PARAM_NVME_PATH="/mnt/swap",
        DEEPSPEED_ZERO3_INIT="false",
        DEEPSPEED_ZERO3_SAVE_16BIT_MODEL="true",
        DEEPSPEED_MOE_LAYER_CLS_NAMES="Block,Other",
    )
    assert plan.to_deepspeed() == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/mnt/swap"},
            "offload_optimizer": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    assert plan.precision == "bf16"
    assert plan.launch.zero3_init_flag is False
    assert plan.launch.deepspeed_moe_layer_cls_names == "Block,Other"
    assert not [each for each in plan.decisions if each.severity == "warning"]


def test_the_stage_is_2_by_default():
    assert read().stage == 2
    assert found(read(), "zero_optimization.stage").after == 2


@pytest.mark.parametrize("part", ["optimizer", "param"])
def test_an_nvme_folder_lost_by_the_launcher_gives_a_warning(part):
    plan = read(**{f"DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE": "nvme"})
    decision = found(plan, f"zero_optimization.offload_{part}.nvme_path")
    assert decision.severity == "warning"
    assert "does not pass" in decision.reason


@pytest.mark.parametrize("form", ["path", "text", "base64"])
def test_a_configuration_file_is_read_in_each_of_accelerates_forms(tmp_path, form):
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": 8}
    text = json.dumps(config)
    (tmp_path / "ds.json").write_text(text)
    written = {
        "path": str(tmp_path / "ds.json"),
        "text": text,
        "base64": base64.urlsafe_b64encode(text.encode()).decode(),
    }[form]
    assert read(DEEPSPEED_CONFIG_FILE=written).to_deepspeed() == config


def test_a_missing_configuration_file_is_named(tmp_path):
    with pytest.raises(PlanFileError, match="missing"):
        read(DEEPSPEED_CONFIG_FILE=str(tmp_path / "missing.json"))


def test_variables_fill_auto_values_and_do_not_override_the_file():
    config = {"zero_optimization": {"stage": "auto"}, "gradient_clipping": 1.0}
    plan = read(
        DEEPSPEED_CONFIG_FILE=json.dumps(config),
        DEEPSPEED_ZERO_STAGE="3",
        GRADIENT_CLIPPING="0.5",
        GRADIENT_ACCUMULATION_STEPS="4",
    )
    assert plan.to_deepspeed() == {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}
    filled = [each for each in plan.decisions if each.key == "zero_optimization.stage"]
    assert (filled[0].before, filled[0].after, filled[0].severity) == ("auto", "3", "note")
    ignored = found(plan, "gradient_clipping")
    assert (ignored.before, ignored.after, ignored.severity) == ("0.5", 1.0, "warning")
    assert found(plan, "gradient_accumulation_steps").severity == "warning"


@pytest.mark.parametrize("field", ["zero_stage", "gradient_clipping", "mixed_precision"])
def test_yaml_fields_beside_a_file_are_refused_as_in_accelerate(field):
    with pytest.raises(PlanConflictError, match=field):
        read(DEEPSPEED_CONFIG_FILE="{}", CONFIG_DS_FIELDS=f"deepspeed_config_file,{field}")


@pytest.mark.parametrize(
    ("config", "precision", "becomes"),
    [
        ({"bf16": {"enabled": True}}, "no", "bf16"),
        ({"bf16": {"enabled": "auto"}}, "bf16", "auto"),
        ({}, "bf16", "bf16"),
        ({}, "no", "fp32"),
    ],
)
def test_a_precision_of_no_beside_a_configuration_means_unset(config, precision, becomes):
    plan = read(DEEPSPEED_CONFIG_FILE=json.dumps(config), MIXED_PRECISION=precision)
    assert plan.precision == (precision if becomes == "auto" else becomes)
    assert not [each for each in plan.check() if each.severity == "error"]


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [
        ("DEEPSPEED_ZERO_STAGE", "four", "zero_optimization.stage"),
        ("GRADIENT_CLIPPING", "-1", "gradient_clipping"),
        ("MIXED_PRECISION", "fp64", "launch.mixed_precision"),
        ("DEEPSPEED_ZERO3_INIT", "auto", "launch.zero3_init_flag"),
    ],
)
def test_invalid_values_are_named(variable, value, key):
    with pytest.raises(InvalidValueError) as caught:
        read(**{variable: value})
    assert caught.value.key == key
