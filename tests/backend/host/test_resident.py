"""Weights that stay on the device: the order of updates, and what waits for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.backend.host.streaming import (
    Run,
    advance,
    differences,
    loss_of,
    make_model,
    start,
    train,
    web_batch,
)
from tests.support.ranks import ranks
from zerotune.backend.host import passes
from zerotune.errors import OptimizerError
from zerotune.plan.context import Streaming

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

CLIPPED = Run(family="web")
UNCLIPPED = Run(family="web", clipping=0.0)


def begin(run: Run = CLIPPED) -> Any:
    return start(run, make_model(run), engine="host")


def uploads(engine: Any) -> list[str]:
    """Return the reasons for which a step returned only after all uploads."""
    return [d.reason for d in engine.decisions if d.key == "optimizer.step.uploads"]


def unit_of(engine: Any, name: str) -> Any:
    """Return the unit of a parameter."""
    (unit,) = [u for u in engine._units if any(m.name == name for m in u.members)]
    return unit


def test_units_are_updated_in_the_order_in_which_the_last_forward_pass_used_them(monkeypatch):
    taken: list[Any] = []
    take = passes.UnitPass.take
    monkeypatch.setattr(
        passes.UnitPass, "take", lambda each: (taken.append(each.unit), take(each))[1]
    )
    with begin() as engine:
        assert len(engine._units) > 8
        advance(CLIPPED, engine, range(2))
        engine.master_weights.settle()
        first = unit_of(engine, "inp.weight")
        assert engine._units.index(first) > 8, "the input layer is defined after the blocks"
        taken.clear()
        advance(CLIPPED, engine, range(2, 3))
        engine.master_weights.settle()
        assert taken[0] is first


def test_a_forward_pass_waits_only_for_the_units_that_it_uses(monkeypatch):
    go_on = threading.Event()
    is_ready = passes.UnitPass.is_ready.fget

    def waits(each: Any) -> bool:
        is_last = any(member.name == "blocks.5.b.weight" for member in each.unit.members)
        return is_ready(each) and (go_on.is_set() or not is_last)

    with begin() as engine:
        advance(CLIPPED, engine, range(2))
        engine.master_weights.settle()
        before = engine.module.inp.weight.detach().clone()
        monkeypatch.setattr(passes.UnitPass, "is_ready", property(waits))
        engine.backward(loss_of(CLIPPED, engine, 2))
        assert engine.step().applied
        assert not torch.equal(engine.module.inp.weight, before)
        assert not unit_of(engine, "blocks.5.b.weight").written.done()
        go_on.set()
        engine._steps.passes._signal()
        engine.master_weights.settle()


def test_weights_are_updated_after_the_backward_pass_even_without_clipping():
    with begin(UNCLIPPED) as engine:
        assert not engine.steps_in_backward
        engine.backward(loss_of(UNCLIPPED, engine, 0))
        engine.discard()
        assert engine.state.skipped_steps == 1
        advance(UNCLIPPED, engine, range(1, 3))


def test_a_step_returns_after_all_uploads_while_a_view_could_show_old_weights():
    with begin() as engine:
        advance(CLIPPED, engine, range(2))
        assert not uploads(engine)
        view = engine.module.inp.weight.data
        before = view.clone()
        engine.backward(loss_of(CLIPPED, engine, 2))
        engine.step()
        assert not torch.equal(view, before)
        (reason,) = uploads(engine)
        assert "views of the weights" in reason
        assert reason in engine.explain()


@pytest.mark.parametrize("how", ["in place", "module", "function"])
def test_a_step_returns_after_all_uploads_if_the_whole_model_is_compiled(how):
    with begin() as engine:
        module = engine.module
        if how == "in place":
            module.compile(backend="eager")
            called = engine
        else:
            around = module if how == "module" else lambda **given: 1 * module(**given)
            called = torch.compile(around, backend="eager")
        for step in range(3):
            given = web_batch(torch.Generator().manual_seed(step), engine.dtype)
            engine.backward(called(**given).float().square().mean())
            engine.step()
        (reason,) = uploads(engine)
        assert "compiled" in reason


def test_access_that_bypasses_torch_functions_fails_instead_of_reading_old_values(monkeypatch):
    go_on, take = threading.Event(), passes.UnitPass.take
    with begin() as engine:
        engine.backward(loss_of(CLIPPED, engine, 0))
        monkeypatch.setattr(passes.UnitPass, "take", lambda each: (go_on.wait(30), take(each))[1])
        engine.step()
        given, weight = torch.ones(8).bfloat16(), engine.module.inp.weight
        past = torch._C.DisableTorchFunctionSubclass()
        with pytest.raises(RuntimeError, match=r"shape|size"), past:
            torch.nn.functional.linear(given, weight)
        go_on.set()


def test_an_optimizer_that_the_host_engine_does_not_know_is_run_by_deepspeed():
    run = Run(family="web", optimizer="Lion")
    with start(run, make_model(run), engine="host") as engine:
        assert type(engine).__name__ == "DeepSpeedEngine"
        (said,) = [d for d in engine.decisions if d.key == "engine" and d.severity == "warning"]
        assert (said.before, said.after) == ("host", "deepspeed")
        assert "cannot run" in said.reason


def test_8_bit_moments_need_the_host_engine():
    run = Run(family="web", optimizer="AdamW8BitStates", steps=3)
    mine = train(run, engine="host", seed=1)
    streamed = train(run, streamed=Streaming(window=2), seed=2)
    assert not differences(mine, streamed)
    with pytest.raises(OptimizerError, match='engine="host"'):
        start(run, make_model(run), engine="deepspeed")
