"""Checkpoints contain the moments of bitsandbytes' AdamW8bit."""

from __future__ import annotations

import copy

import attrs
import pytest
import torch

from tests.support.needs import needs
from tests.support.ranks import ranks
from tests.support.runs import PLAIN, Case, start
from zerotune.backend.fragments import OptimizerStates
from zerotune.backend.low_bit import decode, encode
from zerotune.checkpoint import load_checkpoint, save_checkpoint
from zerotune.errors import CheckpointError

BLOCK = 256
LACKS = "a large wheel for an optional package; the stand-in has the same states"


def dynamic_tree(*, signed: bool) -> torch.Tensor:
    """Return the values of the 256 codes of bitsandbytes (https://arxiv.org/abs/1511.04561)."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        above = (10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        values += [*above, *(-value for value in above)] if signed else above
    return torch.tensor(sorted(values))


class AdamW8bit(torch.optim.Optimizer):
    """An optimizer with the states of bitsandbytes' class, updated in fp32."""

    __module__ = "bitsandbytes.optim.adamw"

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    def init_state(self, _group, parameter, _number, _place):
        state = self.state[parameter]
        state["step"] = 0
        for suffix, signed in (("1", True), ("2", False)):
            if parameter.numel() < 4096:
                state[f"state{suffix}"] = torch.zeros_like(parameter.data)
                continue
            book = dynamic_tree(signed=signed)
            zero = int((book == 0).nonzero()[0])
            state[f"state{suffix}"] = torch.full_like(parameter.data, zero, dtype=torch.uint8)
            state[f"qmap{suffix}"] = book
            state[f"absmax{suffix}"] = torch.zeros(-(-parameter.numel() // BLOCK))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if not self.state[parameter]:
                    self.init_state(group, parameter, 0, place)
                state, gradient = self.state[parameter], parameter.grad.view(-1)
                state["step"] += 1
                first = decode(state, "1").lerp_(gradient, 0.1)
                second = decode(state, "2").lerp_(gradient.square(), 0.001)
                encode(first, state, "1")
                encode(second, state, "2")
                parameter.view(-1).addcdiv_(first, second.sqrt() + 1e-8, value=-group["lr"])


def real():
    return needs("bitsandbytes.optim", may_lack=LACKS).AdamW8bit


KINDS = {"stand-in": lambda: AdamW8bit, "bitsandbytes": real}


def trained(kind, *shape, steps=4):
    torch.manual_seed(3)
    parameter = torch.nn.Parameter(torch.randn(shape))
    optimizer = kind([parameter], lr=1e-2)
    for _ in range(steps):
        parameter.grad = torch.randn(shape) * 10 ** torch.randn(shape)
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shape", [(70, 90), (5000,), (30,)], ids=str)
def test_encoding_decoded_moments_changes_nothing(name, shape):
    parameter, optimizer = trained(KINDS[name](), *shape)
    before = copy.deepcopy(optimizer.state[parameter])
    states = OptimizerStates.of(optimizer, parameter)
    assert list(states.tensors) == ["exp_avg", "exp_avg_sq"]
    assert states.step_of("") == 4
    assert (states.others, states.scalars) == ((), {})
    assert all(each.dtype == torch.float32 for each in states.tensors.values())
    assert float(states.tensors["exp_avg"].abs().max()) > 0
    states.write_back()
    after = optimizer.state[parameter]
    for key, value in before.items():
        if key.startswith("absmax"):
            torch.testing.assert_close(after[key], value, rtol=2e-7, atol=0)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(after[key], value), key


@pytest.mark.parametrize("name", KINDS)
def test_a_new_optimizer_continues_from_saved_moments(name):
    kind = KINDS[name]()
    parameter, optimizer = trained(kind, 70, 90)
    saved = dict(OptimizerStates.of(optimizer, parameter).tensors)
    other = torch.nn.Parameter(parameter.data.clone())
    resumed = kind([other], lr=1e-2)
    states = OptimizerStates.of(resumed, other)
    states.create(tuple(saved))
    for moment, value in saved.items():
        states.tensors[moment].copy_(value)
    states.write_back()
    states.set_step(4, key="", largest=4)
    gradient = torch.randn(70, 90)
    for one, each in ((parameter, optimizer), (other, resumed)):
        one.grad = gradient.clone()
        each.step()
    torch.testing.assert_close(other, parameter, rtol=1e-6, atol=1e-7)


def test_decoded_moments_equal_those_of_bitsandbytes():
    functional = needs("bitsandbytes.functional", may_lack=LACKS)
    parameter, optimizer = trained(real(), 70, 90)
    state = optimizer.state[parameter]
    for suffix in "12":
        wanted = functional.dequantize_blockwise(
            state[f"state{suffix}"], absmax=state[f"absmax{suffix}"],
            code=state[f"qmap{suffix}"], blocksize=BLOCK,
        )  # fmt: skip
        assert torch.equal(decode(state, suffix), wanted.view(-1))


RUNS = {
    "plain": attrs.evolve(PLAIN, optimizer="AdamW8bit"),
    "z2": Case(stage=2, optimizer="AdamW8bit", engine="deepspeed"),
    "z3": Case(stage=3, optimizer="AdamW8bit", engine="deepspeed"),
}


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", RUNS)
@ranks(1)
def test_a_resumed_run_equals_an_uninterrupted_one(name, tmp_path):
    real()
    torch.manual_seed(0)
    first, weights = model(), {}
    second = copy.deepcopy(first)
    batches = [torch.randn(4, 80, generator=torch.Generator().manual_seed(n)) for n in range(4)]

    def train(engine, some):
        for batch in some:
            engine.backward(engine(batch).square().mean())
            engine.step()

    engine = start(RUNS[name], first)
    train(engine, batches[:2])
    save_checkpoint(tmp_path / "saved", engine=engine)
    train(engine, batches[2:])
    weights["whole"] = {n: each.clone() for n, each in engine.master_weights.gather()}
    engine.close()
    engine = start(RUNS[name], second)
    load_checkpoint(tmp_path / "saved", engine=engine)
    train(engine, batches[2:])
    weights["resumed"] = {n: each.clone() for n, each in engine.master_weights.gather()}
    engine.close()
    torch.testing.assert_close(weights["resumed"], weights["whole"], rtol=1e-6, atol=1e-8)


def model():
    return torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.ReLU(), torch.nn.Linear(80, 80))


def test_codes_of_weights_that_are_not_contiguous_are_refused():
    codes = torch.zeros(2, 3, 4, 4, dtype=torch.uint8).to(memory_format=torch.channels_last)
    with pytest.raises(CheckpointError, match="not contiguous"):
        decode({"state1": codes}, "1")
