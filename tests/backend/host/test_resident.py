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


def test_a_step_returns_after_all_uploads_if_the_whole_model_is_compiled():
    with begin() as engine:
        engine.module.compile(backend="eager")
        advance(CLIPPED, engine, range(2))
        (reason,) = uploads(engine)
        assert "__call__ is compiled" in reason


def test_explain_names_the_engine_that_runs():
    with begin() as engine:
        assert "host engine, 1 process" in engine.explain()
        assert "in a thread" in engine.explain()
    with start(CLIPPED, make_model(CLIPPED)) as engine:
        assert "DeepSpeed, 1 process" in engine.explain()


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
