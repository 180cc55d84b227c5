from __future__ import annotations

import pytest

from tests.plan.rulebook.findings import find, one, zero
from zerotune.plan import ModelFacts
from zerotune.plan.families import family

SMALL = ModelFacts.from_shapes([("a", (1000, 1000))])


@pytest.mark.parametrize(
    ("stage", "device", "bucket", "found"),
    [
        (3, "nvme", 1000, 1),
        (3, "nvme", 0, 0),
        (3, "nvme", "auto", 0),
        (3, "cpu", 1000, 0),
        (2, "nvme", 1000, 0),
    ],
)
def test_param_prefetch(stage, device, bucket, found):
    config = zero(stage=stage, offload_param={"device": device}, stage3_prefetch_bucket_size=bucket)
    findings = find("nvme-param-prefetch", config)
    assert len(findings) == found


@pytest.mark.parametrize(
    ("stage", "device", "count", "found"),
    [
        (3, "nvme", 9, 1),
        (3, "nvme", 10, 0),
        (3, "nvme", "auto", 0),
        (3, "cpu", 9, 0),
        (2, "nvme", 9, 0),
    ],
)
def test_param_buffers(stage, device, count, found):
    # A transformer block of SDXL has ten weights of at least 1 MiB.
    section = {"device": device, "buffer_count": count}
    config = {**zero(stage=stage, offload_param=section), "bf16": {"enabled": True}}
    assert len(find("nvme-param-buffers", config, model=family("sdxl"))) == found
    assert find("nvme-param-buffers", config, model=SMALL) == []
    assert find("nvme-param-buffers", config) == []


def test_too_few_param_buffers_are_reported_with_the_number_to_write():
    config = zero(stage=3, offload_param={"device": "nvme", "buffer_count": 5})
    finding = one("nvme-param-buffers", config, model=family("sdxl"))
    assert finding.value == 5
    assert "10 weights of a recomputed block" in finding.reason
    assert "write at least 12" in finding.fix
