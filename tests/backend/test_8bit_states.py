"""AdamW with one-byte moments: the codes, the pass, and parity with bitsandbytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.codes import Torch8BitAdam, encode
from tests.support.ranks import ranks
from zerotune.backend.master_weights import OptimizerStates
from zerotune.backend.optimizers.classes import (
    BLOCK,
    AdamW8BitStates,
    codebook,
    scale_of,
)

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


@pytest.mark.parametrize("signed", [True, False])
def test_encoding_chooses_the_nearest_codes(signed):
    book, numbers = codebook(signed=signed), moments() if signed else moments().abs()
    codes, scales = encode(book, numbers)
    assert torch.equal(scales, numbers.abs().view(-1, BLOCK).amax(1))
    shares = numbers / scales.where(scales > 0, torch.tensor(1.0)).repeat_interleave(BLOCK)
    off = (shares[:, None] - book.values).abs()
    assert torch.equal(off.gather(1, codes[:, None].long()).flatten(), off.amin(1))


@pytest.mark.deepspeed
@pytest.mark.parametrize("signed", [True, False])
def test_the_op_decodes_and_encodes_like_the_codebook_and_keeps_decoded_moments(signed):
    from zerotune.backend.step.kernel import CodedMoment, load_host_step

    book, numbers = codebook(signed=signed), moments() if signed else moments().abs()
    numbers = numbers[: NUMEL + 30 * BLOCK]

    def encoded(exact: torch.Tensor) -> CodedMoment:
        codes, scales = torch.empty(len(exact), dtype=torch.uint8), torch.empty(36)
        moment = CodedMoment(codes=codes, scales=scales, book=book)
        load_host_step().encode(exact, into=moment)
        return moment

    first = encoded(numbers)
    decoded = load_host_step().decode(first)
    for mine, expected in zip((first.codes, first.scales), encode(book, numbers), strict=True):
        assert torch.equal(mine, expected)
    assert torch.equal(decoded, book.decode(first.codes, first.scales))
    assert torch.equal(load_host_step().decode(encoded(decoded)), decoded)
    if signed:
        assert not torch.equal(book.decode(*encode(book, decoded)), decoded), "not by itself"


@pytest.mark.parametrize("signed", [True, False])
def test_one_comparison_finds_the_code_of_a_number(signed):
    book = codebook(signed=signed)
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    ends = torch.stack([upper, upper | 0xFFFF]).view(torch.float32)
    inside = (ends.abs() <= 1).all(0)
    low, high = (torch.bucketize(each, book.middles[:-1]) for each in ends[:, inside].sort(0)[0])
    assert torch.equal(low, book.lowest[inside].long())
    assert int((high - low).max()) == 1


def steps_of(optimizer: Any, weight: torch.nn.Parameter) -> None:
    random_ = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        weight.grad = torch.randn(NUMEL, generator=random_) * 10 ** (-step % 3) * 0.01
        weight.grad[:300] = 0
        optimizer.step()


@pytest.mark.deepspeed
@ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_pass_equals_the_optimizer_bit_for_bit(dtype):
    from zerotune.backend.step.adams import Host8BitAdam, WholeMasters
    from zerotune.backend.step.kernel import EMAPart, Piece, load_host_step

    random_ = torch.Generator().manual_seed(0)
    start = torch.randn(NUMEL, generator=random_)
    mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    kinds = (AdamW8BitStates, mine), (Torch8BitAdam, theirs)
    adams = [kind([w], lr=1e-2, weight_decay=0.1) for kind, w in kinds]
    host, group = Host8BitAdam(op=load_host_step(), adam=adams[0]), adams[0].param_groups[0]
    shadow, expected = start.clone(), start.clone()
    out = torch.empty(NUMEL, dtype=torch.bfloat16)
    for _ in range(STEPS):
        gradient = torch.randn(NUMEL, generator=random_).to(dtype)
        step = host.begin(
            mine, gradient=gradient, group=group, factor=0.3, out=out,
            masters=WholeMasters(mine.data), places=[(0, 0)],
        )  # fmt: skip
        for part in (slice(2 * BLOCK, NUMEL), slice(0, 2 * BLOCK)):
            average = EMAPart(tensor=shadow[part], weight=0.1)
            step.run([Piece(part.start, part.stop, [average])])
        theirs.grad = gradient.float() * torch.tensor(0.3)
        adams[1].step()
        expected.lerp_(theirs.data, 0.1)
    assert torch.equal(mine.data, theirs.data)
    assert torch.equal(out, theirs.data.bfloat16())
    assert torch.equal(shadow, expected)
    for name, state in adams[0].state[mine].items():
        other = adams[1].state[theirs][name]
        assert torch.equal(state, other) if isinstance(state, torch.Tensor) else state == other


@pytest.mark.deepspeed
def test_moments_written_as_numbers_are_kept_when_others_are_written_as_codes():
    from zerotune.backend.step.adams import Host8BitAdam
    from zerotune.backend.step.kernel import load_host_step

    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    adam = AdamW8BitStates([weight])
    coder = Host8BitAdam(op=load_host_step(), adam=adam)
    states = OptimizerStates(adam, weight, coder=coder)
    assert (states.tensors, states.stored, states.formats) == ({}, {}, {})
    assert not adam.state, "looking creates nothing"
    states.create(("exp_avg", "exp_avg_sq"))
    states.tensors["exp_avg"][:BLOCK] = -1.0
    states.stored["exp_avg"][BLOCK : 2 * BLOCK] = 255
    states.stored["exp_avg_scale"][1] = 3.0
    states.write_back()
    assert states.stored["exp_avg"].dtype == torch.uint8
    assert torch.equal(states.tensors["exp_avg"][:BLOCK], torch.full((BLOCK,), -1.0))
    assert torch.equal(states.tensors["exp_avg"][BLOCK : 2 * BLOCK], torch.full((BLOCK,), 3.0))
    assert not states.tensors["exp_avg"][2 * BLOCK :].any()


def test_weights_and_moments_match_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes", reason="a package that is optional")
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    ours, theirs, exact = (torch.nn.Parameter(start.clone()) for _ in range(3))
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    mine = Torch8BitAdam([ours], weight_decay=0.01, **settings)
    other = bnb.optim.AdamW8bit([theirs], weight_decay=0.01, min_8bit_size=0, **settings)
    reference = torch.optim.AdamW([exact], weight_decay=0.01, **settings)
    for optimizer, weight in ((mine, ours), (other, theirs), (reference, exact)):
        steps_of(optimizer, weight)
    state, there = mine.state[ours], other.state[theirs]
    for name, number in (("exp_avg", 1), ("exp_avg_sq", 2)):
        book = codebook(signed=name == "exp_avg")
        assert torch.equal(book.values, there[f"qmap{number}"])
        near = (state[name].int() - there[f"state{number}"].flatten().int()).abs()[300:]
        assert float((near == 0).float().mean()) > 0.95
        torch.testing.assert_close(
            state[scale_of(name)], there[f"absmax{number}"], rtol=0.02, atol=0
        )
    found, known, reference = (w.detach()[300:] for w in (ours, theirs, exact))
    # Both deviate equally from fp32 moments, and much less from each other.
    error = float((found - reference).abs().mean())
    assert float((known - reference).abs().mean()) == pytest.approx(error, rel=0.1)
    assert float((found - known).abs().mean()) < 0.2 * error
