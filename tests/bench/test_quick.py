"""Every benchmark completes at a size that takes seconds."""

from __future__ import annotations

import json
import math

import pytest

from bench.__main__ import NAMES, main
from bench.runner import load


def measured(name, folder):
    """Run a benchmark as the command does; check that every case gives what its goals need."""
    assert main([name, "--quick", "--output", str(folder)]) == 0
    result = json.loads((folder / f"{name}.json").read_text())
    assert result["quick"]
    cases = {case["name"]: case for case in result["cases"]}
    assert list(cases) == [case.name for case in load(name).cases(True)]
    for case in cases.values():
        for quantities in case["contestants"].values():
            for found in quantities.values():
                assert all(math.isfinite(found[key]) for key in ("q1", "median", "q3"))
    reached = {goal["text"] for goal in result["goals"]}
    # Other goals compare with packages that need not be installed here.
    aims = [goal for goal in load(name).goals if goal.case in cases and goal.limit is not None]
    assert reached >= {goal.text for goal in aims}
    return cases


def test_the_command_lists_every_benchmark(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(NAMES)
    with pytest.raises(SystemExit):
        main(["no-such"])
    assert "there is no no-such" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    import torch

    # Set it for the test only; the command sets it for its whole process.
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_ema_benchmark_completes(tmp_path):
    cases = measured("ema", tmp_path)
    assert {"memory copy", "EMAShadow", "diffusers EMAModel"} <= set(cases["update"]["contestants"])


@pytest.mark.nightly
def test_the_benchmark_of_models_completes(tmp_path):
    (case,) = measured("models", tmp_path).values()
    assert case["facts"]["trained weights"] > 1e6
    assert len(case["contestants"]) == 6


def test_the_data_benchmark_completes(tmp_path):
    cases = measured("data", tmp_path)
    assert cases["pixels"]["facts"]["buckets"] > 1


@pytest.mark.nightly
@pytest.mark.deepspeed
def test_the_memory_benchmark_completes(tmp_path):
    (case,) = measured("memory", tmp_path).values()
    assert case["contestants"]["measured"]["host_bytes"]["median"] > 2**16


@pytest.mark.nightly
@pytest.mark.deepspeed
def test_the_overhead_benchmark_completes(tmp_path):
    (case,) = measured("overhead", tmp_path).values()
    assert case["facts"]["largest relative difference of a loss"] < 1e-5, "another training"
    assert len(case["contestants"]) == 3


@pytest.mark.nightly
@pytest.mark.deepspeed
def test_the_checkpoint_benchmark_completes(tmp_path):
    (case,) = measured("checkpoint", tmp_path).values()
    assert len(case["contestants"]) == 3


@pytest.mark.deepspeed
def test_the_step_benchmark_completes(tmp_path):
    cases = measured("step", tmp_path)
    assert len(cases["step alone"]["contestants"]) == 7


@pytest.mark.nightly
@pytest.mark.simdev
@pytest.mark.deepspeed
def test_the_stream_benchmark_completes(tmp_path):
    virtual, real = measured("stream", tmp_path).values()
    assert len(real["contestants"]) == 3
    assert len(virtual["contestants"]) == 4
    for plan, found in virtual["contestants"].items():
        assert found["times_apart"]["median"] <= 1.10
        assert not plan.startswith("streamed") or found["late_fetches"]["median"] == 0


# Other tests cover all of it but the measured rates, which the GPU session covers: run it nightly.
@pytest.mark.nightly
@pytest.mark.deepspeed
def test_the_prediction_benchmark_completes(tmp_path):
    (case,) = measured("prediction", tmp_path).values()
    assert case["facts"]["threads"] == 1
    assert set(case["contestants"]) == {"measured", "predicted"}
    for found in case["contestants"].values():
        phases = sum(found[f"{part}_seconds"]["median"] for part in ("forward", "backward"))
        assert 0 < phases < found["seconds"]["median"]
    assert {"products_fp32", "operators", "host_step"} <= set(case["facts"]["rates"])


# tests/bench/test_large.py runs one of its cases in the suite.
@pytest.mark.nightly
@pytest.mark.deepspeed
def test_the_large_benchmark_completes(tmp_path):
    for case in measured("large", tmp_path).values():
        assert "failed" not in case["facts"]
        assert case["facts"]["resumed exactly"]
