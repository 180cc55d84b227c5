"""Recomputation does not change a run, and reports are correct."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.models import digits_batch, tiny_unet
from tests.support.ranks import ranks, run_ranks
from tests.training import diagnosed, workers
from zerotune import ImageTensors
from zerotune.errors import InvalidValueError
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.platform import Platform
from zerotune.training import Trainer, activations
from zerotune.training.activations import set_recomputing


@pytest.mark.deepspeed
@ranks(1)
def test_recomputation_leaves_every_loss_unchanged(tmp_path):
    with workers.trainer(True, workers.plan(2, "cpu")) as running:
        plain = running.fit(steps=4).losses
        assert ("gradient_checkpointing", False, False) in decided(running)
    with workers.trainer(True, workers.plan(2, "cpu"), gradient_checkpointing=True) as running:
        assert running.fit(steps=4).losses == plain, "bit for bit"
        assert ("gradient_checkpointing", False, True) in decided(running)
        assert any(each.key == "threads" for each in running.decisions)
        report = running.report()
        report.save(tmp_path)
        model = running.engine.module
        assert model.is_gradient_checkpointing
    assert not model.is_gradient_checkpointing, "put back when the engine ends"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    rows = {row[0]: row for row in report.memory_rows()}
    assert rows["activations"][3].startswith("blocks recomputed")
    assert rows["expected peak"][1] == "host"


def decided(running):
    return [(each.key, each.before, each.after) for each in running.decisions]


@pytest.mark.parametrize("kind", ["device", "host"])
def test_when_memory_runs_out_the_error_names_a_plan_that_fits(kind):
    (found,) = run_ranks(diagnosed.out_of_memory, kind)
    for said in (
        f"{kind} memory ran out in forward of optimizer step 2",
        *("the plan expected", "this process used up to", "Fix: "),
    ):
        assert said in found["message"]
    assert found["step"] == 1
    assert found["cause"] == {"device": "OutOfMemoryError", "host": "RuntimeError"}[kind]


class Engine:
    """A tiny U-Net on a synthetic machine."""

    def __init__(self, *, vram):
        self.module = tiny_unet()
        self.plan = DeepSpeedPlan.build(stage=2, precision="bf16", micro_batch_size=4).resolve(
            platform=Platform.synthetic("cuda", vram=vram),
            model=ModelFacts.from_module(self.module),
        )
        self.group = SimpleNamespace(broadcast=lambda value: value)
        self.undone = []
        self.resources = SimpleNamespace(callback=self.undone.append)


@pytest.fixture
def data():
    images, labels = digits_batch(4)
    return ImageTensors(images=images, labels=labels)


def test_blocks_are_recomputed_when_memory_is_short(data, monkeypatch):
    plenty = Engine(vram=2**36)
    (decision,) = set_recomputing(plenty, data, "auto")
    assert decision.after is False
    assert "more than any model's activations need at 256 input positions" in decision.reason
    needed = 291_216
    for room, wanted in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(activations, "_room", lambda _engine, room=room: room)
        engine = Engine(vram=2**36)
        (decision,) = set_recomputing(engine, data, "auto")
        assert (decision.before, decision.after) == (False, wanted)
        assert "8 x 8 pixels (the data's 'images') keeps" in decision.reason
        assert engine.module.is_gradient_checkpointing is wanted
        assert len(engine.undone) == wanted


def test_the_room_for_activations_is_what_the_plan_leaves_free():
    engine = Engine(vram=2**33)
    estimate = engine.plan.requested.estimate(engine.plan.model, platform=engine.plan.platform)
    assert activations._room(engine) == int(0.95 * 2**33) - estimate.device
    assert activations._room(Engine(vram=2**20)) == 0


def test_models_without_recomputation_are_left_alone_or_refused(data):
    engine = Engine(vram=2**33)
    engine.module = torch.nn.Linear(2, 2)
    assert set_recomputing(engine, data, "auto") == ()
    with pytest.raises(InvalidValueError, match="Linear has no gradient checkpointing"):
        set_recomputing(engine, data, True)
    engine.module = tiny_unet()
    engine.module.enable_gradient_checkpointing()
    assert set_recomputing(engine, data, "auto") == (), "the user has switched it on"
    (decision,) = set_recomputing(engine, data, False)
    assert (decision.before, decision.after) == (True, False)
    assert not engine.module.is_gradient_checkpointing


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="watchdogs"):
        Trainer(model=torch.nn.Linear(2, 2), plan={}, watchdogs=True)
