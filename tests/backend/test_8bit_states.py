"""AdamW with one-byte moments: the codes, the pass, and errors like those of bitsandbytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.codes import Torch8BitAdam, encode
from zerotune.backend.fragments import OptimizerStates
from zerotune.backend.optimizers.classes import (
    BLOCK,
    AdamW8BitStates,
    codebook,
    decode,
)
from zerotune.backend.step.adams import Host8BitAdam, WholeMasters
from zerotune.backend.step.kernel import CodedMoment, Piece, load_host_step

NUMEL = 5 * BLOCK + 77
STEPS = 30


def moments(seed: int = 0) -> torch.Tensor:
    """Return moments of many magnitudes, in blocks whose largest is positive, negative or zero."""
    random_ = torch.Generator().manual_seed(seed)
    found = torch.randn(40 * BLOCK, generator=random_) * torch.logspace(-9, 3, 40 * BLOCK)
    found[BLOCK : 2 * BLOCK] = 0
    found[2 * BLOCK] = -1e9
    found[4 * BLOCK] = 1e9
    return found


def encoded(numbers: torch.Tensor, *, signed: bool) -> Any:
    codes, scales = (torch.empty(len(numbers), dtype=torch.uint8), torch.empty(40))
    moment = CodedMoment(codes=codes, scales=scales[: -(-len(numbers) // BLOCK)], signed=signed)
    load_host_step().encode(numbers, into=moment)
    return moment


@pytest.mark.parametrize("signed", [True, False])
def test_values_of_codes_have_three_bits_of_mantissa(signed):
    values = codebook(signed=signed)
    mantissas, exponents = torch.frexp(values[1:128])
    assert torch.equal(values[1:128], torch.ldexp((mantissas * 16).round() / 16, exponents))
    assert values[120 if signed else 248] == 1.0
    if signed:
        assert torch.equal(values[128:], -values[:128])
        assert (values[0], values[1]) == (0, 1.125 * 2**-15)
    else:
        assert values[0] == 2**-31
        assert bool((values.diff() > 0).all())


@pytest.mark.parametrize("signed", [True, False])
def test_encoding_chooses_the_nearest_codes(signed):
    numbers = moments() if signed else moments().abs()
    codes, scales = encode(numbers, signed=signed)
    assert torch.equal(scales, numbers.abs().view(-1, BLOCK).amax(1))
    shares = numbers / scales.where(scales > 0, torch.tensor(1.0)).repeat_interleave(BLOCK)
    off = (shares[:, None] - codebook(signed=signed)).abs()
    # Signed numbers up to 2 ** -15 become 0, although the next code may be nearer.
    torch.testing.assert_close(
        off.gather(1, codes[:, None].long()).flatten(),
        off.amin(1),
        rtol=1e-6,
        atol=2**-15 if signed else 0,
    )


@pytest.mark.deepspeed
@pytest.mark.parametrize("signed", [True, False])
def test_the_op_decodes_and_encodes_like_torch_and_keeps_decoded_moments(signed):
    numbers = (moments() if signed else moments().abs())[: NUMEL + 30 * BLOCK]
    first = encoded(numbers, signed=signed)
    decoded = load_host_step().decode(first)
    expected = encode(numbers, signed=signed)
    assert torch.equal(first.codes, expected[0])
    assert torch.equal(first.scales, expected[1])
    assert torch.equal(decoded, decode(first.codes, first.scales, signed=signed))
    assert torch.equal(load_host_step().decode(encoded(decoded, signed=signed)), decoded)
    assert not decoded[decoded == 0].signbit().any(), "sums over ranks keep no negative zero"


@pytest.mark.deepspeed
@pytest.mark.parametrize("signed", [True, False])
def test_a_number_has_the_same_code_wherever_it_is_in_a_block(signed):
    """The compiler updates some elements as vectors, and the rest one by one."""
    numbers = (moments(1) if signed else moments(1).abs())[5 * BLOCK : 6 * BLOCK]
    whole = encoded(numbers, signed=signed).codes
    for size in range(1, 40):
        some = torch.cat([numbers[:size], numbers.abs().amax().view(1)])
        assert torch.equal(encoded(some, signed=signed).codes[:size], whole[:size])


@pytest.mark.deepspeed
def test_a_positive_second_moment_never_becomes_zero_and_a_tiny_block_does():
    wide, tiny = torch.full((BLOCK,), 1e-30), torch.full((BLOCK,), 1e-39)
    wide[0] = 1.0
    second = load_host_step().decode(encoded(torch.cat([wide, tiny]), signed=False))
    assert torch.equal(second[1:BLOCK], torch.full((BLOCK - 1,), 2.0**-31))
    assert not second[BLOCK:].any()
    assert not load_host_step().decode(encoded(tiny, signed=True)).any()


def steps_of(optimizer: Any, weight: torch.nn.Parameter) -> None:
    random_ = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        weight.grad = torch.randn(NUMEL, generator=random_) * 10 ** (-step % 3) * 0.01
        weight.grad[:300] = 0
        optimizer.step()


@pytest.mark.deepspeed
def test_second_moments_follow_changes_that_are_smaller_than_the_distance_of_codes():
    weight = torch.nn.Parameter(torch.zeros(8 * BLOCK))
    adam = AdamW8BitStates([weight], lr=1e-6, betas=(0.9, 0.99))
    host, gradient = Host8BitAdam(op=load_host_step(), adam=adam), torch.ones(8 * BLOCK)
    for step in range(1000):
        if step == 300:
            gradient[1:] = 0.5  # The first element keeps the scale of the first block.
        host.begin(
            weight, gradient=gradient, group=adam.param_groups[0], factor=1.0, out=None,
            masters=WholeMasters(weight.data), places=[(0, 0)],
        ).run([Piece(0, 8 * BLOCK)])  # fmt: skip
    second = host.decode_states(adam.state[weight])["exp_avg_sq"][1:BLOCK]
    assert float(second.mean()) == pytest.approx(0.25, rel=0.1)


@pytest.mark.deepspeed
def test_moments_written_as_numbers_are_kept_when_others_are_written_as_codes():
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    adam = AdamW8BitStates([weight])
    coder = Host8BitAdam(op=load_host_step(), adam=adam)
    states = OptimizerStates(adam, weight, coder=coder)
    assert (states.tensors, states.stored, states.formats) == ({}, {}, {})
    assert not adam.state, "looking creates nothing"
    states.create(("exp_avg", "exp_avg_sq"))
    states.tensors["exp_avg"][:BLOCK] = -1.0
    states.stored["exp_avg"][BLOCK : 2 * BLOCK] = 120
    states.stored["exp_avg_scale"][1] = 3.0
    states.write_back()
    assert states.stored["exp_avg"].dtype == torch.uint8
    assert torch.equal(states.tensors["exp_avg"][:BLOCK], torch.full((BLOCK,), -1.0))
    assert torch.equal(states.tensors["exp_avg"][BLOCK : 2 * BLOCK], torch.full((BLOCK,), 3.0))
    assert not states.tensors["exp_avg"][2 * BLOCK :].any()


def test_weights_deviate_from_fp32_moments_little_more_than_with_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes", reason="a package that is optional")
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    ours, theirs, exact = (torch.nn.Parameter(start.clone()) for _ in range(3))
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    mine = Torch8BitAdam([ours], weight_decay=0.01, **settings)
    other = bnb.optim.AdamW8bit([theirs], weight_decay=0.01, min_8bit_size=0, **settings)
    reference = torch.optim.AdamW([exact], weight_decay=0.01, **settings)
    for optimizer, weight in ((mine, ours), (other, theirs), (reference, exact)):
        steps_of(optimizer, weight)
    ours, theirs, exact = (w.detach()[300:] for w in (ours, theirs, exact))
    errors = [float((w - exact).abs().mean()) for w in (ours, theirs)]
    change = float((exact - start[300:]).abs().mean())
    assert errors[0] < 3 * errors[1]
    assert errors[0] < 0.1 * change
