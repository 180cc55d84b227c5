from __future__ import annotations

import pytest

from tests.plan.rulebook.findings import find, one, zero
from zerotune.plan import DeepSpeedPlan
from zerotune.platform import Platform

CUDA = Platform.synthetic("cuda")


def test_a_section_without_a_device_is_named_and_recorded_once():
    config = zero(stage=2, offload_optimizer={"pin_memory": True})
    finding = one("offload-without-device", config)
    assert finding.key == "zero_optimization.offload_optimizer.device"
    resolved = DeepSpeedPlan.from_dict(config).resolve(platform=CUDA)
    (decision,) = (each for each in resolved.decisions if each.key == finding.key)
    assert (decision.before, decision.after, decision.severity) == (None, "none", "warning")
    for device in ("none", "cpu"):
        config["zero_optimization"]["offload_optimizer"]["device"] = device
        assert find("offload-without-device", config) == []


@pytest.mark.parametrize(
    ("stage", "clipping", "found"),
    [(3, 1.0, True), (3, None, True), (3, 0, False), (2, 0, True), (0, 0, False)],
)
def test_super_offload(stage, clipping, found):
    section = {"device": "cpu", "super_offload": True}
    config = {**zero(stage=stage, offload_optimizer=section), "gradient_clipping": clipping}
    if stage == 0:
        config["zero_optimization"]["offload_optimizer"]["device"] = "none"
    findings = find("super-offload", config)
    assert bool(findings) == found
    if found:
        assert ("needs stage 3" in findings[0].reason) == (stage == 2)


@pytest.mark.parametrize(
    ("accelerator", "stage", "found"),
    [("cpu", 3, 1), ("xpu", 3, 1), ("cuda", 3, 0), ("rocm", 3, 0), ("cpu", 2, 0), (None, 3, 0)],
)
def test_super_offload_accelerator(accelerator, stage, found):
    config = zero(stage=stage, offload_optimizer={"device": "cpu", "super_offload": True})
    platform = Platform.synthetic(accelerator) if accelerator else None
    assert len(find("super-offload-accelerator", config, platform=platform)) == found
