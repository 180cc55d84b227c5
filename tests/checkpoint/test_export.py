"""Exports load in plain diffusers and give the trained model's output, bit for bit."""

from __future__ import annotations

import attrs
import pytest

from tests.checkpoint import exporting
from tests.checkpoint.anywhere import PLANS
from tests.support.ranks import run_ranks


@pytest.mark.deepspeed
@pytest.mark.nvme
@pytest.mark.parametrize(("name", "world_size"), [("z3-nvme", 1), ("z3", 2)])
def test_plain_diffusers_loads_what_was_exported(name, world_size, tmp_path):
    case = attrs.evolve(PLANS[name], precision="fp32")
    results = run_ranks(exporting.exported, case, str(tmp_path), world_size=world_size)
    found = results[0]
    assert not found["held"]["whole"]
    assert bool(found["held"]["swapped"]) == ("nvme" in name)
    assert found["same"] == dict.fromkeys(("trained", "ema", "from-disk", "ema-disk"), True)
    assert found["differ"]
    assert found["rounded"]
    assert found["complete"]
    assert "diffusion_pytorch_model.safetensors.index.json" in found["shards"]
    assert len(found["shards"]) > 3
    assert found["refused"].startswith("CheckpointMismatchError: conv_in.weight")
    assert "give base=" in found["refused"]
    expected = ["base", "ema", "ema-disk", "from-disk", "small.safetensors", "step", "swap"]
    assert found["left"] == [*expected, "trained"]
    for rank in results:
        assert "mine: " in rank["errors"]["taken"]
        assert "exists and is not replaced" in rank["errors"]["taken"]
        assert "No space left on device" in rank["errors"]["full"]
        assert rank["errors"]["dtype"].startswith("InvalidValueError: dtype = 'int8'")


def test_the_trainer_exports_the_average_or_the_trained_weights(tmp_path):
    (found,) = run_ranks(exporting.trainer_exports, str(tmp_path))
    assert found["still"] == {"conv_in.weight", "conv_in.bias"}
    assert len(found["moved"]) > 50
    assert found["shifted"]
    for error in found["errors"]:
        assert error.startswith("InvalidValueError: weights = ")
