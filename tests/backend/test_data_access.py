"""Writes through ``parameter.data``, and modules that change, are found before weights differ."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from tests.backend.acts import Net
from tests.backend.test_step_state import loss_of, masters, same, start, train
from tests.support.ranks import ranks
from tests.support.runs import build
from tests.support.sampling import nightly, sampled
from zerotune.backend.deepspeed.external import master_weights_of
from zerotune.errors import EngineError
from zerotune.plan.plan import DeepSpeedPlan

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

Write = Callable[[torch.nn.Parameter], object]


def assigns(make: Callable[[torch.Tensor], torch.Tensor]) -> Write:
    return lambda weight: setattr(weight, "data", make(weight.data))


WRITES: Final[dict[str, Write]] = {
    "mul_": lambda weight: weight.data.mul_(0.5),
    "init": lambda weight: torch.nn.init.normal_(weight.data),
    "item": lambda weight: weight.data.__setitem__(..., 1.0),
    "out": lambda weight: torch.add(weight.data, 1.0, out=weight.data),
    "scaled": assigns(lambda data: data * 0.5),
    "transposed": assigns(lambda data: data.t()),
    "half": assigns(lambda data: data.half()),
    "other": assigns(lambda _: torch.ones(16, 16)),
}


@pytest.mark.parametrize("name", sampled(WRITES, ("mul_", "out", "transposed", "half")))
def test_a_write_to_the_data_of_a_partitioned_weight_is_refused_at_once(name: str) -> None:
    write = WRITES[name]
    with start("z3") as engine, start("z3") as reference:
        weight, loss = engine.module.mix.weight, loss_of(engine)
        for call in (lambda: None, lambda: engine.backward(loss), engine.step):
            call()
            # The last graph keeps weights gathered while it is needed.
            if weight.numel() == 0:
                with pytest.raises(EngineError, match=r"model\.mix\.weight\.data.*no effect"):
                    write(weight)
        train(reference, 0)
        assert train(engine, 1) == train(reference, 1)
        assert same(engine, reference)


def test_stage_3_refuses_conversions_that_would_round_weights() -> None:
    with start("z3") as engine:
        train(engine, 0)
        engine.module.to("cpu", engine.dtype)
        copied = copy.deepcopy(engine.module.mix.weight)
        assert type(copied) is torch.nn.Parameter
        train(engine, 1)
        with pytest.raises(EngineError, match=r"conv\.weight\.data.*no effect"):
            engine.module.half().float()
        train(engine, 2)


def start_fp32(stage: int, *, deepspeed: bool = True, **keys: Any) -> Any:
    plan = DeepSpeedPlan.build(
        stage=stage, micro_batch_size=2, precision="fp32", gradient_clipping=0.5,
        optimizer={"type": "AdamW", "params": {"lr": 4e-3}}, **keys,
    )  # fmt: skip
    return build(Net(), plan, deepspeed=deepspeed)


def start_persistent() -> Any:
    return start_fp32(3, stage3_param_persistence_threshold=20)


@pytest.mark.parametrize("kind", ["host", "z2 cpu", "z3", *nightly("z1", "z2")])
def test_a_write_through_data_is_found_before_the_step_in_any_weight(kind: str) -> None:
    with start_persistent() if kind == "z3" else start(kind) as engine:
        train(engine, 0)
        # Each step compares another sample of the weights.
        for name in ("scale", "norm.weight", "norm.bias", "mix.bias"):
            weight = engine.module.get_parameter(name)
            engine.backward(loss_of(engine, 1))
            before = weight.data.clone()
            weight.data.mul_(0.5)
            for _ in range(2):
                with pytest.raises(EngineError, match=f"{name} = .*other code replaced or changed"):
                    engine.step()
            weight.data.copy_(before)
            assert engine.step().applied


@pytest.mark.parametrize("kind", ["z1", "z3", *nightly("z2", "z2 cpu")])
def test_replaced_data_are_refused_at_the_next_call_until_they_are_put_back(kind: str) -> None:
    with start_persistent() if kind == "z3" else start(kind) as engine:
        train(engine, 0)
        weight = engine.module.scale
        loss = loss_of(engine, 1)
        calls = (lambda: engine.backward(loss), engine.step, lambda: loss_of(engine, 2))
        for call in calls:
            before = weight.data
            weight.data = before.clone()
            with pytest.raises(EngineError, match=r"scale = 'other data': .*other code replaced"):
                call()
            weight.data = before
            call()


def test_stage_0_refuses_a_transposed_weight_and_trains_a_replaced_one() -> None:
    with start_fp32(0) as engine, start_fp32(0, deepspeed=False) as reference:
        for each in (engine, reference):
            train(each, 0)
            each.module.mix.weight.data = each.module.mix.weight.data * 0.5
            train(each, 1)
        pairs = zip(masters(engine), masters(reference), strict=True)
        assert all(torch.allclose(mine, other, atol=1e-5) for mine, other in pairs)
        weight = engine.module.mix.weight
        for call in (lambda: loss_of(engine, 2), lambda: train(engine, 2)):
            weight.data = weight.data.t()
            with pytest.raises(EngineError, match=r"mix\.weight = 'strides \(1, 16\)'"):
                call()
            weight.data = weight.data.t()
        train(engine, 2)


@pytest.mark.parametrize(
    ("how", "moment"),
    sampled(
        itertools.product(("replaced", "frozen", "tied"), ("forward", "backward", "step")),
        [("replaced", "forward"), ("frozen", "step"), ("tied", "backward")],
    ),
)
def test_stage_3_refuses_weights_in_modules_that_it_does_not_gather_them_for(
    how: str, moment: str
) -> None:
    with start("z3") as engine, start("z3") as reference:
        train(engine, 0)
        train(reference, 0)
        loss = None if moment == "forward" else loss_of(engine, 1)
        if moment == "step":
            engine.backward(loss)
        mix = engine.module.mix
        if how == "tied":
            mix.weight, own = engine.module.twin.weight, mix.weight
        else:
            engine.module.mix = torch.nn.Linear(16, 16).requires_grad_(how == "replaced")
        calls = {"backward": lambda: engine.backward(loss), "step": engine.step}
        with pytest.raises(EngineError, match=r"mix\.weight.*(added to its module|not be trained)"):
            calls.get(moment, lambda: loss_of(engine, 1))()
        if how == "tied":
            mix.weight = own
        engine.module.mix = mix
        if moment == "forward":
            loss = loss_of(engine, 1)
        if moment != "step":
            engine.backward(loss)
        engine.step()
        train(reference, 1)
        assert same(engine, reference)


def test_reads_of_the_data_of_a_partitioned_weight_are_allowed() -> None:
    with start("z3") as engine, start("z3") as reference:
        for each in engine.module.parameters():
            assert not each.data.requires_grad_(False).requires_grad
            assert list(each.data.bool()) == list(~each.data.bool()) == []
        assert train(engine, 0) == train(reference, 0)


def test_data_are_torchs_own_again_when_no_engine_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with start("z1") as engine:
        assert "data" in vars(torch.nn.Parameter)
        train(engine, 0)
        owned = master_weights_of(engine.deepspeed_engine)
    assert "data" not in vars(torch.nn.Parameter), owned

    def fail(_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(type(engine), "_checks", fail)
    with pytest.raises(OSError, match="no room") as kept:
        start("z1")
    assert "data" not in vars(torch.nn.Parameter), kept
