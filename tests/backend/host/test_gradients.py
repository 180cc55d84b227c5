"""Units share a few gradient buffers if steps begin in the backward pass."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest
import torch

from tests.backend.host.streaming import (
    Run,
    Web,
    advance,
    differences,
    make_model,
    start,
    train,
)
from tests.support.ranks import ranks
from zerotune.backend.host import passes
from zerotune.backend.host.gradients import GradientPool, GradientsOfAll
from zerotune.backend.host.units import FlatOrder, HostMemory, find_units, make_units
from zerotune.plan.context import Streaming

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

EAGER = Run(family="web", checkpointing="on", clipping=0.0, groups=True, steps=4)


ONE = Streaming(window=2, gradient_buffers=1)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"clipping": 1.0}, "the norm of all gradients"),
        ({"accumulation": 2}, "accumulates the gradients of all micro batches"),
        ({"family": "qwen"}, "would not save memory"),
    ],
    ids=str,
)
def test_units_share_gradient_buffers_only_if_passes_free_them(changed, reason):
    run = attrs.evolve(EAGER, **changed)
    with start(run, make_model(run), streamed=Streaming(gradient_buffers=4)) as engine:
        kind = GradientPool if reason is None else GradientsOfAll
        assert type(engine._steps._gradients) is kind
        (said,) = [each for each in engine.decisions if each.key == "streamed.gradients"]
    assert (reason or "frees its buffer") in said.reason
    assert said.after.startswith("4 units" if reason is None else "all units")


def test_one_gradient_buffer_is_enough_whatever_is_delayed():
    theirs = train(EAGER)
    for seed in range(3):
        assert not differences(theirs, train(EAGER, streamed=ONE, seed=seed))


def test_a_reused_buffer_is_zero_between_parameters():
    """Leftovers in the gaps would change the scale of a block of 8-bit moments."""
    model = Web().bfloat16()
    names = [name for name, _ in model.named_parameters()]
    order = FlatOrder([names], sizes={n: p.numel() for n, p in model.named_parameters()})
    memory = HostMemory(pin=False)
    units, _ = make_units(
        model, find_units(model), order=order, device=torch.device("cpu"), memory=memory
    )
    pool = GradientPool(units, count=1, memory=memory)
    for unit in units:
        place = pool.take(unit)
        for slab, gradient in place.slabs.items():
            for part in slab.parts:
                assert gradient[part.place].numel() == part.member.parameter.numel()
                gradient[part.place] = 0.0
            assert not gradient.any()
            gradient.fill_(1.0)
        pool.give_back(place)


def test_the_backward_pass_waits_for_a_buffer_until_a_pass_ends(monkeypatch):
    held, most = set(), []
    take, give_back, run = GradientPool.take, GradientPool.give_back, passes.UnitPass.take

    def taken(self: Any, unit: Any) -> Any:
        place = take(self, unit)
        held.add(id(place)) if place.buffer is not None else None
        most.append(len(held))
        return place

    def given(self: Any, place: Any) -> None:
        held.discard(id(place))
        give_back(self, place)

    monkeypatch.setattr(GradientPool, "take", taken)
    monkeypatch.setattr(GradientPool, "give_back", given)
    monkeypatch.setattr(passes.UnitPass, "take", lambda each: (time.sleep(0.01), run(each)))
    train(EAGER, streamed=Streaming(window=2, gradient_buffers=2))
    assert max(most) == 2


def fail(_: Any) -> None:
    raise MemoryError("no more")


def test_the_engine_does_not_wait_for_buffers_of_failed_passes(monkeypatch):
    engine = start(EAGER, make_model(EAGER), streamed=ONE)
    advance(EAGER, engine, range(1))
    monkeypatch.setattr(passes.UnitPass, "take", fail)
    with pytest.raises(MemoryError):
        advance(EAGER, engine, range(1, 3))
    with pytest.raises(MemoryError):
        engine.close()
