"""Nothing is read before its event, no buffer is reused in flight, and every wait is counted.

The tests run on a GPU, and on a CPU, where the recorder's streams stand in for a device's.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import run_ranks
from tests.support.runs import Case, start, unet_loss
from zerotune.backend.step.pending import Piece, StreamUpload
from zerotune.backend.streams import RecordedStream, Recorder, host_name, learn
from zerotune.diffusion import ActivationOffload
from zerotune.diffusion.activations import StreamTransfers
from zerotune.ema import BackgroundEMA, EMAShadow
from zerotune.errors import EMAError
from zerotune.training.step import on_device

pytestmark = pytest.mark.device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# -- Recording other threads and the allocator.


class InThread(TorchDispatchMode):
    """Let a recorder also record another thread than it was entered in."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def threads_of(recorder: Recorder) -> Iterator[None]:
    """Record threads started in the block, ordering each after its start and before its join."""
    start, join, run = threading.Thread.start, threading.Thread.join, threading.Thread.run
    begun: dict[threading.Thread, dict[str, int]] = {}
    ended: dict[threading.Thread, dict[str, int]] = {}

    def started(thread: threading.Thread) -> None:
        begun[thread] = dict(recorder.clock(host_name()))
        recorder._tick(host_name())
        start(thread)

    def running(thread: threading.Thread) -> None:
        learn(recorder.clock(host_name()), begun.get(thread, {}))
        with InThread(recorder):
            run(thread)
        ended[thread] = dict(recorder.clock(host_name()))

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive():
            learn(recorder.clock(host_name()), ended.get(thread, {}))

    with mock.patch.multiple(threading.Thread, start=started, join=joined, run=running):
        yield


def busy(recorder: Recorder) -> set[str]:
    """Return the streams and threads that have read or written something."""
    return {name for name, clock in recorder._clocks.items() if clock.get(name)}


def keep(recorder: Recorder, tensor: torch.Tensor, stream: RecordedStream) -> None:
    """Record ``tensor.record_stream(stream)``."""
    recorder._of(tensor).kept_for.add(stream.name)
    if recorder.real is not None:
        torch.ops.aten.record_stream(tensor, stream.real)


# -- The recorder itself.


def two_streams() -> tuple[Recorder, RecordedStream, torch.Tensor, torch.Tensor]:
    recorder = Recorder()
    with recorder:
        locked = torch.zeros(64, pin_memory=True)
        there = torch.ones(64, device=DEVICE)
    return recorder, recorder.Stream(), locked, there


def test_a_read_before_its_event_is_a_fault() -> None:
    recorder, side, locked, there = two_streams()
    with recorder, recorder.stream(side):
        locked.copy_(there, non_blocking=True)
    assert len(recorder.faults) == 1
    assert "reads device memory written on computation" in recorder.faults[0]


def test_a_read_after_its_event_is_no_fault() -> None:
    recorder, side, locked, there = two_streams()
    side.wait_stream(recorder.current_stream())
    with recorder, recorder.stream(side):
        locked.copy_(there, non_blocking=True)
    done = side.record_event()
    assert recorder.faults == recorder.waits == []
    assert recorder.copies == 1
    done.synchronize()
    with recorder:
        locked.add_(1)
    assert (recorder.faults, recorder.waits) == ([], ["event.synchronize"])


def test_a_page_locked_buffer_reused_in_flight_is_a_fault() -> None:
    recorder, side, locked, there = two_streams()
    side.wait_stream(recorder.current_stream())
    with recorder:
        with recorder.stream(side):
            there.copy_(locked, non_blocking=True)
        locked.fill_(3)
    assert len(recorder.faults) == 1
    assert "writes locked memory read on stream 1" in recorder.faults[0]


def test_device_memory_freed_in_flight_is_a_fault() -> None:
    recorder, side, locked, there = two_streams()
    side.wait_stream(recorder.current_stream())
    with recorder, recorder.stream(side):
        locked.copy_(there, non_blocking=True)
    del there
    with recorder:
        torch.ones(3, device=DEVICE)
    assert recorder.faults == ["device memory of computation is freed while stream 1 uses it"]


def test_a_non_blocking_copy_of_pageable_memory_is_a_fault() -> None:
    recorder = Recorder()
    with recorder:
        here, there = torch.zeros(8), torch.ones(8, device=DEVICE)
        recorder.lie("pageable", here) if DEVICE == "cpu" else None
        there.copy_(here, non_blocking=True)
    assert recorder.faults == ["aten::copy_ of pageable memory is declared as non-blocking"]


def test_every_wait_of_the_host_is_counted() -> None:
    recorder, side, locked, there = two_streams()
    with recorder:
        float(there.sum())
        locked.copy_(there)
        locked.add_(1)
    side.synchronize()
    assert recorder.waits == ["aten::_local_scalar_dense", "aten::copy_", "stream.synchronize"]
    assert recorder.faults == []


