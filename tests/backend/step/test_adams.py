"""The pass over host memory equals DeepSpeedCPUAdam, a cast and an EMA, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from tests.support.codes import Torch8BitAdam
from tests.support.ranks import ranks, run_ranks
from zerotune.backend.optimizers.classes import (
    BLOCK,
    AdamW8BitStates,
    AdamWBF16States,
    noise_bits,
    noise_key,
)
from zerotune.backend.optimizers.client import STOPPED
from zerotune.backend.step import kernel
from zerotune.backend.step.adams import (
    HostAdam,
    HostBF16Adam,
    WholeMasters,
    stepper_of,
    torch_rounds_alike,
)
from zerotune.backend.step.kernel import EMAPart, Piece, load_host_step
from zerotune.plan.memory.hosted import NOISE_PERIOD

pytestmark = pytest.mark.deepspeed

STEPS = 5
SIZES = (1, 15, 16, 1024, 70_003)


KINDS: dict[str, tuple[Any, Any, int]] = {
    "fp32": (DeepSpeedCPUAdam, DeepSpeedCPUAdam, 16),
    "bf16": (AdamWBF16States, AdamWBF16States, 1),
    "8 bits": (AdamW8BitStates, Torch8BitAdam, BLOCK),
}
"""Optimizer, its reference, and what the cuts of a pass must be multiples of, by its states."""


def differing(
    states: str, sizes: tuple[int, ...], dtype: torch.dtype, **arguments: Any
) -> list[str]:
    """List what differs between a pass, done in parts and in any order, and the optimizer."""
    random_ = torch.Generator().manual_seed(sizes[0])
    starts = [torch.randn(size, generator=random_) for size in sizes]
    kind, reference, multiple = KINDS[states]
    mine, theirs = (
        each([torch.nn.Parameter(start.clone()) for start in starts], lr=1e-2, **arguments)
        for each in (kind, reference)
    )
    host, group = stepper_of(mine)(op=load_host_step(), adam=mine), mine.param_groups[0]
    pairs = list(zip(group["params"], theirs.param_groups[0]["params"], strict=True))
    shadows = [[[start.clone() for _ in range(3)] for _ in range(2)] for start in starts]
    out = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
    for step in range(1, STEPS + 1):
        gradients = [(torch.randn(size, generator=random_) * step).to(dtype) for size in sizes]
        factor = float(torch.tensor(0.3 + 0.1 * step))
        # EMAs with weights below 0.5 are updated in pairs; a single one, or one with 0.5 or more,
        # alone.
        weights = (0.001, 0.7 / step, 0.2)
        begun = [
            host.begin(
                slab, gradient=gradient, group=group, factor=factor, out=cast,
                masters=WholeMasters(slab.data), places=[(0, place)],
            )
            for (slab, _), gradient, cast, place in zip(
                pairs, gradients, out, itertools.accumulate(sizes[:-1], initial=0), strict=True
            )
        ]  # fmt: skip
        for each, (own, _), size in [*zip(begun, shadows, sizes, strict=True)][::-1]:
            cut = size // 2 // multiple * multiple
            for part in (slice(cut, size), slice(0, cut)):
                averages = [
                    EMAPart(tensor=shadow[part], weight=weight)
                    for shadow, weight in zip(own, weights, strict=True)
                ]
                each.run([Piece(part.start, part.stop, averages)])
        for (_, other), gradient in zip(pairs, gradients, strict=True):
            other.grad = gradient.float().mul_(factor)
        theirs.step()
        for (_, other), (_, expected) in zip(pairs, shadows, strict=True):
            for shadow, weight in zip(expected, weights, strict=True):
                shadow.lerp_(other.data, weight)
    found = []
    for (slab, other), (own, expected), cast in zip(pairs, shadows, out, strict=True):
        ours = [slab.data, cast, *own, *mine.state[slab].values()]
        wanted = [other.data, other.data.bfloat16(), *expected]
        wanted += [theirs.state[other][name] for name in mine.state[slab]]
        same = [torch.equal(*map(torch.as_tensor, pair)) for pair in zip(ours, wanted, strict=True)]
        found += [] if all(same) else [f"{slab.numel()}: {same}"]
    return found


def test_a_pass_equals_adam_a_cast_and_emas_bit_for_bit():
    for env in ({}, {"OMP_NUM_THREADS": "1"}):
        assert run_ranks(deviations, env=env) == [[]]


def deviations() -> list[str]:
    return [
        f"{each}, decay {decay} {decoupled} in {dtype}"
        for decoupled, decay, dtype in itertools.product(
            (True, False), (0.0, 0.01), (torch.bfloat16, torch.float32, torch.float16)
        )
        for each in differing("fp32", SIZES, dtype, adamw_mode=decoupled, weight_decay=decay)
    ]


@pytest.mark.parametrize(
    ("states", "sizes", "dtype", "decay"),
    [
        ("bf16", (33, 1000, 3 * 7), torch.bfloat16, 0.0),
        ("bf16", (2**19 + 37, 2**20, 48), torch.bfloat16, 0.01),
        ("bf16", (2**19 + 37, 2**20, 48), torch.float32, 0.01),
        ("8 bits", (5 * BLOCK + 77,), torch.bfloat16, 0.1),
        ("8 bits", (5 * BLOCK + 77,), torch.float32, 0.1),
    ],
    ids=str,
)
@ranks(1)
def test_a_pass_with_lean_states_equals_the_optimizer_bit_for_bit(states, sizes, dtype, decay):
    assert torch_rounds_alike(load_host_step())
    assert differing(states, sizes, dtype, weight_decay=decay) == []


def cpu_adam(weights: torch.Tensor, decoupled: bool, decay: float) -> Any:
    return DeepSpeedCPUAdam(
        [torch.nn.Parameter(weights)], lr=1e-2, weight_decay=decay, adamw_mode=decoupled
    )


def powers(first: int) -> list[float]:
    """Return a weight after each step from ``first`` on, as if the run had resumed there."""
    adam = cpu_adam(torch.ones(16), True, 0.0)
    host = HostAdam(op=load_host_step(), adam=adam)
    host.replay(first - 1)
    (slab,) = adam.param_groups[0]["params"]
    found = []
    for step in range(first, 30):
        adam.state[slab] = {
            "step": step - 1,
            "exp_avg": torch.full((16,), 0.3),
            "exp_avg_sq": torch.full((16,), 0.7),
        }
        slab.data.fill_(step)
        gradient = torch.full((16,), 0.1 * step)
        begun = host.begin(
            slab, gradient=gradient, group=adam.param_groups[0], factor=1.0, out=None,
            masters=WholeMasters(slab.data), places=[(0, 0)],
        )  # fmt: skip
        begun.run([Piece(0, 16)])
        found.append(float(slab.data[0]))
    return found


def test_a_resumed_run_has_the_beta_powers_of_an_uninterrupted_one():
    (whole,) = run_ranks(powers, 1)
    for first in (2, 17):
        (resumed,) = run_ranks(powers, first)
        assert resumed == whole[first - 1 :]


@ranks(1)
def test_gradient_norms_match_fp64():
    op, found = load_host_step(), []
    for dtype, size in itertools.product((torch.float32, torch.bfloat16, torch.float16), SIZES):
        gradient = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        copy = torch.empty_like(gradient)
        found.append((*op.take([gradient], into=[copy]), float(gradient.double().square().sum())))
        assert torch.equal(copy, gradient)
    for mine, exact in found:
        assert mine == pytest.approx(exact, rel=1e-12)


@ranks(1)
def test_a_sum_is_finite_if_and_only_if_all_elements_are():
    op, found = load_host_step(), []
    for value in (float("inf"), float("-inf"), float("nan"), 3e38):
        for dtype in (torch.float32, torch.bfloat16):
            gradient = torch.ones(2000)
            gradient[1234] = value
            found += op.take([gradient.to(dtype)])
    assert [value == value and value < float("inf") for value in found] == [False] * 6 + [True] * 2


@ranks(1)
def test_rounding_noise_depends_on_the_place_in_the_group_not_on_how_a_slab_is_cut():
    # The slab has two fragments, the second of which crosses the end of the period.
    places = [(0, 5), (48, NOISE_PERIOD - 9)]
    weight = torch.nn.Parameter(torch.zeros(128))
    adam = AdamWBF16States([weight], betas=(0.5, 0.5))
    host, group = HostBF16Adam(op=load_host_step(), adam=adam), adam.param_groups[0]
    gradient = torch.full((128,), 2 * (1.0 + 2**-9))
    step = host.begin(
        weight, gradient=gradient, group=group, factor=1.0, out=None,
        masters=WholeMasters(weight.data), places=places,
    )  # fmt: skip
    for part in (slice(32, 128), slice(0, 32)):
        step.run([Piece(part.start, part.stop)])
    at = torch.cat([torch.arange(5, 53), torch.arange(NOISE_PERIOD - 9, NOISE_PERIOD + 71)])
    bits = noise_bits(noise_key(0, 0), at.int())
    # A value a quarter of a bf16 unit above 1 is rounded up if its 16 random bits are at least
    # 0xC000.
    expected = torch.where((bits & 0xFFFF) >= 0xC000, 1.0 + 2**-7, 1.0)
    assert torch.equal(adam.state[weight]["exp_avg"].float(), expected.float())
    assert 0.05 < float((expected > 1).float().mean()) < 0.5


@pytest.mark.parametrize("cut", [64, 96])
@ranks(1)
def test_a_stopped_group_is_cast_and_updates_emas_but_is_not_stepped(cut):
    adam = cpu_adam(torch.randn(100), True, 0.01)
    host, (group,) = HostAdam(op=load_host_step(), adam=adam), adam.param_groups
    (slab,) = group["params"]
    shadow, out = torch.zeros(100), torch.zeros(100, dtype=torch.bfloat16)
    found = []
    for stopped in (False, True):
        group[STOPPED] = stopped
        step = host.begin(
            slab, gradient=torch.randn(100), group=group, factor=1.0, out=out.zero_(),
            masters=WholeMasters(slab.data), places=[(0, 0)],
        )  # fmt: skip
        for part in (slice(0, cut), slice(cut, 100)):
            average = EMAPart(tensor=shadow[part], weight=0.5)
            step.run([Piece(part.start, part.stop, [average])])
        state = adam.state[slab]
        found.append([slab.data.clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()])
    assert all(map(torch.equal, *found))
    assert adam.state[slab]["step"] == 2
    assert torch.equal(out, slab.data.bfloat16())
    torch.testing.assert_close(shadow, 0.75 * slab.data)


def test_the_source_has_one_path_wherever_the_package_is_installed(tmp_path, monkeypatch):
    folder, found = tmp_path / "built", []
    folder.mkdir()
    for place in ("here", "there"):
        source = tmp_path / place / "host_step.cpp"
        source.parent.mkdir()
        source.write_text("int one();")
        monkeypatch.setattr(kernel, "_CPP", source)
        path = kernel._source_in(folder)
        found.append((path, path.stat().st_mtime_ns))
    assert found[0] == found[1], "ninja would build again"
    source.write_text("int two();")
    assert kernel._source_in(folder).read_text() == "int two();"
