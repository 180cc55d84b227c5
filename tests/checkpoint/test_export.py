"""Exports load in plain diffusers and give the trained model's output, bit for bit."""

from __future__ import annotations

import attrs
import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint import exporting
from tests.checkpoint.anywhere import PLANS
from tests.checkpoint.exporting import unet
from tests.checkpoint.refusals import told
from tests.support.ranks import ranks, run_ranks


@pytest.mark.deepspeed
@pytest.mark.nvme
@pytest.mark.parametrize(
    ("name", "world_size"), [pytest.param("z3-nvme", 1, marks=pytest.mark.nightly), ("z3", 2)]
)
def test_plain_diffusers_loads_exported_models(name, world_size, tmp_path):
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
    assert "set base=" in found["refused"]
    expected = ["base", "ema", "ema-disk", "from-disk", "small.safetensors", "step", "swap"]
    assert found["left"] == [*expected, "trained"]
    for rank in results:
        assert "mine: " in rank["errors"]["taken"]
        assert "exists and is not replaced" in rank["errors"]["taken"]
        assert "No space left on device" in rank["errors"]["full"]
        assert rank["errors"]["dtype"].startswith("InvalidValueError: dtype = 'int8'")


@ranks(1)
def test_the_trainer_exports_the_ema_or_the_trained_weights(tmp_path):
    from zerotune import DeepSpeedPlan, Trainer
    from zerotune.ema import EMAShadow
    from zerotune.training.emas import TrainerEMAs

    folder, model = tmp_path, unet(1)
    plan = DeepSpeedPlan.build(stage=0, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    ema = EMAShadow(decay=0.9)
    with Trainer(model=model, plan=plan, ema=ema, deepspeed=False, callbacks=()) as trainer:
        ema.step()
        with trainer.engine.master_weights.editing() as fragments:
            for fragment in fragments:
                fragment.value.add_(1.0)
        trainer.export(folder / "ema")
        trainer.export(folder / "trained", weights="trained")
        trainer.emas = TrainerEMAs(None, engine=trainer.engine)
        errors = [
            told(lambda: trainer.export(folder / "x", weights="ema")),
            told(lambda: trainer.export(folder / "x", weights="raw")),
        ]
    name = "diffusion_pytorch_model.safetensors"
    trained, averaged = load_file(folder / "trained" / name), load_file(folder / "ema" / name)
    assert ({n for n in trained if torch.equal(trained[n], averaged[n])}) == {
        "conv_in.weight",
        "conv_in.bias",
    }
    assert len({n for n in trained if not torch.equal(trained[n], averaged[n])}) > 50
    assert all(torch.equal(trained[n], averaged[n] + 1) for n in trained if "conv_in" not in n)
    for error in errors:
        assert error.startswith("InvalidValueError: weights = ")


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [None, 2])
@ranks(1)
def test_a_schedule_free_optimizer_exports_its_average_and_trains_on(stage, tmp_path):
    import schedulefree

    from zerotune import DeepSpeedPlan, export_model, prepare

    def layer():
        torch.manual_seed(0)
        return torch.nn.Linear(4, 4)

    plan = DeepSpeedPlan.build(
        stage=stage or 0,
        precision="fp32",
        micro_batch_size=2,
        gradient_clipping=0,
        optimizer={"type": "AdamWScheduleFree", "params": {"lr": 0.1, "betas": [0.8, 0.99]}},
    )
    reference = layer()
    optimizer = schedulefree.AdamWScheduleFree(
        reference.parameters(), lr=0.1, betas=(0.8, 0.99), weight_decay=0.0
    )
    optimizer.train()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    with prepare(model=layer(), plan=plan, deepspeed=stage is not None) as engine:
        for _ in range(4):
            engine.backward(engine(x).square().mean())
            engine.step()
            optimizer.zero_grad()
            reference(x).square().mean().backward()
            optimizer.step()
        before = {name: full.clone() for name, full in engine.master_weights.gather()}
        export_model(tmp_path / "x", engine=engine)
        after = dict(engine.master_weights.gather())
    optimizer.eval()
    (file,) = (tmp_path / "x").glob("*.safetensors")
    exported = load_file(file)
    for name, parameter in reference.named_parameters():
        assert torch.equal(before[name], after[name])
        torch.testing.assert_close(exported[name], parameter.detach(), rtol=0, atol=1e-5)
        assert (exported[name] - before[name]).abs().max() > 1e-3
