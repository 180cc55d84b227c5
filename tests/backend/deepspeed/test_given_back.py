"""The user's module after its engine has been closed."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.models import HostileNet
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import Case, start
from zerotune.backend.deepspeed import given_back
from zerotune.errors import EngineError
from zerotune.platform import Platform

WHOLE = ("stage3_param_persistence_threshold", 10)
PLACES = (
    Case(deepspeed=False),
    Case(stage=0),
    Case(stage=2, offload="cpu"),
    Case(stage=3, overrides=(WHOLE,)),
    Case(stage=3, offload="cpu", offload_param="cpu", overrides=(WHOLE,)),
)


def trained(engine: Any) -> list[float]:
    losses = []
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 7, 7, generator=generator).to(engine.device)
        loss = (engine(x).float() - 0.5).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def in_turn(places: tuple[Case, ...]) -> list[list[float]]:
    """Train one model under one engine after another; check it in between and return the losses."""
    model = HostileNet(0, scalar=False)
    names = [set(vars(each)) for each in (*model.modules(), *model.parameters())]
    found = []
    for case in places:
        with start(case, model) as engine:
            found.append(trained(engine))
            weights = {name: full.clone() for name, full in engine.master_weights.gather()}
        for name, parameter in model.named_parameters():
            if name in weights:
                assert torch.equal(parameter, weights[name]), (case, name)
        assert torch.isfinite(model(torch.ones(4, 7, 7))).all()
        assert all(tensor.numel() for tensor in model.state_dict().values())
        if case.stage == 3:
            after = [set(vars(each)) for each in (*model.modules(), *model.parameters())]
            new = set().union(*(b - a for a, b in zip(names, after, strict=True)))
            assert not [name for name in new if name.startswith("ds_")]
            assert not model._forward_hooks
    return found


@pytest.mark.deepspeed
def test_the_module_of_a_closed_engine_trains_under_the_next_engine() -> None:
    ((first, *_), (last, *_)) = (run_ranks(in_turn, places)[0] for places in (PLACES, PLACES[::-1]))
    assert first == pytest.approx(last, rel=5e-5)


class Shift(torch.nn.Module):
    """Returns its parameter, which DeepSpeed registers with the module that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self) -> torch.Tensor:
        return self.weight


class Shifted(torch.nn.Module):
    """A layer, and a parameter that another module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = torch.nn.Linear(8, 8), Shift()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.shift()


@pytest.mark.deepspeed
@ranks(1)
def test_a_closed_engine_frees_its_model_and_leaves_deepspeed_as_it_was() -> None:
    kept = []
    for _ in range(2):
        model = Shifted()
        kept.append(weakref.ref(model))
        with start(Case(stage=3), model) as engine:
            engine.backward(engine(torch.ones(4, 8)).square().mean())
            engine.step()
        del model, engine
        gc.collect()
    assert [each() for each in kept] == [None, None]


@pytest.mark.deepspeed
@ranks(1)
def test_starting_a_second_engine_on_a_model_raises_one_clear_error() -> None:
    model = HostileNet(0, scalar=False)
    found = []
    with start(Case(stage=3, overrides=(WHOLE,)), model) as engine:
        trained(engine)
        for again in (model, torch.nn.Sequential(model)):
            try:
                start(Case(deepspeed=False), again)
            except EngineError as error:
                found.append(str(error))
        assert trained(engine)
    (alone, inside) = found
    for message in (alone, inside):
        assert "another open engine" in message
        assert "close the first trainer" in message


@pytest.mark.deepspeed
@ranks(1)
def test_saving_a_partitioned_module_of_an_engine_raises_instead_of_writing_empty_tensors() -> None:
    model = HostileNet(0, scalar=False)
    found = []
    with start(Case(stage=3, overrides=(WHOLE,)), model) as engine:
        part = next(each for each in model.modules() if vars(each)["_parameters"])
        for use in (model.state_dict, part.state_dict):
            with pytest.raises(EngineError) as refused:
                use()
            found.append(str(refused.value))
        engine.deepspeed_engine.module_state_dict()
    for message in found:
        assert "would write empty tensors" in message
        assert "zerotune.export_model(path, engine=engine)" in message
    assert all(tensor.numel() for tensor in model.state_dict().values())
    assert not any(each._state_dict_hooks for each in model.modules())


@pytest.mark.deepspeed
@ranks(2)
def test_using_a_model_left_partitioned_over_ranks_raises_one_clear_error() -> None:
    model = HostileNet(0, scalar=False)
    with start(Case(stage=3, overrides=(WHOLE,)), model) as engine:
        trained(engine)
    found = []
    uses = (
        lambda: model(torch.ones(4, 7, 7)),
        model.state_dict,
        lambda: start(Case(stage=2), model),
    )
    for use in uses:
        try:
            use()
        except EngineError as error:
            found.append(str(error))
    assert len(found) == 3
    for message in found:
        assert "partitioned over 2 ranks" in message
        assert "trainer.export" in message


def test_weights_on_nvme_return_to_the_module_only_if_they_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = torch.nn.Linear(1000, 1000)
    for parameter in model.parameters():
        parameter.ds_numel = parameter.numel()
        parameter.ds_tensor = SimpleNamespace(status=SimpleNamespace(name="NOT_AVAILABLE"))
    small = Platform.synthetic("cpu", ram=2**20)
    monkeypatch.setattr(given_back, "detect_platform", lambda: small)
    optimizer = SimpleNamespace(grad_partitions_flat_buffer=None)
    with given_back.restored(model, optimizer, world_size=1):
        pass
    with pytest.raises(EngineError, match=r"on NVMe \(3\.\d+ MiB\) do not fit.*trainer\.export"):
        model(torch.ones(1, 1000))
