"""EMAModel against diffusers' EMAModel, method by method, on plain models."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from diffusers import UNet2DModel
from diffusers.training_utils import EMAModel as Theirs

from tests.ema.test_shadow import move, weights
from tests.support.models import HostileNet, tiny_unet
from tests.support.ranks import ranks
from tests.support.runs import PLAIN, Case, start
from zerotune.ema import EMAModel, FileStore
from zerotune.errors import CollectiveError, EMAError, InvalidValueError

SETTINGS = [
    {"decay": 0.97},
    {"decay": 0.97, "use_ema_warmup": True, "inv_gamma": 2.0, "power": 0.75},
    {"decay": 0.9, "min_decay": 0.3, "update_after_step": 4},
]


def pair(model: torch.nn.Module, **settings: Any) -> tuple[EMAModel, Theirs]:
    return EMAModel(model.parameters(), **settings), Theirs(model.parameters(), **settings)


def assert_same(ours: EMAModel, theirs: Theirs) -> None:
    assert ours.optimization_step == theirs.optimization_step
    assert ours.cur_decay_value == pytest.approx(theirs.cur_decay_value, rel=1e-12)
    for mine, expected in zip(ours.shadow_params, theirs.shadow_params, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("make", [tiny_unet, HostileNet])
def test_ema_model_equals_diffusers_step_by_step(make, settings):
    model = make()
    ours, theirs = pair(model, **settings)
    assert ours.cur_decay_value is None
    for step in range(12):
        move(model, seed=step)
        ours.step(model.parameters())
        theirs.step(model.parameters())
        assert_same(ours, theirs)
        assert ours.get_decay(step) == pytest.approx(theirs.get_decay(step), rel=1e-12)


def test_a_shadow_created_from_a_copy_follows_the_trained_model():
    """Diffusers' scripts make the EMA from a second from_pretrained, then step with the first."""
    model, copy = HostileNet(), HostileNet(seed=1)
    ours, theirs = pair(copy, decay=0.9)
    for step in range(4):
        move(model, seed=step)
        with torch.no_grad():
            model.frozen.weight.fill_(step)
        ours.step(model.parameters())
        theirs.step(model.parameters())
        assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_copy_to_and_restore_work_as_in_diffusers(dtype):
    model = HostileNet()
    ours, theirs = pair(model, decay=0.5)
    for step in range(3):
        move(model, seed=step)
        ours.step(model.parameters())
        theirs.step(model.parameters())
    other, expected = HostileNet(seed=2).to(dtype), HostileNet(seed=2).to(dtype)
    with pytest.raises(EMAError, match="not the parameters that the EMA tracks"):
        ours.store(other.parameters())
    ours.copy_to(other.parameters())
    theirs.copy_to(expected.parameters())
    for mine, value in zip(other.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            mine, value, rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=1e-7
        )

    trained, averages = weights(model), ours.shadow_params
    ours.store(model.parameters())
    ours.copy_to(model.parameters())
    for parameter, value in zip(model.parameters(), averages, strict=True):
        assert torch.equal(parameter.detach(), value)
    ours.restore(model.parameters())
    assert all(torch.equal(value, trained[name]) for name, value in weights(model).items())
    with pytest.raises(RuntimeError, match="nothing is stored"):
        ours.restore(model.parameters())


def test_states_load_in_diffusers_and_back():
    model = HostileNet()
    ours, theirs = pair(model, decay=0.9, use_ema_warmup=True)
    for step in range(5):
        move(model, seed=step)
        ours.step(model.parameters())
        theirs.step(model.parameters())
    assert set(ours.state_dict()) == set(theirs.state_dict())
    ours_again, theirs_again = pair(HostileNet(seed=3))
    ours_again.load_state_dict(theirs.state_dict())
    theirs_again.load_state_dict(ours.state_dict())
    for step in range(5, 8):
        move(model, seed=step)
        for ema in (ours, theirs, ours_again, theirs_again):
            ema.step(model.parameters())
    assert_same(ours_again, theirs)
    assert_same(ours, theirs_again)


# diffusers' own from_pretrained uses a form of from_config that it deprecates.
@pytest.mark.filterwarnings("ignore:It is deprecated to pass a pretrained model:FutureWarning")
def test_folders_load_in_diffusers_and_back(tmp_path):
    model = tiny_unet()
    kinds = {"model_cls": UNet2DModel, "model_config": model.config}
    ours, theirs = pair(model, decay=0.95, **kinds)
    for step in range(4):
        move(model, seed=step)
        ours.step(model.parameters())
        theirs.step(model.parameters())
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert {p.name for p in tmp_path.iterdir()} == {"ours", "theirs"}, "no temporary folder"
    names = [{file.name for file in (tmp_path / who).iterdir()} for who in ("ours", "theirs")]
    assert names[0] == names[1]
    from_theirs = EMAModel.from_pretrained(tmp_path / "theirs", UNet2DModel)
    from_ours = Theirs.from_pretrained(tmp_path / "ours", UNet2DModel)
    assert from_theirs.decay == from_ours.decay == 0.95
    for step in range(4, 6):
        move(model, seed=step)
        for ema in (ours, theirs, from_ours, from_theirs):
            ema.step(model.parameters())
    assert_same(from_theirs, theirs)
    assert_same(ours, from_ours)
    ours.save_pretrained(tmp_path / "ours")
    again = EMAModel.from_pretrained(tmp_path / "ours", UNet2DModel)
    assert again.optimization_step == 6
    with pytest.raises(EMAError, match="the configuration of the model"):
        EMAModel(model.parameters()).save_pretrained(tmp_path / "none")


