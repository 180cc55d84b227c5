"""Weights and moments on NVMe, beside a device."""

from __future__ import annotations

import attrs
import pytest

from tests.device import on_device
from tests.device.cases import CASES, differences, run

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.nvme
@pytest.mark.deepspeed
@on_device()
def test_weights_and_moments_on_nvme_train_to_the_bits_of_those_in_ram(tmp_path):
    case = BY_NAME["ZeRO-3, NVMe"]
    in_ram = attrs.evolve(case, offload="cpu", offload_param="cpu")
    assert not differences(run(in_ram, 0, 1.0, tmp_path), run(case, 0, 0.02, tmp_path))
