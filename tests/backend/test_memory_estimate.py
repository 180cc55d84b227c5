"""The memory model against the memory that real engines take."""

from __future__ import annotations

import gc
from typing import Any

import attrs
import pytest
from diffusers import UNet2DModel

from tests.support.memory import Peak, in_use, needs_mallinfo
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case, start
from zerotune.plan import DeepSpeedPlan

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


def start_loaded(folder: str) -> dict[bool, tuple[float, float]]:
    """Bytes per element while adapters' base comes, at the most and as estimated.

    ``False``: from its files; ``True``: made in memory.
    """
    import torch

    from zerotune import load_pretrained
    from zerotune.plan.memory.estimate import RUNTIME
    from zerotune.plan.memory.model import Workload

    case = Case(stage=2, precision="bf16")
    start(case, torch.nn.Linear(8, 8)).close()
    found = {}
    plan = DeepSpeedPlan.build(stage=2, precision="bf16")
    for in_memory in (False, True):
        gc.collect()
        before = in_use()
        with Peak() as peak:
            if in_memory:
                model: Any = UNet2DModel.from_config(UNet2DModel.load_config(folder))
            else:
                model = load_pretrained(folder, plan=plan).model
            # As beside adapters, so that loading is what takes most.
            model.requires_grad_(False)
            model.conv_out.requires_grad_(True)
            engine = start(case, model)
        facts = engine.plan.model
        estimate = engine.plan.estimate(Workload(model_in_memory=in_memory))
        counted = sum(item.nbytes for item in estimate.at("host", "initialization"))
        engine.close()
        elements = sum(each.numel for each in facts.parameters)
        found[in_memory] = ((peak.nbytes - before) / elements, (counted - RUNTIME) / elements)
        del engine, model
    return found


def test_loading_takes_what_was_estimated(tmp_path):
    unet = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, norm_num_groups=8,
                       block_out_channels=(128, 256), layers_per_block=2,
                       down_block_types=("DownBlock2D", "DownBlock2D"),
                       up_block_types=("UpBlock2D", "UpBlock2D"))  # fmt: skip
    unet.save_pretrained(tmp_path)
    (found,) = run_ranks(start_loaded, str(tmp_path))
    for measured, estimated in found.values():
        assert estimated * (1 - OVER) - SLACK <= measured <= estimated * (1 + UNDER) + SLACK, found
    assert found[True][0] > 1.5 * found[False][0]


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_the_plain_engine_takes_what_was_estimated(offload):
    (result,) = run_ranks(measure, attrs.evolve(PLAIN, offload=offload))
    check(result)


def exchange(numel: int) -> tuple[int, int]:
    """Bytes that an exchange of bf16 weights takes at its peak, and the weights' own."""
    import torch
    import torch.distributed as dist

    from zerotune.backend.deepspeed.pending_step import Exchange, Piece

    engine = start(Case(stage=0), torch.nn.Linear(8, 8))
    group = engine.group
    partitions = [torch.zeros(numel, dtype=torch.bfloat16) for _ in range(group.world_size)]
    exchange = Exchange(group=group, data=dist.new_group(), partitions=[partitions])
    most = 0
    # The watch may sleep through one of them; both ranks take as many.
    for _ in range(5):
        with Peak() as peak:
            exchange.share([Piece(slab=0, start=0, stop=numel)])
        most = max(most, peak.nbytes - peak.before)
    engine.close()
    return most, 2 * numel * group.world_size


@pytest.mark.world_size(2)
def test_an_exchange_takes_what_it_brings():
    for taken, brought in run_ranks(exchange, 8 * 2**20, world_size=2):
        assert taken == pytest.approx(brought, rel=0.05)
