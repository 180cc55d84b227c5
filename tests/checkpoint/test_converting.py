"""Checkpoints made of DeepSpeed's own and of model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint import anywhere
from tests.checkpoint.anywhere import PLANS, Net, gathered, train
from tests.checkpoint.exporting import output_of, unet
from tests.checkpoint.runs import shadow_of
from tests.support.ranks import run_ranks
from tests.support.runs import start
from zerotune.checkpoint import convert, verify_checkpoint
from zerotune.checkpoint.manifest import Manifest
from zerotune.errors import CheckpointError


def native(name: str, root: str, world_size: int) -> dict[str, Any]:
    """Train, save with DeepSpeed itself, train on."""
    case = attrs.evolve(PLANS[name], micro_batch=8 // world_size)
    engine = start(case, Net(0))
    ema = shadow_of(engine)
    train(engine, ema, 0, anywhere.BEFORE)
    # As a script without zerotune may spell it; the file holds what was written.
    engine.deepspeed_engine.config["optimizer"]["type"] = "adamw"
    engine.deepspeed_engine.save_checkpoint(str(Path(root) / "native"))
    found = {"state": gathered(engine, ema), "losses": train(engine, ema, anywhere.BEFORE, 5)}
    engine.close()
    return found


def converted(root: str) -> dict[str, Any]:
    """Convert DeepSpeed's checkpoint and go on without DeepSpeed."""
    from zerotune.checkpoint import load_checkpoint

    folder = Path(root)
    convert(folder / "native", folder / "portable")
    manifest = verify_checkpoint(folder / "portable")
    engine = start(attrs.evolve(PLANS["plain"], micro_batch=8), Net(1))
    contents = load_checkpoint(folder / "portable", engine=engine)
    ema = shadow_of(engine)
    found = {
        "origin": manifest.origin,
        "frozen": [record.name for record in manifest.frozen],
        "aliases": dict(manifest.aliases),
        "state": gathered(engine, ema),
        "step": engine.state.global_step,
        "lr": engine.lr,
        "decisions": [str(decision) for decision in contents.decisions],
        "losses": train(engine, ema, anywhere.BEFORE, 5),
    }
    engine.close()
    return found


@pytest.mark.deepspeed
@pytest.mark.parametrize(("name", "world_size"), [("z2", 2), ("z3", 2)])
def test_deepspeeds_own_checkpoints_go_on_without_it(name, world_size, tmp_path):
    expected = run_ranks(native, name, str(tmp_path), world_size, world_size=world_size)[0]
    (actual,) = run_ranks(converted, str(tmp_path))
    assert actual["origin"].startswith("DeepSpeed 0.")
    assert actual["frozen"] == ["frozen.weight", "frozen.bias"]
    assert actual["aliases"] == {"tied.weight": "first.weight"}
    names = [each for each in expected["state"] if not each.startswith(("ema ", "step "))]
    assert len(names) > 3 * 10
    assert [n for n in names if actual["state"][n] != expected["state"][n]] == []
    assert actual["step"] == anywhere.BEFORE
    assert any(d.startswith("engine: 'deepspeed' -> 'plain'") for d in actual["decisions"])
    assert not any(d.startswith("optimizer.states") for d in actual["decisions"])
    assert anywhere.apart(expected["losses"], actual["losses"]) <= 5e-5


def test_a_model_folder_becomes_a_checkpoint_and_a_model_folder_again(tmp_path):
    from diffusers import UNet2DModel

    model = unet(3)
    model.save_pretrained(tmp_path / "model", max_shard_size="1MB")
    convert(tmp_path / "model", tmp_path / "portable")
    manifest = Manifest.read(tmp_path / "portable")
    assert (manifest.plan, manifest.state.global_step) == (None, 0)
    # Plain safetensors, by the names of the parameters.
    (weights,) = (tmp_path / "portable").glob("weights-*.safetensors")
    loaded, state = load_file(weights), model.state_dict()
    assert set(loaded) == set(state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    convert(tmp_path / "portable", tmp_path / "again")
    again = UNet2DModel.from_pretrained(tmp_path / "again")
    assert torch.equal(output_of(again.eval()), output_of(model.eval()))
    with pytest.raises(CheckpointError, match=r"portable: exists and is not replaced"):
        convert(tmp_path / "model", tmp_path / "portable")


def test_what_is_no_model_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="holds no safetensors weights of a model"):
        convert(tmp_path, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
