"""Checkpoints converted from DeepSpeed's own and from model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from examples.recipes.convert import convert
from safetensors.torch import load_file

from tests.checkpoint import anywhere
from tests.checkpoint.anywhere import PLANS, Net, gathered, train
from tests.checkpoint.exporting import output_of, unet
from tests.checkpoint.runs import shadow_of
from tests.support.models import tiny_unet
from tests.support.ranks import run_ranks
from tests.support.runs import start
from zerotune.checkpoint.export.model import export_checkpoint
from zerotune.checkpoint.folders import verify_checkpoint
from zerotune.checkpoint.manifest import Manifest
from zerotune.errors import CheckpointError

pytestmark = pytest.mark.nightly


def native(name: str, root: str, world_size: int) -> dict[str, Any]:
    """Train, save with DeepSpeed itself, and continue."""
    case = attrs.evolve(PLANS[name], micro_batch=8 // world_size, engine="deepspeed")
    engine = start(case, Net(0))
    ema = shadow_of(engine)
    train(engine, ema, 0, anywhere.BEFORE)
    # A script without zerotune may use this spelling, which DeepSpeed's file then holds.
    engine.deepspeed_engine.config["optimizer"]["type"] = "adamw"
    engine.deepspeed_engine.save_checkpoint(str(Path(root) / "native"))
    found = {"state": gathered(engine, ema), "losses": train(engine, ema, anywhere.BEFORE, 5)}
    engine.close()
    return found


def converted(root: str) -> dict[str, Any]:
    """Convert DeepSpeed's checkpoint and resume without DeepSpeed."""
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
def test_deepspeeds_own_checkpoints_resume_without_deepspeed(name, world_size, tmp_path):
    expected = run_ranks(native, name, str(tmp_path), world_size, world_size=world_size)[0]
    (actual,) = run_ranks(converted, str(tmp_path))
    assert actual["origin"].startswith("DeepSpeed 0.")
    assert actual["frozen"] == ["frozen.weight", "frozen.bias"]
    assert actual["aliases"] == {"tied.weight": "first.weight"}
    names = [each for each in expected["state"] if not each.startswith(("ema ", "step "))]
    assert len(names) > 3 * 10
    assert [n for n in names if actual["state"][n] != expected["state"][n]] == []
    assert actual["step"] == anywhere.BEFORE
    assert not any(d.startswith("optimizer.states") for d in actual["decisions"])
    assert anywhere.apart(expected["losses"], actual["losses"]) <= 5e-5


def test_a_model_folder_converts_to_a_checkpoint_and_back(tmp_path):
    from diffusers import UNet2DModel

    model = unet(3)
    model.save_pretrained(tmp_path / "model", max_shard_size="1MB")
    convert(tmp_path / "model", tmp_path / "portable")
    manifest = Manifest.read(tmp_path / "portable")
    assert (manifest.plan, manifest.state.global_step) == (None, 0)
    # The weights are plain safetensors, keyed by parameter name.
    (weights,) = (tmp_path / "portable").glob("weights-*.safetensors")
    loaded, state = load_file(weights), model.state_dict()
    assert set(loaded) == set(state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    export_checkpoint(tmp_path / "portable", tmp_path / "again")
    again = UNet2DModel.from_pretrained(tmp_path / "again")
    assert torch.equal(output_of(again.eval()), output_of(model.eval()))
    with pytest.raises(CheckpointError, match=r"portable: exists and is not overwritten"):
        convert(tmp_path / "model", tmp_path / "portable")


def test_a_folder_without_model_weights_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="contains no model weights in safetensors"):
        convert(tmp_path, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def batches(count: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(4, 1, 8, 8, generator=generator),
            torch.rand(4, generator=generator) * 1000,
            torch.randint(0, 10, (4,), generator=generator),
        )
        for _ in range(count)
    ]


def stepped(model: Any, accelerator: Any, optimizer: Any, ema: Any, part: list) -> list[float]:
    losses = []
    for images, times, labels in part:
        prediction = model(images, times, class_labels=labels).sample
        loss = torch.nn.functional.mse_loss(prediction, -images)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
        losses.append(loss.item())
    return losses


def saved_by_plain_accelerate(root: str) -> dict[str, Any]:
    """Train with accelerate without DeepSpeed, with the hooks of diffusers' scripts."""
    from accelerate import Accelerator
    from diffusers import UNet2DModel
    from diffusers.training_utils import EMAModel

    accelerator, model = Accelerator(cpu=True), tiny_unet(3)
    config = model.config
    ema = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=config)

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        ema.save_pretrained(f"{folder}/unet_ema")
        for each in models:
            each.save_pretrained(f"{folder}/unet")
            weights.pop()

    accelerator.register_save_state_pre_hook(save)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    names = [name for name, _ in model.named_parameters()]
    losses = stepped(model, accelerator, optimizer, ema, batches(5)[:3])
    accelerator.save_state(f"{root}/state")
    average = dict(zip(names, (p.clone().numpy() for p in ema.shadow_params), strict=True))
    losses += stepped(model, accelerator, optimizer, ema, batches(5)[3:])
    return {"losses": losses, "average": average}


def gone_on_embedded(checkpoint: str) -> dict[str, Any]:
    """Resume a converted checkpoint in an embedded run with a registered EMA."""
    from zerotune.ema import EMAModel
    from zerotune.training import EmbeddedPlan

    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    plan = {"train_batch_size": 4, "optimizer": adamw, "zero_optimization": zero}
    plan["gradient_clipping"] = 0.0
    model = tiny_unet(9)
    ema = EMAModel(model, decay=0.9)
    with EmbeddedPlan(plan=plan) as run:
        accelerator = run.accelerator()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        accelerator.register_for_checkpointing(ema)
        accelerator.load_state(checkpoint)
        average = {name: full.clone().numpy() for name, full in ema.shadow.gather()}
        found = {"step": run.engine.state.global_step, "ema": ema.optimization_step}
        return found | {
            "losses": stepped(prepared, accelerator, optimizer, ema, batches(5)[3:]),
            "average": average,
        }


@pytest.mark.deepspeed
def test_checkpoints_of_plain_accelerate_resume_in_an_embedded_run(tmp_path, caplog):
    (expected,) = run_ranks(saved_by_plain_accelerate, str(tmp_path))
    with caplog.at_level("WARNING", "zerotune"):
        checkpoint = convert(tmp_path / "state", tmp_path / "portable")
    left_out = verify_checkpoint(checkpoint).extra["left_out"]
    assert sorted(left_out) == ["random_states_0.pkl", "scheduler.bin"]
    assert "convert.scheduler.bin: 'saved' -> unset (the file contains a step number" in caplog.text
    (actual,) = run_ranks(gone_on_embedded, str(checkpoint))
    assert (actual["step"], actual["ema"]) == (3, 3)
    assert actual["losses"] == pytest.approx(expected["losses"][3:], rel=5e-5)
    assert actual["average"].keys() == expected["average"].keys()
    for name, average in expected["average"].items():
        np.testing.assert_array_equal(actual["average"][name], average, err_msg=name)
