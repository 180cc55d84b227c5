"""How a step is cut into parts, and how EMAs join a pending one."""

from __future__ import annotations

import random
import signal
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerotune.backend.master_weights import EMAInMemory, EMAUpdate, FragmentAddress
from zerotune.backend.step.adams import WholeMasters
from zerotune.backend.step.deferred import DeferredSteps
from zerotune.backend.step.pending import PendingStep, ThreadedStep, Upload, divide
from zerotune.errors import EngineError


def addresses_of(sizes: list[list[int]], gap: int) -> tuple[list[FragmentAddress], list[int]]:
    """Lay out fragments of these sizes at the start of slabs that end with padding."""
    addresses, slabs = [], []
    for slab, numels in enumerate(sizes):
        offset = 0
        for index, numel in enumerate(numels):
            addresses.append(
                FragmentAddress(
                    name=f"{slab}.{index}", shape=(numel,), start=0, numel=numel, slab=slab,
                    offset=offset,
                )
            )  # fmt: skip
            offset += numel + gap
        slabs.append(offset)
    return addresses, slabs


@given(
    sizes=st.lists(st.lists(st.integers(1, 50), max_size=8), min_size=1, max_size=3),
    gap=st.integers(0, 2),
    parts=st.integers(1, 20),
    least=st.integers(1, 30),
)
def test_parts_cover_every_element_exactly_once(sizes, gap, parts, least):
    addresses, slabs = addresses_of(sizes, gap)
    by_key = {address.key: address for address in addresses}
    first = {address.name for address in addresses[::3]}
    found = divide(addresses, slabs, first=first, parts=parts, least=least)
    seen = [torch.zeros(numel, dtype=torch.int) for numel in slabs]
    for part in found:
        names = set()
        for piece in part.pieces:
            seen[piece.slab][piece.start : piece.stop] += 1
            if piece.key is not None:
                address = by_key[piece.key]
                assert piece.start == address.offset + piece.offset
                assert piece.offset + piece.numel <= address.numel
                names.add(address.name)
        assert part.names == names
        assert names <= first or not names & first, "what is wanted first stands apart"
    assert all(bool((counts == 1).all()) for counts in seen)
    early = [bool(part.names & first) for part in found]
    assert early == sorted(early, reverse=True)


@attrs.define(eq=False)
class Doubling:
    """Stands in for a slab's step: doubles the weights."""

    weight: torch.Tensor
    before: Any = lambda: None

    @property
    def masters(self) -> WholeMasters:
        return WholeMasters(self.weight)

    def run(self, start: int, stop: int, averages: Any) -> None:
        self.before()
        self.weight[start:stop] *= 2
        for average in averages:
            average.tensor.lerp_(self.weight[start:stop], average.weight)


def pending(weight: torch.Tensor, before: Any = lambda: None) -> tuple[PendingStep, str]:
    addresses, slabs = addresses_of([[weight.numel()]], 0)
    parts = divide(addresses, slabs, parts=10, least=1)
    step = PendingStep(
        parts=parts,
        order=range(len(parts)),
        steps=[Doubling(weight=weight, before=before)],
        upload=Upload(sources=[None], targets=[None]),
    )
    return step, addresses[0].key


@pytest.mark.parametrize("when", range(12))
def test_emas_may_join_at_any_time_before_the_step_ends(when):
    weight, shadows = torch.arange(40.0), [torch.ones(40), torch.ones(40)]
    begun: list[None] = []

    def join() -> None:
        begun.append(None)
        if len(begun) == when:
            assert step.update_emas(updates[:1])
        if len(begun) == 10 - when // 2:
            assert step.update_emas(updates[1:])

    step, key = pending(weight, join)
    updates = [
        EMAUpdate(tensors=EMAInMemory({key: shadow}), weight=share)
        for shadow, share in zip(shadows, (0.25, 0.75), strict=True)
    ]
    if when == 0:
        assert step.update_emas(updates[:1])
    step.settle()
    assert len(begun) == 10
    assert torch.equal(weight, 2 * torch.arange(40.0))
    follows = [when <= 10, True]
    for shadow, share, follow in zip(shadows, (0.25, 0.75), follows, strict=True):
        assert torch.equal(shadow, torch.lerp(torch.ones(40), weight, share if follow else 0.0))
    assert not step.update_emas([]), "nobody can join what has been taken"


@pytest.mark.parametrize("landed_first", [False, True])
def test_a_late_ema_reads_weights_before_they_can_be_changed(landed_first):
    """If model and optimizer share memory, released weights may change before the step ends."""
    weight, shadow = torch.ones(8), torch.ones(8)
    addresses, slabs = addresses_of([[4, 4]], 0)
    go = SimpleQueue()
    step = ThreadedStep(
        parts=divide(addresses, slabs, parts=2, least=1), order=range(2),
        steps=[Doubling(weight=weight, before=lambda: go.get(timeout=60))],
        upload=Upload(sources=[None], targets=[None]),
    )  # fmt: skip
    first = torch.nn.Parameter(weight[:4])
    step.hold("0.0", first)
    taker = threading.Thread(target=step.run, daemon=True)
    taker.start()
    go.put(None)
    while not step._followed:
        time.sleep(1e-3)
    if landed_first:
        first.data  # noqa: B018 - using it waits for it
    # ``follow`` waits for the thread, so only a timer can let the thread continue.
    later = threading.Timer(0.2, go.put, [None])
    later.start()
    parts = {address.key: shadow[4 * i : 4 * i + 4] for i, address in enumerate(addresses)}
    assert step.update_emas([EMAUpdate(tensors=EMAInMemory(parts), weight=0.5)])
    first.data.clamp_(max=0.25)
    taker.join(60)
    step.settle()
    assert torch.equal(weight, torch.tensor([0.25] * 4 + [2.0] * 4))
    assert torch.equal(shadow, torch.full((8,), 1.5)), "read before the clamp"


