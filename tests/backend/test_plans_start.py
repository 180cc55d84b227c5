"""A dozen rendered plans start and take steps on the real DeepSpeed without zerotune."""

from __future__ import annotations

import pytest

from tests.support.ranks import free_port, run_ranks
from tests.support.starting import start_raw

pytestmark = pytest.mark.deepspeed


def plan(stage, offload, offload_param, precision):
    request = {
        "stage": stage,
        "offload": offload,
        "offload_param": offload_param,
        "precision": precision,
        "micro_batch_size": 4,
    }
    # Partition even this small model, which stage 3 keeps whole by default.
    return request | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})


PLANS = [
    plan(0, "none", "none", "fp32"),
    plan(0, "none", "none", "bf16"),
    plan(1, "none", "none", "bf16"),
    plan(1, "cpu", "none", "fp32"),
    plan(2, "none", "none", "bf16"),
    plan(2, "cpu", "none", "fp32"),
    plan(2, "cpu", "none", "bf16"),
    plan(3, "none", "none", "bf16"),
    plan(3, "cpu", "cpu", "fp32"),
    plan(3, "cpu", "none", "bf16"),
]
SWAPPING = [
    plan(3, "nvme", "none", "fp32"),
    plan(3, "nvme", "nvme", "bf16"),
]


def check(request, started):
    assert started.stage == request["stage"]
    assert started.precision == request["precision"]
    assert started.partitioned == (request["stage"] == 3)
    offloaded = request["offload"] != "none"
    assert (started.optimizer == "DeepSpeedCPUAdam") == offloaded
    places = {"offload": "optimizer", "offload_param": "parameters"}
    expected = {what for key, what in places.items() if request[key] == "nvme"}
    assert expected == set(started.swapped)
    before, after = started.losses
    assert after < before


def raw(requests, folder):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    (found,) = run_ranks(start_raw, requests, str(folder), env=variables)
    return zip(requests, found, strict=True)


def test_a_rendered_plan_starts_and_steps_without_zerotune(tmp_path):
    for request, started in raw(PLANS, tmp_path):
        check(request, started)


@pytest.mark.nvme
def test_a_rendered_plan_with_nvme_starts_and_steps_without_zerotune(tmp_path):
    for request, started in raw(SWAPPING, tmp_path):
        check(request, started)
