"""Leases under real engines: swap files match the prediction, losses match those without NVMe."""

from __future__ import annotations

import pytest

from tests.offload.engines import accelerate_loop, plan_for, raw_deepspeed, two_at_once
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.deepspeed, pytest.mark.nvme]

STEPS = 4


def assert_as_foretold(found):
    """Compare swap files with the prediction; unaligned gradients (1 KiB each) stay in memory."""
    assert found["written"].keys() == found["foretold"].keys()
    for target, (nbytes, count) in found["written"].items():
        foretold, files = found["foretold"][target]
        assert count == files
        assert 0 <= foretold - nbytes <= 1024 * count


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_raw_loop_with_nvme_equals_one_in_host_memory(world_size, tmp_path):
    root, unused = tmp_path / "swap", tmp_path / "unused"
    host = run_ranks(
        raw_deepspeed, str(unused), STEPS, plan_for(optimizer="cpu"), world_size=world_size
    )
    nvme = run_ranks(raw_deepspeed, str(root), STEPS, plan_for(), world_size=world_size)
    assert not unused.exists()
    assert len({one["path"] for one in nvme}) == 1
    for one, expected in zip(nvme, host, strict=True):
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert one["losses"][-1] < one["losses"][0], "it must learn, or agreement is empty"
        assert_as_foretold(one)
        assert one["written"]["optimizer"][1] > 3, "sub-groups and gradients are on disk"
    assert list(root.iterdir()) == []


def test_each_engine_of_a_process_has_its_own_lease_also_with_accelerate(tmp_path):
    (both,) = run_ranks(two_at_once, str(tmp_path), STEPS, plan_for())
    assert len(both["written"]) == 2
    for one in both["written"]:
        assert_as_foretold({"written": one, "foretold": both["foretold"]})
    assert both["losses"][0] == both["losses"][1]
    assert both["left"] == []
    (other,) = run_ranks(accelerate_loop, str(tmp_path), STEPS, plan_for())
    assert other["losses"] == both["losses"][0]
    assert_as_foretold(other)
    assert other["left"] == []


def test_the_bytes_of_parameters_written_to_nvme_equal_the_prediction(tmp_path):
    plan = plan_for(param="nvme", precision="bf16")
    (both,) = run_ranks(two_at_once, str(tmp_path), 2, plan)
    for one in both["written"]:
        assert set(one) == {"param", "optimizer"}
        assert_as_foretold({"written": one, "foretold": both["foretold"]})
