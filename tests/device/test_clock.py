"""Virtual time: what tasks cost, and that it follows from what they depend on."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.device import on_device

pytestmark = pytest.mark.nightly

RATES = {
    "memory": 1e12, "upload": 1e9, "download": 2e9, "network": 1e9, "half": 1e12, "single": 1e11,
    "latency": 0.0, "launch": 0.0,
}  # fmt: skip


def clock_of(**rates):
    clock = torch.simdev.clock
    clock.rates(RATES | rates)
    clock.reset()
    clock.record(True)
    return clock


def spans_of(lane):
    return [span for span in torch.simdev.clock.spans() if span.lane == lane]


@on_device()
def test_copies_take_their_bytes_at_the_links_rate():
    host = torch.zeros(250_000, pin_memory=True)
    clock = clock_of()
    there = host.to("simdev", non_blocking=True)
    host.copy_(there, non_blocking=True)
    assert clock.now() == 0
    torch.simdev.synchronize()
    assert clock.now() == pytest.approx(1e6 / 1e9 + 1e6 / 2e9)
    assert [span.bytes for span in spans_of("upload") + spans_of("download")] == [1e6, 1e6]


@on_device()
def test_a_task_takes_the_longer_of_memory_and_arithmetic_and_its_latency():
    a = torch.zeros(100, 200, device="simdev")
    b = torch.zeros(200, 300, device="simdev")
    clock = clock_of(latency=1e-3, memory=1e6, single=1e12)
    a @ b
    assert clock.end() == pytest.approx(1e-3 + (100 * 200 + 200 * 300 + 100 * 300) * 4 / 1e6)
    clock = clock_of()
    a @ b
    assert clock.end() == pytest.approx(2 * 100 * 200 * 300 / 1e11)
    c, d = a.bfloat16(), b.bfloat16()
    clock.reset()
    c @ d
    assert clock.end() == pytest.approx(2 * 100 * 200 * 300 / 1e12)


def products(device):
    """Run every kind of product, forward and backward."""
    from torch.nn import functional

    def zeros(*shape):
        return torch.zeros(shape, device=device, requires_grad=True)

    out = functional.conv2d(zeros(2, 4, 9, 9), zeros(6, 4, 3, 3), stride=2, padding=1).sum()
    out = out + functional.conv_transpose2d(zeros(2, 4, 5, 5), zeros(4, 6, 3, 3), stride=2).sum()
    out = out + functional.linear(zeros(7, 3), zeros(5, 3), zeros(5)).sum()
    out = out + torch.bmm(zeros(2, 3, 4), zeros(2, 4, 5)).sum()
    q, k, v = zeros(2, 3, 8, 16), zeros(2, 3, 6, 16), zeros(2, 3, 6, 16)
    out = out + functional.scaled_dot_product_attention(q, k, v).sum()
    out.backward()


@on_device()
def test_operations_are_those_that_torch_counts():
    clock = clock_of()
    products("simdev")
    counted = sum(span.operations for span in clock.spans())
    with FlopCounterMode(display=False) as counter:
        products("meta")
    # Fused on the device, and not on meta: attention recomputes its scores, as on a card.
    recomputed = 2 * (2 * 3 * 8 * 16) * 6
    assert counted == counter.get_total_flops() + recomputed


def overlapping(host):
    """Upload beside a product that is queued first, and wait for both."""
    simdev = torch.simdev
    a = torch.zeros(1000, 1000, device="simdev")
    clock = clock_of()
    begun, ended = simdev.Event(enable_timing=True), simdev.Event(enable_timing=True)
    side = simdev.Stream()
    begun.record()
    b = a @ a
    with simdev.stream(side):
        there = host.to("simdev", non_blocking=True)
    simdev.current_stream().wait_stream(side)
    c = there[:1000] * b[0]
    c.record_stream(side)
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3, clock.now(), clock.spans()


@on_device()
def test_streams_overlap_and_waits_join_them_whatever_the_order_of_execution():
    host = torch.zeros(10_000_000, pin_memory=True)
    results = []
    for seed, lateness in ((0, 1.0), (1, 0.3), (2, 0.02), (3, 0.0)):
        torch.simdev.seed_order(seed, lateness, 3000)
        results.append(overlapping(host))
    elapsed, now, spans = results[0]
    assert all(result[:2] == (elapsed, now) for result in results)
    # Numbers of streams differ.
    lanes = [[(s.lane, s.name, s.start, s.end) for s in result[2]] for result in results]
    assert all(lane == lanes[0] for lane in lanes)
    assert elapsed == now == pytest.approx(4e7 / 1e9 + 3 * 4000 / 1e12)
    assert [s.name for s in spans] == ["mm", "upload", "mul", "synchronize_event"]
    assert spans[1].start == 0 < spans[0].end < spans[1].end == spans[2].start
