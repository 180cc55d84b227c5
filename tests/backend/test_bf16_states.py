"""AdamW with bf16 moments: rounding, moments over many steps, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tests.support.ranks import ranks
from tests.support.runs import Case, start
from zerotune.backend.optimizers.classes import (
    AdamWBF16States,
    noise_bits,
    noise_key,
    round_stochastically,
)
from zerotune.plan.memory.hosted import NOISE_PERIOD

EVERY = torch.arange(2**16, dtype=torch.int32)
"""Every draw of 16 bits, once."""


def rounded(value: float) -> torch.Tensor:
    into = torch.empty(2**16, dtype=torch.bfloat16)
    round_stochastically(torch.full((2**16,), value), EVERY, into=into)
    return into.double()


@given(st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 2**-100))
def test_stochastic_rounding_is_unbiased_over_all_draws(value):
    found = rounded(value)
    low, high = found.min(), found.max()
    assert low <= value <= high
    # Neighbours in bf16, which has 8 bits of precision, or the value itself.
    assert high - low <= abs(value) * 2**-7
    # Every draw occurs once, so the mean is exact up to one draw of the 65,536.
    assert float(found.mean()) == pytest.approx(value, rel=2**-7 / 2**16)


@given(st.floats(width=16, allow_nan=False))
def test_rounding_does_not_change_bf16_values(value):
    exact = float(torch.tensor(value).bfloat16())
    if exact in (float("inf"), float("-inf")):
        return
    assert set(rounded(exact).tolist()) == {exact}


# -- Random bits.


def drawn(taken: int, group: int = 0, count: int = NOISE_PERIOD) -> torch.Tensor:
    return noise_bits(noise_key(taken, group), torch.arange(count, dtype=torch.int32))


def lowbias32(x: Any) -> Any:
    """The published hash, in 64 bits."""
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


@pytest.mark.parametrize("taken", [0, 3, 70_000])
def test_bits_are_those_of_the_published_hash_without_64_bit_integers(taken):
    key, count = noise_key(taken, 1), 100_003
    expected = lowbias32(torch.arange(count) ^ key)
    assert torch.equal(drawn(taken, 1, count), expected.int())
    # They repeat after a period, also where positions no longer fit in 32 bits.
    far = torch.arange(3 * NOISE_PERIOD + 2**33, 3 * NOISE_PERIOD + 2**33 + count).int()
    assert torch.equal(noise_bits(key, far), expected.int())


def steps(optimizer: Any, weight: torch.nn.Parameter, count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        weight.grad = 1e-3 * (1 + 0.3 * torch.randn(weight.shape, generator=generator))
        optimizer.step()


def test_moments_are_unbiased_after_thousands_of_steps():
    found, expected = (torch.nn.Parameter(torch.ones(4000)) for _ in range(2))
    ours, reference = AdamWBF16States([found], lr=1e-4), torch.optim.AdamW([expected], lr=1e-4)
    steps(ours, found, 3000)
    steps(reference, expected, 3000)
    state, exact = ours.state[found], reference.state[expected]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    ratio = state["exp_avg_sq"].double() / exact["exp_avg_sq"].double()
    # A uniform error of one unit (between 2^-8 and 2^-7 of the number) in each of the last
    # 1 / (1 - 0.999^2) steps makes 6 %; rounding to nearest would stop at half the moment.
    assert float(ratio.std()) < 0.08
    assert float(ratio.mean()) == pytest.approx(1, abs=0.01)
    # Change of the weights: the noise of the moments averages out over the steps.
    moved = (found - 1).detach().double() / (expected - 1).detach().double()
    assert float(moved.mean()) == pytest.approx(1, abs=2e-3)
    assert float((moved - 1).abs().max()) < 0.05


def test_a_rank_may_hold_no_element_of_a_parameter():
    empty, other = torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(torch.ones(2))
    for weights in ([empty], [empty, other]):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        AdamWBF16States(weights, lr=0.5, weight_decay=0.0).step()
    assert other.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_rounding_keeps_non_finite_values(value):
    assert rounded(value).tolist() == pytest.approx([value] * 2**16, nan_ok=True)


def test_the_nan_pattern_of_cuda_stays_a_nan():
    bits = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32)
    into = torch.zeros(2, dtype=torch.bfloat16)
    round_stochastically(bits.view(torch.float32), torch.full_like(bits, 2**16 - 1), into=into)
    assert into.isnan().all()


def test_gradients_and_weights_may_be_channels_last():
    start_at = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    moved = []
    for weights in (torch.contiguous_format, torch.channels_last):
        for gradients in (torch.contiguous_format, torch.channels_last):
            weight = torch.nn.Parameter(start_at.clone().to(memory_format=weights))
            optimizer = AdamWBF16States([weight], lr=1e-2)
            for step in range(4):
                weight.grad = torch.sin(start_at + step).to(memory_format=gradients)
                optimizer.step()
            moved.append(weight.detach() - start_at)
    for other in moved[1:]:
        # Another memory order gives other draws; a mixed-up element would differ by its whole step.
        torch.testing.assert_close(other, moved[0], atol=4e-4, rtol=0)
    assert float(moved[0].abs().max()) > 2e-2


def losses_of(engine: Any, count: int) -> list[float]:
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(count):
        loss = (engine(inputs) - inputs).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def engine_of(name: str, stage: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    optimizer = {"type": name, "params": {"lr": 1e-2}}
    return start(Case(stage=stage, offload="cpu", optimizer=optimizer, lr=1e-2), model)


def states_of(engine: Any) -> dict[str, tuple[str, list[float]]]:
    return {
        f"{fragment.address.name}/{name}": (str(state.dtype), state.tolist())
        for fragment in engine.master_weights.read()
        for name, state in fragment.states.items()
    }


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (("AdamW", 2), ("AdamWBF16States", 3)),
    ],
)
@ranks(1)
def test_resuming_converts_moments_between_fp32_and_bf16(saved, resumed, tmp_path: Path):
    from zerotune.checkpoint import load_checkpoint, save_checkpoint

    with engine_of(*saved) as engine:
        losses_of(engine, 10)
        path = save_checkpoint(tmp_path / "step-10", engine=engine)
        states = states_of(engine)
        whole = losses_of(engine, 10)
    with engine_of(*resumed) as engine:
        contents = load_checkpoint(path, engine=engine)
        decisions = [str(decision) for decision in contents.decisions]
        taken = states_of(engine)
        assert len(taken) == 4
        rest = losses_of(engine, 10)
    dtype = torch.bfloat16 if resumed[0] == "AdamWBF16States" else torch.float32
    for name, (kind, state) in taken.items():
        assert kind == str(dtype)
        assert state == torch.tensor(states[name][1]).to(dtype).tolist(), name
    # A few moments are rounded differently; fresh ones would give 0.9 to 3 times the loss.
    assert rest == pytest.approx(whole, rel=2e-2)
    changed = [line for line in decisions if line.startswith("optimizer.type")]
    assert bool(changed) is (saved[0] != resumed[0])
