"""Device memory and bus traffic of streamed units, at the sizes of real models.

Residency and autograd are real; units only pretend to have their size, and each block has one
weight.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from zerotune.backend.host.lanes import Lane
from zerotune.backend.host.residency import Residency
from zerotune.plan.context import Streaming
from zerotune.plan.families import as_facts
from zerotune.plan.memory.costing import Costing
from zerotune.plan.memory.estimate import estimate_resolved
from zerotune.plan.memory.items import Workload
from zerotune.plan.memory.traffic import step_traffic
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform

GIB = 2**30
CUDA = Platform.synthetic("cuda", vram=24 * GIB, ram=512 * GIB)


class Sized:
    """A unit that counts this many bytes without allocating them."""

    def __init__(self, nbytes, *, trained, resident=False):
        self.nbytes, self.trained, self.resident = nbytes, trained, resident
        self.is_here, self.loaded, self.loading, self.written = False, None, None, None
        self.calls, self.version, self.moved, self.in_place = 0, 0, 0, False
        self.slabs = ()

    @property
    def current(self):
        return self.version

    @property
    def is_current(self):
        return self.is_here and self.loaded == self.version

    def allocate(self):
        self.is_here = True

    def evict(self):
        self.is_here, self.loaded = False, None

    @property
    def host(self):
        self.moved += self.nbytes
        return torch.zeros(1)

    @property
    def flat(self):
        return torch.zeros(1)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.tanh(x * self.weight)


def planned(family, *, lora, streaming, accumulation):
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="bf16", gradient_accumulation_steps=accumulation
    )
    resolved = plan.resolve(platform=CUDA, model=as_facts(family, lora=lora), streamed=streaming)
    estimate = estimate_resolved(resolved, Workload())
    case = Costing(resolved=resolved, model=resolved.model, workload=Workload())
    return estimate, case


def run(case, *, accumulation, steps=4):
    """Take steps; return the residency's counts and the bytes moved in the last step."""
    units = case.streamed
    sized = [Sized(2 * numel, trained=True) for numel in units.trained]
    sized += [Sized(2 * numel, trained=False) for numel in units.frozen]
    resident = Sized(2 * units.resident_trained, trained=True, resident=True)
    model = torch.nn.Sequential(*(Block() for _ in sized))
    lane = Lane("test", device=torch.device("cpu"))
    residency = Residency(
        model=model,
        units=[*sized, resident],
        needs={block: [unit] for block, unit in zip(model, sized, strict=True)},
        capacity=case.streamed_capacity,
        lane=lane,
        hurry=lambda _: None,
        before=lambda: residency.ensure(resident),
    )
    for block, unit in zip(model, sized, strict=True):
        hook = block.weight.register_post_accumulate_grad_hook
        hook(partial(lambda unit, _: residency.close_calls(unit), unit))
    for step in range(steps):
        if step == steps - 1:
            before = sum(unit.moved for unit in [*sized, resident])
        for micro in range(accumulation):
            model(torch.ones(1, requires_grad=True)).backward()
            if micro == accumulation - 1:
                for unit in [*sized, resident]:
                    unit.version += unit.trained
            residency.rewind()
    residency.close()
    lane.close()
    return residency.counts, sum(unit.moved for unit in [*sized, resident]) - before


@pytest.mark.parametrize("lora", [None, 16])
@pytest.mark.parametrize("streaming", [Streaming(), Streaming(memory="12GiB")], ids=["3", "12GiB"])
@pytest.mark.parametrize("family", ["sdxl", "flux", "qwen-image"])
def test_resident_bytes_and_traffic_of_units_match_the_estimate(family, streaming, lora):
    estimate, case = planned(family, lora=lora, streaming=streaming, accumulation=1)
    counts, moved = run(case, accumulation=1)
    frozen = 2 * case.streamed.resident_frozen
    parts = ("weights", "streamed weights")
    expected = sum(i.nbytes for i in estimate.items if i.place == "device" and i.component in parts)
    assert counts.peak + frozen == pytest.approx(expected, rel=0.05)
    assert counts.peak <= case.streamed_capacity + 2 * case.streamed.resident_trained
    traffic = step_traffic(estimate)
    assert moved == pytest.approx(traffic.parameters + traffic.weights, rel=0.05)


def test_traffic_of_micro_batches_matches_the_estimate():
    estimate, case = planned("flux", lora=None, streaming=Streaming(memory="8GiB"), accumulation=3)
    _, moved = run(case, accumulation=3)
    traffic = step_traffic(estimate)
    assert moved == pytest.approx(traffic.parameters + traffic.weights, rel=0.05)
