"""Every benchmark runs to its end at a size that takes seconds."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.__main__ import main
from benchmarks.registry import load


def measured(name, folder):
    """Run it as the command does; every case must give what its goals look at."""
    assert main([name, "--quick", "--output", str(folder)]) == 0
    result = json.loads((folder / f"{name}.json").read_text())
    assert result["quick"]
    assert [case["name"] for case in result["cases"]] == [c.name for c in load(name).cases(True)]
    for case in result["cases"]:
        assert "refused" not in case, case.get("refused")
        for quantities in case["contestants"].values():
            for found in quantities.values():
                assert all(math.isfinite(value) for value in found["samples"])
    for goal in result["goals"]:
        assert goal["met"] is not None, goal
    assert (folder / f"{name}.md").read_text().startswith(f"# {name}")
    assert (folder / f"{name}.png").stat().st_size > 1000
    return {case["name"]: case for case in result["cases"]}


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    import torch

    # Set by the command for a process of its own.
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_ema(tmp_path):
    cases = measured("ema", tmp_path)
    assert {"memory copy", "EMAShadow", "diffusers EMAModel"} <= set(cases["update"]["contestants"])


def test_data(tmp_path):
    cases = measured("data", tmp_path)
    assert cases["pixels"]["facts"]["buckets"] > 1


@pytest.mark.deepspeed
@pytest.mark.nvme
def test_offload(tmp_path):
    cases = measured("offload", tmp_path)
    assert cases["bandwidth"]["facts"]["settings"]["queue_depth"] == 8


@pytest.mark.deepspeed
def test_memory(tmp_path):
    (case,) = measured("memory", tmp_path).values()
    assert case["contestants"]["measured"]["host_bytes"]["median"] > 2**16


@pytest.mark.deepspeed
def test_overhead(tmp_path):
    (case,) = measured("overhead", tmp_path).values()
    assert case["facts"]["largest relative difference of a loss"] < 1e-5, "another training"
    assert len(case["contestants"]) == 3


@pytest.mark.deepspeed
def test_checkpoint(tmp_path):
    (case,) = measured("checkpoint", tmp_path).values()
    assert case["facts"]["goes on exactly as it did"]["zerotune Trainer"]


@pytest.mark.deepspeed
def test_step(tmp_path):
    cases = measured("step", tmp_path)
    assert len(cases["step alone"]["contestants"]) == 7
    assert cases["ZeRO-2 with EMA"]["facts"]["losses are equal bit for bit"]


@pytest.mark.deepspeed
def test_prediction(tmp_path):
    (case,) = measured("prediction", tmp_path).values()
    assert case["facts"]["threads"] == 1
    assert set(case["contestants"]) == {"measured", "predicted"}
    for found in case["contestants"].values():
        phases = sum(found[f"{part}_seconds"]["median"] for part in ("forward", "backward"))
        assert 0 < phases < found["seconds"]["median"]
    rates = {part["rate"] for part in case["facts"]["parts"]}
    assert {"convolutions_fp32", "operators", "host_step"} <= rates


def test_fake_device(tmp_path):
    for case in measured("fake_device", tmp_path).values():
        found = {name: one["device_bytes"]["median"] for name, one in case["contestants"].items()}
        # So small that what is rounded to 512 bytes is most of it.
        assert 0 < found["estimated"] < found["counted"]
