"""Rates measured on this machine."""

from __future__ import annotations

import torch

from zerotune.backend.rates import copy_rate, measure_rates
from zerotune.plan.memory.time import RATE_NAMES


def test_every_rate_of_a_processor_is_measured():
    found = measure_rates(device=torch.device("cpu"), scale=1 / 64)
    assert set(found) == set(RATE_NAMES) - {"to_host", "to_device", "disk_read", "disk_write"}
    # Calls per second, not bytes or products.
    begun = [name for name in found if name == "operators" or "_calls" in name]
    assert len(begun) == 5
    assert all(found.pop(name) > 100 for name in begun)
    assert all(rate > 1e5 for rate in found.values())


def test_the_rate_of_a_memory_copy_is_measured():
    assert copy_rate(scale=1 / 64) > 1e5
