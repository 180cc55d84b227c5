"""The memory model against real models on a device without memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.memory import TINY
from tests.support.sampling import nightly
from tools.fake_device import (
    KINDS,
    Event,
    FakeDevice,
    FakePass,
    _cuda_operators,
    estimate,
)
from tools.families import CONFIGURATIONS, FRAMES
from zerotune.plan.families import model_family

MIB = 2**20
OVER, UNDER = 0.05, 0.03
"""Tolerance of the memory model above and below the counted bytes."""

IN_THE_SUITE = [
    # Most tensors are too small to be offloaded, which must not extend the prefetch.
    ("sd15", 128, 8, KINDS[2]),
]
LARGER = [
    ("sd15", 512, 4, KINDS[0]),
    ("wan-1.3b", 256, 4, KINDS[1]),
    ("flux2-klein-4b", 1024, 1, KINDS[2]),
    ("sdxl", 1024, 8, KINDS[2]),
    ("sdxl", 128, 8, KINDS[1]),
    ("sd3-medium", 1024, 1, KINDS[1]),
    ("flux", 1024, 2, KINDS[2]),
    ("z-image", 1024, 1, KINDS[1]),
]
DIAGONAL = [*IN_THE_SUITE, *nightly(*LARGER)]
"""A selection of families, sizes and kinds; ``python -m tools.fake_device`` runs all."""


@functools.lru_cache(maxsize=1)
def device(family: str) -> FakeDevice:
    return FakeDevice(CONFIGURATIONS[family][0])


@pytest.mark.parametrize(("family", "side", "batch", "keeping"), DIAGONAL)
def test_the_memory_model_is_close_to_every_measured_pass(
    family: str, side: int, batch: int, keeping: Any
):
    frames = 17 if family in FRAMES else None
    taken = device(family).step(
        batch=batch, height=side, width=side, keeping=keeping, frames=frames
    )
    facts = model_family(family).facts
    pixels = facts.positions(height=side, width=side, frames=frames)
    on_device, on_host = estimate(facts, batch=batch, pixels=pixels, keeping=keeping)
    assert taken.peak > 50 * MIB
    assert taken.peak * (1 - UNDER) <= on_device <= taken.peak * (1 + OVER)
    assert taken.host * (1 - UNDER) <= on_host <= taken.host * (1 + OVER)
    assert (taken.host > 0) == (keeping == KINDS[2])
    weights = 2 * facts.numel
    reserved = taken.reserved(before=(weights,)) - weights
    assert taken.peak <= reserved < 2 * taken.peak + 192 * MIB


@pytest.mark.parametrize("keeping", KINDS)
def test_a_pass_frees_all_its_memory(keeping: Any):
    taken = FakeDevice(TINY).step(batch=2, height=64, width=64, keeping=keeping)
    assert taken.peak > 100_000
    assert sum(event.nbytes for event in taken.events) == 0, "all was given back"
    assert {event.block for event in taken.events if event.nbytes > 0} == {
        event.block for event in taken.events if event.nbytes < 0
    }
    assert taken.reserved() >= taken.peak


def test_attention_and_norms_save_the_tensors_of_cuda_operators():
    config = CONFIGURATIONS["flux"][0] | {"num_layers": 1, "num_single_layers": 1}
    narrow = config | {"num_attention_heads": 2, "joint_attention_dim": 64}
    taken = FakeDevice(narrow).step(batch=1, height=1024, width=1024, keeping=KINDS[0])
    tokens = 64 * 64 + 512
    # No allocation may reach the size of both heads' attention matrices in bf16.
    assert 2 * 2 * tokens * tokens > 4 * taken.peak / 10
    assert all(event.nbytes < 2 * 2 * tokens * tokens for event in taken.events)
    assert torch.nn.functional.scaled_dot_product_attention.__module__ != __name__


# torch warns of such a norm.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("fused", [True, False])
def test_norms_are_fused_where_torch_fuses_them(fused: bool):
    """Norms are not fused if the weight has another dtype, as in Krea 2, which norms in fp32."""
    with FakeTensorMode(), _cuda_operators(), OperatorNames() as seen:
        given = torch.empty(4, 8, dtype=torch.float32, requires_grad=True)
        weight = torch.empty(8, dtype=torch.float32 if fused else torch.bfloat16)
        torch.nn.functional.rms_norm(given, (8,), weight)
    assert ("rsqrt" in seen.names) == (not fused)


class OperatorNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def passed(*events: tuple[int, int]) -> FakePass:
    return FakePass(events=tuple(Event(block=b, nbytes=n) for b, n in events), host=0)


@pytest.mark.parametrize(
    ("blocks", "reserved"),
    [
        ([512], 2), ([MIB], 2), ([MIB + 512], 20), ([10 * MIB], 10), ([11 * MIB], 12),
        ([9 * MIB, 9 * MIB], 20), ([9 * MIB, 9 * MIB, 9 * MIB], 40), ([MIB] * 3, 4),
    ],
)  # fmt: skip
def test_segments_have_the_sizes_of_torchs_allocator(blocks: list[int], reserved: int):
    assert passed(*enumerate(blocks)).reserved() == reserved * MIB


def test_freed_memory_is_reused_split_and_merged():
    whole = passed((1, 40 * MIB), (1, -40 * MIB), (2, 30 * MIB), (3, 10 * MIB))
    assert whole.reserved() == 40 * MIB
    joined = passed((1, 20 * MIB), (1, -20 * MIB), (2, 10 * MIB), (3, 10 * MIB), (2, -10 * MIB),
                    (3, -10 * MIB), (4, 20 * MIB))  # fmt: skip
    assert joined.reserved() == 20 * MIB
    gap = passed((1, 20 * MIB), (2, 20 * MIB), (1, -20 * MIB), (2, -20 * MIB), (3, 40 * MIB))
    assert gap.reserved() == 80 * MIB
