"""The recipe measures every rate of this machine and stores it for predictions."""

from __future__ import annotations

from examples.recipes.measure_rates import main

from zerotune import detect_platform
from zerotune.plan.memory.rates import RATE_NAMES, known_rates


def test_rates_of_a_processor_are_measured_and_stored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = main(["--scale", str(1 / 64)])
    assert set(found) == set(RATE_NAMES) - {"to_host", "to_device", "disk_read", "disk_write"}
    assert all(rate > (100 if name == "operators" else 1e5) for name, rate in found.items())
    known = known_rates(detect_platform(log=False))
    assert known.measured == frozenset(found)
    assert known.products == found["products"]
