"""The memory model against the memory that real engines take."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.support.memory import Peak, in_use, needs_mallinfo
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case, start

pytestmark = [
    pytest.mark.deepspeed,
    needs_mallinfo,
]

LAYERS, WIDTH = 24, 1024
"""25 million elements in equal matrices, so that activations do not count."""

# Bytes of the allocator, of Python objects and of what one sample leaves behind.
SLACK = 0.02
OVER, UNDER = 0.10, 0.03
"""The estimate may be over by so much, and under by so much."""


def train(engine: Any, width: int, steps: int) -> None:
    import torch

    for _ in range(steps * engine.plan.gradient_accumulation_steps):
        sample = torch.randn(1, width).to(engine.dtype)
        engine.backward(engine(sample).float().pow(2).mean())
        engine.step()


def measure(case: Case) -> dict[str, float]:
    import torch

    from zerotune.plan.memory.estimate import RUNTIME
    from zerotune.plan.memory.model import Workload

    small = start(case, torch.nn.Linear(8, 8))
    train(small, 8, 1)
    small.close()
    gc.collect()
    before = in_use()
    with Peak() as peak:
        layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        engine = start(case, torch.nn.Sequential(*layers))
        train(engine, WIDTH, 3)
    estimate = engine.plan.estimate(Workload())
    engine.close()
    elements = LAYERS * WIDTH**2
    return {
        "measured": (peak.nbytes - before) / elements,
        "estimated": (estimate.host - RUNTIME) / elements,
    }


def check(result: dict[str, float]) -> None:
    measured, estimated = result["measured"], result["estimated"]
    assert measured > 5, "a step of training takes more than the weights"
    assert estimated >= measured * (1 - UNDER) - SLACK, result
    assert estimated <= measured * (1 + OVER) + SLACK, result


SMALL_BUCKETS = (("reduce_bucket_size", 5_000_000), ("sub_group_size", 6_000_000))


@pytest.mark.parametrize(
    "case",
    [
        Case(stage=0),
        Case(stage=1, precision="bf16"),
        Case(stage=2, offload="cpu", precision="bf16", accumulation=2),
        Case(stage=2, offload="cpu", precision="bf16", optimizer="AdamWBF16States"),
        Case(stage=3, precision="bf16", overrides=SMALL_BUCKETS),
        Case(stage=3, offload="cpu", offload_param="cpu"),
    ],
    ids=str,
)
def test_host_memory_is_what_was_estimated(case):
    (result,) = run_ranks(measure, case)
    check(result)


@pytest.mark.world_size(2)
def test_two_ranks_take_what_was_estimated():
    for result in run_ranks(measure, Case(stage=3), world_size=2):
        check(result)


@pytest.mark.nvme
def test_nvme_leaves_the_host_what_was_estimated(tmp_path):
    case = Case(
        stage=3,
        offload="nvme",
        offload_param="nvme",
        precision="bf16",
        nvme_path=str(tmp_path),
        overrides=SMALL_BUCKETS,
    )
    (result,) = run_ranks(measure, case)
    check(result)


def test_the_plain_engine_takes_what_was_estimated():
    (result,) = run_ranks(measure, PLAIN)
    check(result)
