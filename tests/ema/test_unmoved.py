"""An EMA that averages nothing is an error, and is not saved or exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.models import HostileNet
from tests.support.ranks import ranks
from tests.support.runs import PLAIN, Case, start
from zerotune.checkpoint import export_model, load_checkpoint, save_checkpoint
from zerotune.ema import EMAShadow
from zerotune.errors import EMAError

CASES = [PLAIN, pytest.param(Case(stage=2, offload="cpu"), marks=pytest.mark.deepspeed)]


def train(engine: Any) -> None:
    engine.backward((engine(torch.ones(4, 7, 7, device=engine.device)).float() - 0.5).pow(2).mean())
    assert engine.step().applied


@pytest.mark.parametrize("case", CASES, ids=str)
@ranks(1)
def test_an_ema_whose_step_was_forgotten_is_neither_saved_nor_exported(case, tmp_path):
    with start(case, HostileNet(0, scalar=False)) as engine:
        ema = EMAShadow(decay=0.9).attach(engine)
        save_checkpoint(tmp_path / "first", engine=engine, shadows={"ema": ema})
        train(engine)
        for use in (
            lambda: save_checkpoint(tmp_path / "later", engine=engine, shadows={"ema": ema}),
            lambda: export_model(tmp_path / "model", engine=engine, weights="ema"),
            lambda: export_model(tmp_path / "model", engine=engine, weights=ema),
        ):
            with pytest.raises(EMAError, match=r"ema\.step\(\) was not called"):
                use()
        assert [each.name for each in tmp_path.iterdir()] == ["first"]
        ema.step()
        train(engine)
        save_checkpoint(tmp_path / "later", engine=engine, shadows={"ema": ema})


@ranks(1)
def test_an_ema_that_was_loaded_or_begun_anew_is_saved(tmp_path):
    with start(PLAIN, HostileNet(0, scalar=False)) as engine:
        ema = EMAShadow(decay=0.9).attach(engine)
        train(engine)
        ema.step()
        save_checkpoint(tmp_path / "first", engine=engine, shadows={"ema": ema})
        again = EMAShadow(decay=0.9).attach(engine)
        load_checkpoint(tmp_path / "first", engine=engine, shadows={"ema": again})
        save_checkpoint(tmp_path / "loaded", engine=engine, shadows={"ema": again})
        anew = EMAShadow(decay=0.9).attach(engine)
        train(engine)
        anew.begin_anew()
        save_checkpoint(tmp_path / "anew", engine=engine, shadows={"ema": anew})


@pytest.mark.parametrize("case", CASES, ids=str)
@ranks(1)
def test_an_ema_of_a_bare_model_refuses_the_steps_of_its_engine(case):
    model = HostileNet(0, scalar=False)
    ema = EMAShadow(decay=0.9).attach(model)
    with start(case, model) as engine:
        train(engine)
        with pytest.raises(EMAError, match=r"attach\(engine\) after zerotune\.prepare"):
            ema.step()


@ranks(1)
def test_a_closed_engine_ends_the_steps_of_its_ema():
    with start(PLAIN, HostileNet(0, scalar=False)) as engine:
        ema = EMAShadow(decay=0.9).attach(engine)
        train(engine)
        ema.step()
    with pytest.raises(EMAError, match="the engine is closed"):
        ema.step()
