"""Planted faults are detected: moving data too early or too late changes a run's results."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest
import torch

from tests.backend.host.streaming import Run, differences, train
from tests.support.ranks import ranks
from zerotune.backend.host import engine, lanes, passes, residency, steps, units
from zerotune.errors import EngineError
from zerotune.plan.context import Streaming
from zerotune.plan.memory.hosted import GRADIENTS_UNDER_WAY

pytestmark = [pytest.mark.deepspeed, ranks(1)]

CLIPPED = Run(family="web", checkpointing="on", accumulation=2, steps=4)
WHOLE_GRAPH = Run(family="web", accumulation=2, steps=4)
EAGER = Run(family="web", checkpointing="on", accumulation=2, clipping=0.0, steps=4)


def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy gradients in a thread, as on a device; on a CPU the caller copies them."""

    def lane(*args: Any, in_caller: bool = False, **more: Any) -> lanes.Lane:
        return lanes.Lane(*args, **more)

    monkeypatch.setattr(engine, "Lane", lane)


def spoil_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill evicted units with NaN instead of freeing them: a use changes results."""

    def evict(self: Any) -> None:
        self.flat.data.fill_(torch.nan)
        self.is_here, self.loaded = False, None

    def allocate(self: Any) -> None:
        if not self._storage.nbytes():
            self._storage.resize_(self.nbytes)
        self.flat.data.fill_(torch.nan)
        self.is_here = True

    monkeypatch.setattr(units.Unit, "evict", evict)
    monkeypatch.setattr(units.Unit, "allocate", allocate)


def streamed(run: Run) -> dict[str, Any]:
    return train(run, streamed=Streaming(window=2), seed=3)


def without_fault(monkeypatch: pytest.MonkeyPatch, run: Run) -> dict[str, Any]:
    """Return the results of a good run; evicted units are NaN from here on."""
    in_threads(monkeypatch)
    good = streamed(run)
    spoil_evicted(monkeypatch)
    return good


def is_seen(good: dict[str, Any], run: Run) -> bool:
    """Return whether a run gives different results or fails."""
    try:
        return bool(differences(good, streamed(run)))
    except EngineError:
        return True


@pytest.mark.parametrize("run", [CLIPPED, EAGER], ids=str)
def test_evicted_weights_are_never_used_without_a_fault(monkeypatch, run):
    assert not differences(without_fault(monkeypatch, run), streamed(run))


@pytest.mark.parametrize("run", [EAGER], ids=str)
def test_not_waiting_for_a_pass_is_detected(monkeypatch, run):
    good = without_fault(monkeypatch, run)
    original = lanes.Lane.submit

    def submit(self: Any, copy: Any, *, wait: Any = None, then: Any = None) -> Any:
        return original(self, copy, then=then)

    monkeypatch.setattr(lanes.Lane, "submit", submit)
    take = passes.UnitPass.take

    def slow(self: Any) -> None:
        time.sleep(0.02)
        take(self)

    monkeypatch.setattr(passes.UnitPass, "take", slow)
    assert is_seen(good, run)


@pytest.mark.nightly
def test_releasing_a_unit_before_its_last_gradient_is_detected(monkeypatch):
    good = without_fault(monkeypatch, WHOLE_GRAPH)
    original = residency.Residency._enter_backward

    def enter(self: Any, call: Any, gradient: torch.Tensor) -> None:
        original(self, call, gradient)
        for unit in call.units:
            self.close_calls(unit)
            unit.evict()

    monkeypatch.setattr(residency.Residency, "_enter_backward", enter)
    assert is_seen(good, WHOLE_GRAPH)


def test_stepping_before_the_last_micro_batch_is_detected(monkeypatch):
    spoil_evicted(monkeypatch)
    original = steps.StreamedSteps.begin_backward

    def begin(self: Any, *, is_last: bool) -> None:
        original(self, is_last=True)

    monkeypatch.setattr(steps.StreamedSteps, "begin_backward", begin)
    # The second micro batch is not the window's last, before which the master weights are read.
    with pytest.raises(EngineError, match="the backward pass uses this module again"):
        streamed(attrs.evolve(EAGER, accumulation=3))


@pytest.mark.nightly
def test_not_fetching_weights_again_after_a_step_is_detected(monkeypatch):
    good = without_fault(monkeypatch, CLIPPED)
    monkeypatch.setattr(
        units.Unit, "is_current", property(lambda unit: unit.is_here and unit.loaded is not None)
    )
    assert is_seen(good, CLIPPED)


@pytest.mark.parametrize("run", [EAGER], ids=str)
def test_gradients_of_only_a_few_units_wait_on_the_device(monkeypatch, run):
    in_threads(monkeypatch)
    under_way, most = set(), []
    land = steps.StreamedSteps._land
    complete = steps.StreamedSteps._complete

    def slowly(self: Any, unit: Any, *came: Any) -> None:
        time.sleep(0.005)
        land(self, unit, *came)
        under_way.discard(unit)

    def counted(self: Any, unit: Any) -> None:
        under_way.add(unit)
        complete(self, unit)
        most.append(len(under_way))

    monkeypatch.setattr(steps.StreamedSteps, "_land", slowly)
    monkeypatch.setattr(steps.StreamedSteps, "_complete", counted)
    train(run, streamed=True)
    assert max(most) == GRADIENTS_UNDER_WAY