def test_to_moves_the_shadow_but_keeps_it_in_fp32(tmp_path):
    model = HostileNet()
    ema = EMAModel(model.parameters(), store=FileStore(folder=tmp_path))
    ema.to(torch.device("cpu"))
    ema.to(device="cpu", dtype=torch.float32)
    assert "in a file" in ema.shadow.explain(), "it is on the CPU already"
    ema.to("meta")
    assert ema.shadow.device.type == "meta"
    with pytest.raises(InvalidValueError, match="keep the EMA unchanged"):
        ema.to(dtype=torch.bfloat16)


def test_arguments_that_diffusers_silently_accepts_are_refused():
    model = HostileNet()
    ema = EMAModel(model.parameters())
    with pytest.raises(EMAError, match="8 parameters instead of"):
        ema.step(list(model.parameters())[:8])
    with pytest.raises(EMAError, match=r"parameters\[0\].*shape"):
        ema.copy_to(reversed(list(model.parameters())))
    with pytest.raises(EMAError, match="EMAModel\\(engine"):
        EMAModel(HostileNet().bfloat16().parameters())
    with pytest.raises(InvalidValueError, match="never updates"):
        EMAModel(model.parameters(), decay=1.0)
    before = ema.state_dict()
    for bad in ({"decay": 2.0}, {"decay": "x"}, {"optimization_step": 1.5}, {"shadow_params": []}):
        with pytest.raises((InvalidValueError, EMAError)):
            ema.load_state_dict({"power": 0.9, **bad})
        after = ema.state_dict()
        assert {k: v for k, v in after.items() if k != "shadow_params"} == {
            k: v for k, v in before.items() if k != "shadow_params"
        }


def test_follow_keeps_the_values_and_the_steps_of_the_ema():
    model, twin = HostileNet(), HostileNet(seed=1)
    ours, theirs = pair(model, decay=0.5)
    for step, parameters in enumerate([model, model, twin, twin]):
        move(parameters, seed=step)
        if parameters is twin:
            ours.follow(twin)
        ours.step(parameters.parameters())
        theirs.step(parameters.parameters())
        assert_same(ours, theirs)
    with pytest.raises(EMAError, match="parameters instead of 2"):
        EMAModel(torch.nn.Linear(2, 2).parameters()).follow(model)


@ranks(1)
def test_an_ema_of_an_engine_refuses_other_parameters():
    with start(PLAIN, HostileNet(0, scalar=False)) as engine:
        ema = EMAModel(engine)
        ema.follow(engine)
        ema.step(engine.module.parameters())
        with pytest.raises(EMAError, match="tracks the weights of an engine"):
            ema.step(HostileNet(0, scalar=False).parameters())


def test_shadow_params_change_after_each_step_that_moves_the_weights():
    model = HostileNet()
    ema = EMAModel(model.parameters(), decay=0.9)
    seen = [[value.clone() for value in ema.shadow_params]]
    ema.step(model.parameters())
    assert all(map(torch.equal, ema.shadow_params, seen[-1])), "nothing has moved"
    for step in range(3):
        move(model, seed=step)
        ema.step(model.parameters())
        seen.append([value.clone() for value in ema.shadow_params])
        for value, before, parameter in zip(seen[-1], seen[-2], model.parameters(), strict=True):
            if parameter.requires_grad:
                assert not torch.allclose(value, before)


@pytest.mark.deepspeed
@pytest.mark.parametrize("call", ["copy_to", "state_dict", "save_pretrained"])
@ranks(2)
def test_a_call_on_one_rank_names_the_missing_ranks(call, tmp_path):
    engine = start(Case(stage=2), tiny_unet())
    kinds = {"model_cls": UNet2DModel, "model_config": engine.module.config}
    ema = EMAModel(engine, decay=0.9, **kinds)
    folder, over = tmp_path / "ema", tmp_path / "over"
    if engine.group.is_main:
        engine.group._timeout = timedelta(seconds=1.5)
        arguments = {"copy_to": (engine.module.parameters(),), "save_pretrained": (folder,)}
        with pytest.raises(
            CollectiveError, match=r"EMAModel\..*every rank must call it"
        ) as refused:
            getattr(ema, call)(*arguments.get(call, ()))
        assert "rank 1" in str(refused.value) or "[1]" in str(refused.value)
        over.touch()
    deadline = time.monotonic() + 60
    while not over.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    engine.__exit__(SystemExit, SystemExit(), None)
    assert not folder.exists()