def test_record_stream_counts_as_no_access() -> None:
    recorder, side, locked, there = two_streams()
    side.wait_stream(recorder.current_stream())
    with recorder, recorder.stream(side):
        locked.copy_(there, non_blocking=True)
    # Noted by hand: CPUs lack the operator. Its schema claims that it writes.
    recorder._note(torch.ops.aten.record_stream.default, (there, None), {}, None, locked=False)
    assert recorder.faults == []


def test_an_autograd_thread_inherits_the_events_of_its_caller() -> None:
    recorder = Recorder(otherwise="pageable")
    over = threading.Lock()
    over.acquire()

    def as_autograd() -> None:
        with recorder:
            here.add_(1)
        over.release()

    with recorder:
        here = torch.zeros(8)
    _thread.start_new_thread(as_autograd, ())
    assert over.acquire(timeout=60)
    assert recorder.faults == []
    assert busy(recorder) == {f"the host's {threading.main_thread().name}"}


# -- Activations.


class NoWaitToStore(StreamTransfers):
    def store(self, tensor: torch.Tensor) -> Any:
        self._side.wait_stream = lambda _other: None
        try:
            return super().store(tensor)
        finally:
            del self._side.wait_stream


class NoSettling(StreamTransfers):
    def settle(self, stored: Any) -> None:
        pass


class NoWaitToLoad(StreamTransfers):
    def finish(self, loading: Any) -> torch.Tensor:
        return loading.tensor


class ReleasedAtOnce(StreamTransfers):
    """Reuses the host block while the first tensor is still being copied to it."""

    def store(self, tensor: torch.Tensor) -> Any:
        stored = super().store(tensor)
        stored.buffer[:1].fill_(0)
        return stored


def offload(kind: type[StreamTransfers]) -> tuple[Recorder, ActivationOffload]:
    """Run two steps of a U-Net with activations offloaded to host memory."""
    from tests.diffusion.test_activations import text_unet

    model = text_unet().to(DEVICE).train()
    recorder = Recorder()
    transfers = kind(torch.device(DEVICE), streams=recorder)
    offloading = ActivationOffload(smallest=1, transfers=transfers)
    inputs = {
        "sample": torch.randn(2, 4, 16, 16, device=DEVICE),
        "timestep": torch.tensor([3, 5], device=DEVICE),
        "encoder_hidden_states": torch.randn(2, 6, 12, device=DEVICE),
    }
    with recorder, offloading.attach(model):
        for _ in range(2):
            model(**inputs).sample.square().mean().backward()
    return recorder, offloading


def test_activation_offload_follows_the_rules() -> None:
    recorder, offloading = offload(StreamTransfers)
    assert recorder.faults == []
    assert recorder.waits == [], "the host queues both passes without looking back"
    counts = offloading.counts
    assert counts.stored > 20
    assert counts.fetched_ahead > 10
    assert recorder.copies >= counts.stored + counts.fetched_ahead


@pytest.mark.parametrize("kind", [NoWaitToStore, NoSettling, NoWaitToLoad, ReleasedAtOnce])
def test_activation_offload_that_breaks_a_rule_is_detected(kind: type[StreamTransfers]) -> None:
    recorder, _ = offload(kind)
    assert recorder.faults


# -- EMAs in the background.


class NotJoined(BackgroundEMA):
    def _about_to_change(self) -> None:
        self._changes += 1


def average(kind: type[BackgroundEMA], recorder: Recorder) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = EMAShadow(decay=0.9)
    background = kind(shadow=ema, optimizer=optimizer)
    with recorder, threads_of(recorder), background.attach(model):
        for _ in range(3):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            background.step()


def of_host_memory() -> Recorder:
    """Return a recorder for host memory, in which threads take the place of streams."""
    return Recorder(otherwise="pageable")


def test_background_emas_follow_the_rules() -> None:
    recorder = of_host_memory()
    average(BackgroundEMA, recorder)
    assert recorder.faults == []
    assert recorder.waits == []


def test_a_background_ema_without_a_wait_is_detected() -> None:
    recorder = of_host_memory()
    # If the two actually collide, the shadow raises too.
    with contextlib.suppress(EMAError):
        average(NotJoined, recorder)
    faults = recorder.faults
    assert any("the host's zerotune-ema" in fault for fault in faults), faults


# -- Gradients on their way to host memory, in the real engine.


