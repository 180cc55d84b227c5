"""A wait that is missing in an engine changes the bits of a run.

A fault leaves a run unchanged in which the device works at once, so only the order reveals it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.device import on_device
from tests.device.cases import RESIDENT, STREAMED, ZERO_2, Case, differences, run
from zerotune.backend.host import updates
from zerotune.backend.host.gradients import GradientPool
from zerotune.backend.host.lanes import Copy, Lane
from zerotune.diffusion.activations import StreamTransfers
from zerotune.plan.context import Streaming

pytestmark = pytest.mark.deepspeed

Plant = Callable[[pytest.MonkeyPatch], None]
GRID = tuple((seed, lateness) for seed in range(5) for lateness in (0.3, 0.02))

STREAM = attrs.evolve(STREAMED, steps=3)
STREAM_EAGER = attrs.evolve(STREAM, clipping=0.0)
FEW_BUFFERS = attrs.evolve(STREAM_EAGER, streamed=Streaming(window=2, gradient_buffers=1))
OVERLAPPED = attrs.evolve(ZERO_2, steps=3, offload="none", overlap=True)
OFFLOADED = attrs.evolve(STREAM, checkpointing="offloaded")


def computation_does_not_wait_for_an_upload(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copy, "receive", lambda copy: copy._queued.result() and None)


def copies_do_not_wait_for_computation(patch: pytest.MonkeyPatch) -> None:
    """An upload overwrites memory that is in use; a download reads what is not computed yet."""

    def queue(lane: Any, copy: Any, _ready: Any) -> Any:
        with lane._streams.stream(lane._stream):
            copy()
            return lane._stream.record_event()

    patch.setattr(Lane, "_queue", queue)


def the_host_reads_gradients_before_they_have_landed(patch: pytest.MonkeyPatch) -> None:
    def run_lane(lane: Any, copy: Any, wait: Any, then: Any, ready: Any) -> Any:
        if wait is not None:
            wait()
        event = lane._queue(copy, ready)
        if then is not None:
            then()
        return event

    patch.setattr(Lane, "_run", run_lane)
    patch.setattr(Copy, "finish", lambda copy: copy._queued.result() and None)


def gradients_overwrite_gradients_that_are_not_used_yet(patch: pytest.MonkeyPatch) -> None:
    def take(pool: Any, unit: Any) -> Any:
        place = original(pool, unit)
        if place.buffer is not None:
            pool._free.put(place.buffer)
        return attrs.evolve(place, buffer=None)

    def update_later(*arguments: Any) -> None:
        time.sleep(0.003)
        update(*arguments)

    original, update = GradientPool.take, updates._run
    patch.setattr(GradientPool, "take", take)
    patch.setattr(updates, "_run", update_later)


def memory_is_not_kept_for_another_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "record_stream", lambda _tensor, _stream: None)


def activations_return_to_memory_in_use(patch: pytest.MonkeyPatch) -> None:
    load = StreamTransfers.load

    def load_at_once(transfers: Any, stored: Any) -> Any:
        with patch.context() as inner:
            inner.setattr(transfers._side, "wait_stream", lambda _stream: None, raising=False)
            return load(transfers, stored)

    patch.setattr(StreamTransfers, "load", load_at_once)


FAULTS: tuple[tuple[Plant, Case], ...] = (
    (computation_does_not_wait_for_an_upload, STREAM),
    (computation_does_not_wait_for_an_upload, attrs.evolve(RESIDENT, steps=3)),
    (copies_do_not_wait_for_computation, STREAM),
    (the_host_reads_gradients_before_they_have_landed, STREAM),
    (the_host_reads_gradients_before_they_have_landed, STREAM_EAGER),
    (gradients_overwrite_gradients_that_are_not_used_yet, FEW_BUFFERS),
    (memory_is_not_kept_for_another_stream, OVERLAPPED),
    (activations_return_to_memory_in_use, OFFLOADED),
)
SAMPLE = (copies_do_not_wait_for_computation,)
"""``test_transfers`` plants the other faults of activation offload."""


def orders_until_found(reference: dict[str, Any], case: Case, folder: Path) -> int | None:
    """Number of orders until one changes the run or stops it; ``None`` if none does."""
    for tried, (seed, lateness) in enumerate(GRID, start=1):
        try:
            if differences(reference, run(case, seed, lateness, folder)):
                return tried
        except Exception:  # noqa: BLE001 - the device or the engine noticed
            return tried
    return None


@pytest.mark.parametrize(
    ("plant", "case"),
    [
        pytest.param(
            plant,
            case,
            marks=() if plant in SAMPLE else pytest.mark.nightly,
            id=f"{plant.__name__}-{case.name}",
        )
        for plant, case in FAULTS
    ],
)
@on_device()
def test_a_fault_in_the_order_of_work_is_found(plant, case, tmp_path, monkeypatch):
    reference = run(case, 0, 1.0, tmp_path)
    plant(monkeypatch)
    if plant is not gradients_overwrite_gradients_that_are_not_used_yet:  # with host threads too
        assert not differences(reference, run(case, 0, 1.0, tmp_path))
    assert orders_until_found(reference, case, tmp_path) is not None
