"""The memory model against the memory that real engines use."""

from __future__ import annotations

import gc
from typing import Any

import attrs
import pytest
import torch
from diffusers import UNet2DModel

from tests.support.memory import Peak, in_use, needs_mallinfo, resident
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import PLAIN, Case, start
from tests.support.sampling import nightly
from zerotune import load_pretrained
from zerotune._util.proc import return_freed_memory
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.context import Streaming
from zerotune.plan.memory.estimate import RUNTIME
from zerotune.plan.memory.items import Workload

pytestmark = [
    pytest.mark.deepspeed,
    needs_mallinfo,
]

LAYERS, WIDTH = 12, 1024
"""13 million elements in equal matrices, so that activations are negligible."""

# Allow for memory of the allocator, of Python objects and left behind by a sample.
SLACK = 0.02
OVER, UNDER = 0.10, 0.03
"""Largest relative overestimate and underestimate."""


def train(engine: Any, width: int, steps: int) -> None:
    for _ in range(steps * engine.plan.gradient_accumulation_steps):
        sample = torch.randn(1, width).to(engine.dtype)
        engine.backward(engine(sample).float().pow(2).mean())
        engine.step()


def measure(case: Case) -> dict[str, float]:

    small = start(case, torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(LAYERS))))
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


STREAMED = Streaming(units=tuple(map(str, range(LAYERS))))
SMALL_BUCKETS = (("reduce_bucket_size", 5_000_000), ("sub_group_size", 6_000_000))


SWAPPED = Case(
    stage=3, offload="nvme", offload_param="nvme", precision="bf16", overrides=SMALL_BUCKETS
)
HALF = {"stage": 2, "offload": "cpu", "precision": "bf16"}


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        (Case(stage=3, offload="cpu", offload_param="cpu"), 1),
        (Case(**HALF, streamed=STREAMED), 1),
        (Case(**HALF, engine="host"), 1),
        (attrs.evolve(PLAIN, offload="cpu"), 1),
        pytest.param(SWAPPED, 1, marks=pytest.mark.nvme),
        *nightly(
            (Case(stage=0), 1),
            (Case(stage=1, precision="bf16"), 1),
            (Case(**HALF, accumulation=2), 1),
            (Case(**HALF, optimizer="AdamWBF16States"), 1),
            (Case(stage=3, precision="bf16", overrides=SMALL_BUCKETS), 1),
            (Case(stage=3), 2),
            (PLAIN, 1),
        ),
    ],
    ids=str,
)
def test_host_memory_matches_the_estimate(case, world_size, tmp_path):
    nvme_path = str(tmp_path) if case.offload == "nvme" else None
    for result in run_ranks(
        measure, attrs.evolve(case, nvme_path=nvme_path), world_size=world_size
    ):
        measured, estimated = result["measured"], result["estimated"]
        assert measured > 5, "a step of training takes more than the weights"
        assert estimated >= measured * (1 - UNDER) - SLACK, result
        assert estimated <= measured * (1 + OVER) + SLACK, result


def kept_by_the_allocator(case: Case) -> int:
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    engine = start(case, torch.nn.Sequential(*layers))
    gc.collect()
    before = resident()
    return_freed_memory()
    kept = before - resident()
    engine.close()
    return kept


def test_a_start_leaves_no_freed_copies_of_the_weights_behind():
    case = Case(stage=3, offload="cpu", offload_param="cpu", precision="bf16")
    (kept,) = run_ranks(kept_by_the_allocator, case)
    assert kept < 2 * LAYERS * WIDTH**2 / 4


def taken_by_closing(case: Case) -> float:
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    engine = start(case, torch.nn.Sequential(*layers))
    train(engine, WIDTH, 2)
    gc.collect()
    with Peak() as peak:
        engine.close()
    return (peak.nbytes - peak.before) / (2 * LAYERS * WIDTH**2)


@pytest.mark.nvme
def test_weights_that_return_from_nvme_need_no_more_memory_than_training(tmp_path):
    case = attrs.evolve(SWAPPED, nvme_path=str(tmp_path))
    (taken,) = run_ranks(taken_by_closing, case)
    assert taken < 0.2


@ranks(1)
def test_memory_of_loading_matches_the_estimate(tmp_path):
    """Compare measured and estimated peak bytes per element of loading a base for adapters.

    ``in_memory`` builds the model in memory instead of loading it from files.
    """
    unet = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, norm_num_groups=8,
                       block_out_channels=(256, 512), layers_per_block=2,
                       down_block_types=("DownBlock2D", "DownBlock2D"),
                       up_block_types=("UpBlock2D", "UpBlock2D"))  # fmt: skip
    unet.save_pretrained(tmp_path)

    case = Case(stage=2, precision="bf16")
    start(case, torch.nn.Linear(8, 8)).close()
    found = {}
    plan = DeepSpeedPlan.build(stage=2, precision="bf16")
    load_pretrained(tmp_path, plan=plan)  # Import everything first, since imports stay in memory.
    for in_memory in (False, True):
        gc.collect()
        before = in_use()
        with Peak() as peak:
            if in_memory:
                model: Any = UNet2DModel.from_config(UNet2DModel.load_config(tmp_path))
            else:
                model = load_pretrained(tmp_path, plan=plan).model
            # Freeze the model, as with adapters, so that loading is the peak.
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
    for measured, estimated in found.values():
        assert estimated * (1 - OVER) - SLACK <= measured <= estimated * (1 + UNDER) + SLACK, found
    assert found[True][0] > 1.5 * found[False][0]
