from __future__ import annotations

import pytest

from tests.plan.rulebook.findings import find, one, zero
from zerotune.plan import ModelFacts
from zerotune.plan.families import family

LARGE = ModelFacts.from_shapes([(f"block{i}", (25_000_000,)) for i in range(100)])
SMALL = ModelFacts.from_shapes([("a", (1000, 1000))])


def nvme(**keys):
    return zero(stage=3, offload_optimizer={"device": "nvme"}, **keys)


def test_sub_group_size_reports_the_size_of_its_buffers():
    finding = one("nvme-sub-group-size", nvme(sub_group_size=1_000_000_000))
    assert "4 buffers" in finding.reason
    assert "14.90 GiB of host memory" in finding.reason


@pytest.mark.parametrize(
    ("config", "model", "found"),
    [
        (nvme(sub_group_size=1_000_000_000), LARGE, 1),
        (nvme(sub_group_size=1_000_000_000), SMALL, 0),
        (nvme(sub_group_size=50_000_000), LARGE, 0),
        (nvme(sub_group_size="auto"), LARGE, 0),
        (nvme(), None, 0),
        (
            zero(stage=3, offload_optimizer={"device": "cpu"}, sub_group_size=1_000_000_000),
            LARGE,
            0,
        ),
    ],
)
def test_sub_group_size(config, model, found):
    assert len(find("nvme-sub-group-size", config, model=model)) == found


def test_pipelining_multiplies_the_buffer_pool():
    config = nvme(sub_group_size=1_000_000_000)
    config["zero_optimization"]["offload_optimizer"]["pipeline_read"] = True
    assert "8 buffers" in one("nvme-sub-group-size", config).reason


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
