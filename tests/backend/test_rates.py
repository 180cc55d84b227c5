"""Rates measured on this machine."""

from __future__ import annotations

import torch

from zerotune.backend.rates import copy_rate, measure_rates
from zerotune.plan.memory.rates import RATE_NAMES


def test_every_rate_of_a_processor_is_measured():
    found = measure_rates(device=torch.device("cpu"), scale=1 / 64)
    assert set(found) == set(RATE_NAMES) - {"to_host", "to_device", "disk_read", "disk_write"}
    assert found.pop("operators") > 100
    assert all(rate > 1e5 for rate in found.values())


def test_the_rate_of_a_memory_copy_is_measured():
    assert copy_rate(scale=1 / 64) > 1e5
