"""EMAModel against diffusers' EMAModel, method by method, on plain models."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from diffusers.training_utils import EMAModel as Theirs

from tests.ema.test_shadow import move, weights
from tests.support.models import HostileNet, tiny_unet
from tests.support.ranks import ranks
from tests.support.runs import PLAIN, Case, start
from tests.support.sampling import nightly
from tests.support.waiting import wait_for
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
    for name, mine in ours.shadow.gather():
        torch.testing.assert_close(mine, theirs.shadow_params[int(name)], rtol=1e-6, atol=1e-7)


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


def test_store_copy_to_and_restore_work_as_in_diffusers():
    model = HostileNet()
    ours, theirs = pair(model, decay=0.5)
    for step in range(3):
        move(model, seed=step)
        ours.step(model.parameters())
        theirs.step(model.parameters())
    other = HostileNet(seed=2)
    for call in (ours.store, ours.copy_to, ours.restore, ours.step):
        with pytest.raises(EMAError, match="not the parameters that the EMA follows"):
            call(other.parameters())
    trained = weights(model)
    ours.store(model.parameters())
    ours.copy_to(model.parameters())
    for name, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.detach(), theirs.shadow_params[name])
    ours.restore(model.parameters())
    assert all(torch.equal(value, trained[name]) for name, value in weights(model).items())
    with pytest.raises(RuntimeError, match="nothing is stored"):
        ours.restore(model.parameters())


def test_to_moves_the_shadow_but_keeps_it_in_fp32(tmp_path):
    model = HostileNet()
    ema = EMAModel(model.parameters(), store=FileStore(folder=tmp_path))
    ema.to(torch.device("cpu"))
    ema.to(device="cpu", dtype=torch.float32)
    assert "in a file" in ema.shadow.brief(), "it is on the CPU already"
    ema.to("meta")
    ema.follow(model)
    assert ema.shadow.device.type == "meta"
    with pytest.raises(InvalidValueError, match="keep the EMA unchanged"):
        ema.to(dtype=torch.bfloat16)


def test_arguments_that_diffusers_silently_accepts_are_refused():
    model = HostileNet()
    ema = EMAModel(model.parameters())
    with pytest.raises(EMAError, match="8 parameters"):
        ema.step(list(model.parameters())[:8])
    with pytest.raises(EMAError, match="of other shapes"):
        ema.follow(reversed(list(model.parameters())))
    with pytest.raises(EMAError, match="not attached"):
        ema.copy_to()
    with pytest.raises(EMAError, match="EMAModel\\(engine"):
        EMAModel(HostileNet().bfloat16().parameters()).step()
    with pytest.raises(InvalidValueError, match="never updates"):
        EMAModel(model.parameters(), decay=1.0)


@ranks(1)
def test_an_ema_of_an_engine_refuses_other_parameters():
    with start(PLAIN, HostileNet(0, scalar=False)) as engine:
        ema = EMAModel(engine)
        ema.follow(engine)
        ema.step(engine.module.parameters())
        with pytest.raises(EMAError, match="not the parameters that the EMA follows"):
            ema.step(HostileNet(0, scalar=False).parameters())


@pytest.mark.deepspeed
@pytest.mark.parametrize("call", ["copy_to", *nightly("restore")])
@ranks(2)
def test_a_call_on_one_rank_names_the_missing_ranks(call, tmp_path):
    engine = start(Case(stage=2), tiny_unet())
    ema = EMAModel(engine, decay=0.9)
    ema.store()
    over = tmp_path / "over"
    if engine.group.is_main:
        engine.group._timeout = timedelta(seconds=1.5)
        with pytest.raises(
            CollectiveError, match=r"EMAModel\..*every rank must call it"
        ) as refused:
            getattr(ema, call)(engine.module.parameters())
        assert "rank 1" in str(refused.value) or "[1]" in str(refused.value)
        over.touch()
    wait_for(over.exists)
    engine.__exit__(SystemExit, SystemExit(), None)
