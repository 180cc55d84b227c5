"""A background update gives the same bits as one in the foreground."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.ema.engines import model_for, train
from tests.support.models import HostileNet
from tests.support.ranks import run_ranks
from tests.support.runs import Case, start
from zerotune.ema import BackgroundEMA, EMAShadow, EMAShadows
from zerotune.ema.shadow import ShadowUpdate
from zerotune.errors import EMAError, UnsupportedEngineError


def shadows() -> EMAShadows:
    return EMAShadows(
        shadows={"a": EMAShadow(decay=0.9), "b": EMAShadow(decay=0.5, update_every=2)}
    )


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 7, 7, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def gate(monkeypatch):
    """Return an event that background updates wait for; foreground updates do not."""
    opened, real = threading.Event(), ShadowUpdate.take

    def take(self: ShadowUpdate, fragment: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(30)
        real(self, fragment)

    monkeypatch.setattr(ShadowUpdate, "take", take)
    return opened


def begin(background: BackgroundEMA, gate: threading.Event) -> None:
    """Start an update that begins only shortly after this returns."""
    gate.clear()
    background.step()
    threading.Timer(0.03, gate.set).start()


def test_the_optimizer_step_waits_for_a_pending_update(gate):
    model = HostileNet()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    expected, seen = shadows().attach(model), shadows()
    with BackgroundEMA(shadow=seen, optimizer=optimizer).attach(model) as background:
        for seed in range(6):
            step(model, optimizer, seed)
            expected.step()
            begin(background, gate)
    for name in expected:
        theirs = dict(seen[name].gather())
        assert all(torch.equal(full, theirs[key]) for key, full in expected[name].gather())


def test_reading_the_shadow_or_editing_the_weights_waits_for_a_pending_update(gate):
    model = HostileNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    expected, ema = EMAShadow(decay=0.9).attach(model), EMAShadow(decay=0.9)
    background = BackgroundEMA(shadow=ema, optimizer=optimizer).attach(model)

    def exchange() -> None:
        with ema.swapped_in():
            assert torch.equal(model.second.bias, wanted(expected))

    def edit() -> None:
        with ema.source.editing() as fragments:
            for fragment in fragments:
                fragment.value.zero_()

    looks = (ema.distance, ema.state_dict, lambda: dict(ema.gather()), exchange, edit)
    for seed, look in enumerate(looks):
        step(model, optimizer, seed)
        expected.step()
        begin(background, gate)
        look()
        assert torch.equal(ema._tensors["second.bias[0:7]"], wanted(expected)), look
    background.close()


def wanted(ema: EMAShadow) -> torch.Tensor:
    return ema.state_dict()["second.bias[0:7]"]


def test_a_failed_background_update_stops_the_next_optimizer_step(monkeypatch):
    model = HostileNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    background = BackgroundEMA(shadow=EMAShadow(decay=0.9), optimizer=optimizer).attach(model)
    step(model, optimizer, 0)
    monkeypatch.setattr(torch.Tensor, "lerp_", lambda self, *_: self)
    background.step()
    with pytest.raises(EMAError, match="changed the shadow's distance to the weights from"):
        step(model, optimizer, 1)
    background.close()


def test_an_optimizer_whose_steps_are_not_observed_is_detected():
    model = HostileNet()
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=1e-2) for _ in range(2))
    background = BackgroundEMA(shadow=EMAShadow(decay=0.9), optimizer=other).attach(model)
    step(model, optimizer, 0)
    with pytest.raises(EMAError, match="no optimizer step was observed"):
        background.step()
    with pytest.raises(EMAError, match="is already attached"):
        background.attach(model)
    with pytest.raises(UnsupportedEngineError, match="the optimizer of these weights is unknown"):
        BackgroundEMA(shadow=EMAShadow(decay=0.9)).attach(model)
    with pytest.raises(EMAError, match="not attached"):
        BackgroundEMA(shadow=EMAShadow(decay=0.9)).step()


def compare(case: Case) -> dict[str, Any]:
    engine = start(case, model_for(case))
    expected, ema = EMAShadow(decay=0.9).attach(engine), EMAShadow(decay=0.9)
    try:
        background = BackgroundEMA(shadow=ema).attach(engine)
    except UnsupportedEngineError as error:
        engine.close()
        return {"refused": str(error)}
    with background:
        for index in range(1, 5):
            train(engine, index)
            background.step()
            expected.step()
        theirs = expected.state_dict()
        equal = all(torch.equal(value, theirs[key]) for key, value in ema.state_dict().items())
    engine.close()
    return {"equal": equal}


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        (Case(stage=2, offload="cpu", precision="bf16"), 2),
        (Case(stage=3, offload="cpu", overrides=(("sub_group_size", 100),)), 1),
    ],
    ids=str,
)
def test_background_updates_on_engines_equal_foreground_updates(case, world_size):
    assert run_ranks(compare, case, world_size=world_size) == [{"equal": True}] * world_size


@pytest.mark.deepspeed
@pytest.mark.nvme
def test_background_updates_refuse_weights_on_nvme(tmp_path):
    case = Case(
        stage=3,
        offload="nvme",
        nvme_path=str(tmp_path),
        overrides=(("sub_group_size", 300_000), ("stage3_param_persistence_threshold", 0)),
    )
    (seen,) = run_ranks(compare, case)
    assert "offload_optimizer.device" in seen["refused"]