def gradients(waits: bool, overlap: bool) -> dict[str, Any]:
    """Run two steps at stage 2 with the recorder as DeepSpeed's device."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from tests.support.models import tiny_unet
    from zerotune.backend.step.kernel import HostStepOp

    recorder = Recorder()
    accelerator = type(get_accelerator())
    for name in ("Stream", "Event", "current_stream", "stream"):
        setattr(accelerator, name, getattr(recorder, name))

    def record_stream(tensor: torch.Tensor, stream: RecordedStream) -> None:
        keep(recorder, tensor, stream)

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign,assignment]
    if DEVICE == "cpu":
        accelerator.resolves_data_dependency = lambda _self: False
        accelerator.is_synchronized_device = lambda _self: False
        # With this, gradients arrive in another dtype than the buffers', as from a device.
        HostStepOp.knows = lambda _self, _dtype: False
    if not waits:
        DeepSpeedZeroOptimizer._wait_for_offload_copies = lambda _self: None
    overrides = (("overlap_comm", overlap),)
    case = Case(stage=2, offload="cpu", precision="bf16", overrides=overrides)
    engine = start(case, tiny_unet())
    assert engine.device.type == DEVICE
    optimizer = engine.deepspeed_engine.optimizer
    slabs = optimizer.single_partition_of_fp32_groups
    if DEVICE == "cpu":
        for slab in slabs:
            recorder.lie("locked", slab.data, slab.grad)
    passes = []
    for step in range(3):
        with recorder:
            loss = unet_loss(engine, step)
            recorder.waits.clear()
            engine.backward(loss)
            passes.append(len(recorder.waits))
            optimizer._wait_for_offload_copies()
            for slab in slabs:
                slab.grad.mul_(1.0)  # The step reads them in C++, where the recorder sees nothing.
        engine.step()
    found = {"faults": list(recorder.faults), "waits": passes, "copies": recorder.copies}
    found["busy"] = busy(recorder)
    found["parameters"] = sum(1 for _ in engine.module.parameters())
    engine.close()
    return found


@pytest.mark.deepspeed
@pytest.mark.parametrize("overlap", [False, True])
def test_gradient_offload_follows_the_rules(overlap: bool) -> None:
    (found,) = run_ranks(gradients, True, overlap)
    assert found["faults"] == []
    assert found["copies"] >= 3 * found["parameters"]
    assert max(found["waits"]) == 0
    assert ("stream 1" in found["busy"]) == overlap, "DeepSpeed's stream for reductions"


@pytest.mark.deepspeed
def test_gradient_offload_without_a_wait_is_detected() -> None:
    (found,) = run_ranks(gradients, False, False)
    assert any("locked memory written on" in fault for fault in found["faults"])


# -- Batches on their way to the device.


def test_a_pageable_batch_is_copied_as_pageable_memory() -> None:
    batch = {"images": torch.zeros(2, 3), "labels": torch.zeros(2, dtype=torch.int64)}
    recorder = Recorder()
    if DEVICE == "cpu":
        recorder.lie("pageable", *batch.values())
    with recorder:
        moved = on_device(batch, torch.device("meta" if DEVICE == "cpu" else DEVICE))
    assert recorder.faults == []
    assert recorder.waits == ["aten::_to_copy"] * 2
    assert list(moved) == list(batch)


# -- Weights on their way to the device.


class NotWaitedFor(StreamUpload):
    def begin(self) -> None:
        self.stream.wait_stream(self.accelerator.current_stream())


class NotReceived(StreamUpload):
    def receive(self, sent: Any) -> None:
        pass


class TooEarly(StreamUpload):
    """Starts while the previous forward pass may still read the weights."""

    def begin(self) -> None:
        self.stream.synchronize()


def upload(kind: type[StreamUpload]) -> Recorder:
    """Run three steps on two slabs: written by the host, sent in parts, read by a forward pass."""
    recorder = Recorder()
    with recorder, recorder.page_locking():
        targets = [torch.zeros(64, device=DEVICE) for _ in range(2)]
        sources = [torch.zeros(64, pin_memory=True) for _ in range(2)]
        made = kind(
            targets=targets, sources=sources, stream=recorder.Stream(), accelerator=recorder
        )
        for _ in range(3):
            made.begin()
            sent: Sequence[Any] = [_write_and_send(made, half) for half in (0, 32)]
            for each in sent:
                made.receive(each)
            for target in targets:
                target.mul(2)
    return recorder


def _write_and_send(made: StreamUpload, start: int) -> Any:
    pieces = [Piece(slab=slab, start=start, stop=start + 32) for slab in range(2)]
    for piece in pieces:
        source = made.sources[piece.slab]
        assert source is not None
        source[piece.start : piece.stop].fill_(1.0)
    return made.send(pieces)


def test_weight_streaming_follows_the_rules() -> None:
    recorder = upload(StreamUpload)
    assert recorder.faults == []
    assert recorder.waits == ["stream.synchronize"] * 3, "once per step, for the step before"
    assert recorder.copies == 12


@pytest.mark.parametrize("kind", [NotWaitedFor, NotReceived, TooEarly])
def test_weight_streaming_that_breaks_a_rule_is_detected(kind: type[StreamUpload]) -> None:
    assert upload(kind).faults
