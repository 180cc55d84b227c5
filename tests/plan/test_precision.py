from __future__ import annotations

import pytest

from zerotune.errors import InvalidValueError, PlanConflictError
from zerotune.plan import DeepSpeedPlan, RunFacts
from zerotune.plan.resolve.precision import decide_precision
from zerotune.plan.sections import LaunchSection
from zerotune.platform import Platform

CUDA = Platform.synthetic("cuda")
OLD_CUDA = Platform.synthetic("cuda", bf16=False)
CPU = Platform.synthetic("cpu")
NEW_CPU = Platform.synthetic("cpu", native_bf16=True)

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
AUTO = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
OFF = {"bf16": {"enabled": False}, "fp16": {"enabled": False}}


def decide(config, platform=CUDA, run=None, launch=None):
    plan = DeepSpeedPlan.from_dict(config)
    if launch:
        plan = DeepSpeedPlan(
            bf16=plan.bf16, fp16=plan.fp16, launch=LaunchSection(mixed_precision=launch)
        )
    return decide_precision(plan, run=RunFacts(mixed_precision=run), platform=platform)


@pytest.mark.parametrize(
    ("config", "platform", "run", "launch", "precision"),
    [
        (BF16, CUDA, None, None, "bf16"),
        (FP16, CUDA, None, None, "fp16"),
        ({}, CUDA, None, None, "fp32"),
        (OFF, CUDA, None, None, "fp32"),
        (AUTO, CUDA, None, None, "bf16"),
        (AUTO, OLD_CUDA, None, None, "fp32"),
        (AUTO, CPU, None, None, "fp32"),
        (AUTO, NEW_CPU, None, None, "bf16"),
        (AUTO, CPU, "bf16", None, "bf16"),
        (BF16, CPU, None, None, "bf16"),
        (AUTO, CUDA, "fp16", None, "fp16"),
        (AUTO, CUDA, "fp16", "bf16", "fp16"),
        (AUTO, CUDA, None, "fp16", "fp16"),
        (AUTO, CUDA, "no", None, "fp32"),
        (AUTO, CUDA, "auto", "bf16", "bf16"),
        ({}, CUDA, "bf16", None, "bf16"),
        ({}, CUDA, None, "bf16", "bf16"),
        ({}, CUDA, "auto", None, "bf16"),
        ({"bf16": {"enabled": False}}, CUDA, None, "fp16", "fp16"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}, CUDA, None, None, "fp32"),
        ({"bf16": {}}, CUDA, None, None, "fp32"),
    ],
)
def test_the_first_source_with_a_precision_decides(config, platform, run, launch, precision):
    assert decide(config, platform, run, launch)[0] == precision


@pytest.mark.parametrize(("config", "used"), [(BF16, "bf16"), (OFF, "fp32")])
def test_the_configuration_overrides_the_run_with_a_warning(config, used):
    precision, decisions = decide(config, run="fp16")
    assert precision == used
    assert (decisions[0].before, decisions[0].after) == ("fp16", used)
    assert decisions[0].severity == "warning"


def test_a_cpu_that_emulates_bf16_trains_in_fp32_with_the_reason():
    (decision,) = decide(AUTO, CPU)[1]
    assert (decision.key, decision.after) == ("precision", "fp32")
    assert "emulated bf16" in decision.reason
    off = {"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}
    assert decide(off, CPU)[1][0].reason == "the configuration disables bf16"


def test_fp16_on_the_cpu_accelerator_becomes_bf16_with_a_warning():
    precision, decisions = decide(FP16, CPU)
    assert precision == "bf16"
    assert decisions[-1].key == "fp16.enabled"
    assert decisions[-1].severity == "warning"


def test_fp16_is_kept_on_a_cpu_that_supports_it():
    assert decide(FP16, Platform.synthetic("cpu", fp16=True)) == ("fp16", [])


@pytest.mark.parametrize(
    ("config", "platform", "key"),
    [
        (BF16, OLD_CUDA, "bf16.enabled"),
        (FP16, Platform.synthetic("mps", fp16=False), "fp16.enabled"),
        (FP16, Platform.synthetic("cpu", bf16=False), "fp16.enabled"),
    ],
)
def test_a_precision_the_platform_lacks_is_an_error_that_names_the_supported_ones(
    config, platform, key
):
    with pytest.raises(PlanConflictError) as caught:
        decide(config, platform)
    assert caught.value.key == key
    assert "fp32" in caught.value.fix


def test_an_unknown_precision_of_the_run_is_named():
    with pytest.raises(InvalidValueError) as caught:
        decide(AUTO, run="int8")
    assert caught.value.key == "run.mixed_precision"