def test_several_threads_run_each_part_only_once():
    weight, kept = torch.ones(40), torch.nn.Parameter(torch.zeros(40))
    barrier = threading.Barrier(3, timeout=120)
    step, _ = pending(weight)
    step.hold("0.0", kept)
    uses = [step.run, lambda: kept.sum().item(), step.settle]
    threads = [
        threading.Thread(target=lambda use=use: (barrier.wait(), use()), daemon=True)
        for use in uses
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert torch.equal(weight, torch.full((40,), 2.0))
    assert type(kept) is torch.nn.Parameter
    assert kept.shape == (40,)


class Devices:
    """Stands in for an accelerator: each thread starts on the first device."""

    def __init__(self) -> None:
        self._here = threading.local()

    def current_device(self) -> int:
        return getattr(self._here, "index", 0)

    def set_device(self, index: int) -> None:
        self._here.index = index


class OnADevice(DeferredSteps):
    _accelerator = Devices()

    def _written(self) -> dict[str, torch.Tensor]:
        return {}


def test_a_pass_in_a_thread_uses_the_device_of_its_rank():
    spared: list[str] = []
    op: Any = SimpleNamespace(spare_a_core=lambda: spared.append(threading.current_thread().name))
    nothing: Any = None
    step = OnADevice(op=op, adam=nothing, module=torch.nn.Module(), layout=nothing, group=nothing)
    step._accelerator.set_device(1)
    step.hide()
    assert step._thread is not None
    try:
        assert step._thread.submit(step._accelerator.current_device).result(timeout=60) == 1
        assert [name.partition("_")[0] for name in spared] == ["zerotune-step"]
    finally:
        step.close()


def settled(step: PendingStep, outcome: SimpleQueue[str]) -> None:
    try:
        step.settle()
    except EngineError as error:
        outcome.put(str(error))
    else:
        outcome.put("settled")


@pytest.mark.parametrize("threaded", [False, True])
def test_ctrl_c_at_any_time_leaves_no_thread_waiting_forever(threaded):
    numel = 60
    addresses, slabs = addresses_of([[1] * numel], 0)
    parts = divide(addresses, slabs, parts=numel, least=1)
    chance, interrupted = random.Random(28), 0

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(80):
            kind = ThreadedStep if threaded else PendingStep
            step = kind(
                parts=parts, order=range(numel), steps=[Doubling(weight=torch.ones(numel))],
                upload=Upload(sources=[None], targets=[None]),
            )  # fmt: skip
            taker = threading.Thread(target=step.run, daemon=True)
            taker.start()
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 2e-3))
                step.settle()
                time.sleep(0.02)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            outcome: SimpleQueue[str] = SimpleQueue()
            threading.Thread(target=settled, args=(step, outcome), daemon=True).start()
            # Raises ``queue.Empty`` if a part is left that no thread will finish.
            ended = outcome.get(timeout=60)
            assert ended == "settled" or "last checkpoint" in ended
            assert ended == "settled" or not threaded, "no signal reaches the thread"
    finally:
        signal.signal(signal.SIGALRM, before)
        # torch.no_grad does not restore the mode if interrupted while it is being entered.
        torch.set_grad_enabled(True)
    assert interrupted == 80


def test_a_signal_handler_that_reads_weights_during_a_step_is_refused():
    seen: list[EngineError] = []

    def handler() -> None:
        if not seen:
            with pytest.raises(EngineError, match="signal handler") as caught:
                step.settle()
            seen.append(caught.value)

    weight = torch.ones(40)
    step, _ = pending(weight, handler)
    step.settle()
    assert seen
    assert torch.equal(weight, torch.full((40,), 2.0))


def test_a_needed_part_runs_before_the_rest():
    weight, taken = torch.ones(40), []
    addresses, slabs = addresses_of([[4] * 10], 0)
    parts = divide(addresses, slabs, parts=10, least=1)
    go = threading.Event()

    def note() -> None:
        go.wait(60)

    class Noting(Doubling):
        def run(self, start: int, stop: int, averages: Any) -> None:
            taken.append(start // 4)
            super().run(start, stop, averages)

    step = ThreadedStep(
        parts=parts, order=range(10), steps=[Noting(weight=weight, before=note)],
        upload=Upload(sources=[None], targets=[None]),
    )  # fmt: skip
    last = torch.nn.Parameter(torch.zeros(4))
    step.hold("0.9", last)
    taker = threading.Thread(target=step.run, daemon=True)
    taker.start()
    reader = threading.Thread(target=last.sum, daemon=True)
    reader.start()
    while step._wanted != (9,):
        time.sleep(1e-3)
    go.set()
    for thread in (taker, reader):
        thread.join(60)
    assert taken[:2] in ([0, 9], [9, 0])
    assert sorted(taken) == list(range(10))


def test_a_parameter_without_elements_is_available_at_once():
    step, _ = pending(torch.ones(4))
    empty = torch.nn.Parameter(torch.empty(0))
    step.hold("nowhere", empty)
    assert type(empty) is torch.nn.Parameter


def test_a_late_thread_of_an_earlier_step_releases_no_weight_early():
    kept = torch.nn.Parameter(torch.zeros(40))
    earlier, _ = pending(torch.ones(40))
    earlier.hold("0.0", kept)
    earlier.settle()
    later, _ = pending(torch.ones(40))
    later.hold("0.0", kept)
    # Imitate a thread of the earlier step that arrives after the later one has begun.
    earlier.land(kept)
    with torch._C.DisableTorchFunctionSubclass():
        assert kept.numel() == 0, "the later step has not written it"
    later.settle()
    assert kept.numel() == 40
