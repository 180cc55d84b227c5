from __future__ import annotations

import pytest

from tests.plan.rulebook.findings import find, one, read
from zerotune.errors import PlanConflictError
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
CPU = Platform.synthetic("cpu")
CUDA = Platform.synthetic("cuda")
OLD = Platform.synthetic("cuda", bf16=False, fp16=False)


def test_precision_unsupported_equals_the_error_of_resolution():
    finding = one("precision-unsupported", BF16, platform=OLD)
    assert finding.key == "bf16.enabled"
    with pytest.raises(PlanConflictError) as caught:
        DeepSpeedPlan.from_dict(BF16).resolve(platform=OLD)
    assert str(caught.value) == str(finding.as_error())


@pytest.mark.parametrize(
    ("config", "platform"),
    [(BF16, CUDA), (FP16, CPU), (BF16, None), ({**BF16, **FP16}, OLD), ({}, OLD)],
)
def test_precision_unsupported_ignores_working_precisions_and_those_of_other_rules(
    config, platform
):
    assert find("precision-unsupported", config, platform=platform) == []


def test_fp16_on_the_cpu_is_reported_once_by_resolution():
    resolved = DeepSpeedPlan.from_dict(FP16).resolve(platform=CPU)
    assert [each.key for each in resolved.decisions].count("fp16.enabled") == 1


@pytest.mark.parametrize(
    ("platform", "found"),
    [(CPU, 1), (Platform.synthetic("cpu", native_bf16=True), 0), (CUDA, 0), (None, 0)],
)
def test_bf16_emulated(platform, found):
    assert len(find("bf16-emulated", BF16, platform=platform)) == found
    assert find("bf16-emulated", {}, platform=platform) == []


@pytest.mark.parametrize(
    ("fp16", "found"),
    [
        ({"enabled": True, "loss_scale": 128}, 1),
        ({"enabled": True, "loss_scale": 0}, 0),
        ({"enabled": True}, 0),
        ({"enabled": True, "loss_scale": "auto"}, 0),
        ({"enabled": False, "loss_scale": 128}, 0),
    ],
)
def test_fp16_fixed_loss_scale(fp16, found):
    assert len(find("fp16-fixed-loss-scale", {"fp16": fp16})) == found


def test_a_launchers_fp8_gives_one_error():
    plan = read({}, mixed_precision="fp8")
    assert find("precision-unsupported", plan, platform=CUDA) == []
    assert one("precision-conflict", plan).key == "launch.mixed_precision"


@pytest.mark.parametrize("key", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize(
    ("section", "found"),
    [
        ({"enabled": True}, 1),
        ({"enabled": True, "loss_scale": 0}, 1),
        ({"enabled": True, "loss_scale": 128}, 0),
        ({"enabled": False}, 0),
    ],
)
def test_a_dynamic_loss_scale_requires_a_window_and_a_floor(key, section, found):
    assert len(find("dynamic-loss-scale", {"fp16": {**section, key: 0}})) == found
    assert find("dynamic-loss-scale", {"fp16": {**section, key: 1}}) == []
