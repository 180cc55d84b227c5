"""Any reader of a streamed weight gets its newest value, wherever it is."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import pytest
import torch

from tests.backend.host.streaming import Run, advance, loss_of, make_model, start, train
from tests.support.ranks import ranks
from zerotune.backend.host import passes
from zerotune.ema import EMAShadow
from zerotune.errors import EngineError
from zerotune.plan.context import Streaming

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

RUN = Run(family="web", steps=3, clipping=0.5)


STREAMED: dict[str, Any] = {"streamed": Streaming(window=2)}
PLACES = pytest.mark.parametrize("place", [STREAMED, {"engine": "host"}], ids=str)


def begin(run: Run = RUN, place: dict[str, Any] = STREAMED, steps: int = 2) -> Any:
    engine = start(run, make_model(run), **place)
    advance(run, engine, range(steps))
    return engine


def expected(engine: Any) -> dict[str, torch.Tensor]:
    """Return the newest weights, from the masters."""
    named = {f.address.name: f for f in engine.master_weights.read()}
    return {
        name: f.value.view(f.address.shape).to(engine.dtype).clone() for name, f in named.items()
    }


READERS: dict[str, Callable[[torch.nn.Module, str], torch.Tensor]] = {
    "state_dict": lambda model, name: model.state_dict()[name],
    "data": lambda model, name: model.get_parameter(name).data,
    "detach": lambda model, name: model.get_parameter(name).detach(),
    "clone": lambda model, name: model.get_parameter(name).clone(),
    "arithmetic": lambda model, name: model.get_parameter(name) * 1,
    "named_parameters": lambda model, name: dict(model.named_parameters())[name] + 0,
    "deepcopy of a parameter": lambda model, name: copy.deepcopy(model.get_parameter(name)),
    "deepcopy of the model": lambda model, name: copy.deepcopy(model).get_parameter(name),
    "pickle": lambda model, name: pickle.loads(pickle.dumps(model.get_parameter(name))),
    "to another dtype": lambda model, name: model.get_parameter(name).float().bfloat16(),
    "a list of them": lambda model, name: torch.stack([model.get_parameter(name)] * 2)[1],
    "numpy": lambda model, name: torch.from_numpy(
        model.get_parameter(name).detach().float().numpy()
    ).bfloat16(),
}


@PLACES
def test_every_reader_gets_the_newest_weight_of_every_unit(place):
    with begin(place=place) as engine:
        for step, (reader, read) in enumerate(READERS.items(), start=2):
            for name, weight in expected(engine).items():
                got = read(engine.module, name)
                assert torch.equal(got.detach(), weight), (reader, name)
            del got
            advance(RUN, engine, range(step, step + 1))


@PLACES
def test_readers_right_after_a_step_wait_for_its_pass(monkeypatch, place):
    original = passes.UnitPass.take

    def slow(self: Any) -> None:
        time.sleep(0.05)
        original(self)

    with begin(place=place) as engine:
        before = expected(engine)
        monkeypatch.setattr(passes.UnitPass, "take", slow)
        advance(RUN, engine, range(2, 3))
        got = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        after = expected(engine)
        assert all(torch.equal(got[name], after[name]) for name in got)
        assert not all(torch.equal(before[name], after[name]) for name in got)


def test_another_thread_can_read_weights_while_the_model_computes():
    over = threading.Event()

    def read(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> int:
        reads = 0
        while not over.is_set():
            for name, weight in weights.items():
                assert torch.equal(model.get_parameter(name).detach().clone(), weight), name
                reads += 1
        return reads

    with begin() as engine, ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read, engine.module, expected(engine))
        for step in range(20):
            with engine.evaluating():
                loss_of(RUN, engine, step)
        over.set()
        assert reading.result() > 0


@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_hooks_inside_a_call_see_the_current_weights_of_other_units_too(checkpointing):
    run = attrs.evolve(RUN, checkpointing=checkpointing)
    with begin(run) as engine:
        weights, model = expected(engine), engine.module
        names = [name for name in weights if name.startswith("blocks.")]
        reads = [lambda p: p.clone(), lambda p: p.detach(), lambda p: torch.cat([p, p])[: len(p)]]
        seen: dict[str, list[bool]] = {name: [] for name in names}

        def read(*_: Any) -> None:
            for name in names:
                found = [
                    torch.equal(get(model.get_parameter(name)), weights[name]) for get in reads
                ]
                seen[name].append(all(found))

        for block in model.blocks:
            # Read during the block's call: before and after its first layer, forward and backward.
            block.a.register_forward_pre_hook(read)
            block.a.register_forward_hook(read)
            block.a.register_full_backward_hook(read)
        engine.backward(loss_of(run, engine, 9))
        assert engine.counts.evicted
    # Eight calls of blocks make about 24 reads, or 40 with recomputation; allow for fewer.
    least = 18 if checkpointing == "off" else 36
    assert all(len(each) > least - 2 and all(each) for each in seen.values())


def test_a_unit_that_uses_another_units_weight_trains_as_at_zero_2():
    def losses(streamed: Any) -> list[Any]:
        model = make_model(RUN)
        model.blocks[2].a.register_forward_hook(
            lambda _module, _args, output: output * model.blocks[0].n.weight.square().mean()
        )
        with start(RUN, model, streamed=streamed) as engine:
            return [advance(RUN, engine, range(3)), expected(engine)["blocks.0.n.weight"]]

    (mine, weight), (theirs, their_weight) = losses(Streaming(window=2)), losses(None)
    assert mine == theirs
    assert torch.equal(weight, their_weight)


def test_gradients_flow_through_uses_of_a_weight_outside_its_unit():
    def losses(streamed: Any) -> list[Any]:
        with start(RUN, make_model(RUN), streamed=streamed) as engine:
            for step in range(3):
                penalty = engine.module.blocks[2].b.weight.square().sum().float()
                engine.backward(loss_of(RUN, engine, step) + 0.01 * penalty)
                norm = engine.step().grad_norm
            return [norm, expected(engine)["blocks.2.b.weight"]]

    (mine, weight), (theirs, their_weight) = losses(True), losses(None)
    assert mine == theirs
    assert torch.equal(weight, their_weight)


def test_direct_writes_reach_the_next_forward_pass_and_fail_the_weight_check():
    with begin() as engine:
        with torch.no_grad():
            engine.module.blocks[1].b.weight.zero_()
            engine.module.blocks[2].b.weight.data.zero_()
        assert not engine.module.blocks[1].b.weight.any()
        seen: list[bool] = []
        for index in (1, 2):
            engine.module.blocks[index].b.register_forward_pre_hook(
                lambda module, _: seen.append(bool(module.weight.any()))
            )
        with engine.evaluating():
            loss_of(RUN, engine, 0)
        assert seen == [False, False, False]
        with pytest.raises(EngineError, match="differ from the optimizer's master weights"):
            check_all(engine)


def check_all(engine: Any) -> None:
    for sample in range(30):
        engine.master_weights.check_model(sample)


def test_streamed_weights_cannot_be_replaced_or_moved():
    with begin() as engine:
        engine.module.to("cpu")
        engine.module.to(torch.bfloat16)
        with pytest.raises(EngineError, match="streamed from host memory"):
            engine.module.blocks[0].a.weight.data = torch.zeros(60, 30)
        with pytest.raises(EngineError, match="streamed from host memory"):
            engine.module.blocks[0].float()
        advance(RUN, engine, range(2, 3))


def test_reading_masters_during_a_step_that_began_in_the_backward_pass_is_refused():
    run = Run(family="web", clipping=0.0)
    with begin(run) as engine:
        engine.backward(loss_of(run, engine, 5))
        with pytest.raises(EngineError, match="only some of them were updated"):
            list(engine.master_weights.read())
        assert engine.step().applied
        assert list(engine.master_weights.read())


def test_weights_frozen_during_training_do_not_move():
    def masters() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in engine.master_weights.gather()}

    with start(RUN, make_model(RUN), streamed=Streaming(window=2)) as engine:
        ema = EMAShadow(decay=0.5).attach(engine)
        advance(RUN, engine, range(2))
        engine.module.blocks[2].requires_grad_(False)
        engine.module.blocks[3].a.weight.requires_grad_(False)
        before = masters()
        advance(RUN, engine, range(2, 4))
        ema.step()
        after = masters()
        still = {name for name in before if torch.equal(before[name], after[name])}
        frozen = ("blocks.2.", "blocks.3.a.weight")
        assert still == {name for name in before if name.startswith(frozen)}
        engine.module.requires_grad_(True)
        advance(RUN, engine, range(4, 6))
        later = masters()
        assert not [name for name in after if torch.equal(after[name], later[name])]


def test_a_closed_engine_leaves_an_ordinary_model_with_all_its_weights():
    engine = begin()
    weights = expected(engine)
    model = engine.module
    engine.close()
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    assert all(torch.equal(p.detach(), weights[name]) for name, p in model.named_parameters())
    out = model(x=torch.randn(2, 8).bfloat16())
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    again = train(RUN, streamed=True)
    assert again["engine"] == "HostEngine"
