"""Split master weights: which bits are lost, and that the pass updates them as torch would."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import ranks
from zerotune.backend.step.adams import SplitMasters

pytestmark = pytest.mark.deepspeed


def split_of(values: torch.Tensor) -> SplitMasters:
    masters = SplitMasters(
        high=torch.empty(values.numel(), dtype=torch.bfloat16),
        low=torch.empty(values.numel(), dtype=torch.int16),
    )
    masters.write(values)
    return masters


def every_low_half() -> torch.Tensor:
    """Return floats of both signs, even and odd in bf16, denormal to maximum, every low half."""
    highs = torch.tensor([0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7F, 0x4000], dtype=torch.int32)
    signed = torch.cat([highs, highs - 2**15])
    bits = (signed[:, None] << 16 | torch.arange(2**16, dtype=torch.int32)).flatten()
    return bits.view(torch.float32)


def test_split_masters_keep_every_bit_except_for_ties_that_round_up():
    values = every_low_half()
    masters = split_of(values)
    before, after = (each.view(torch.int32) for each in (values, masters.read()))
    assert torch.equal(masters.high, values.bfloat16())
    moved = before != after
    odd_tie = (before & 0x1FFFF) == 0x18000
    assert torch.equal(moved, odd_tie)
    assert torch.equal(after[moved], before[moved] + 1)
    assert torch.equal(masters.read().bfloat16(), masters.high), "the bf16 weights are the same"


def test_non_finite_values_survive_splitting():
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
    found = split_of(values).read()
    assert found[0].isnan()
    assert torch.equal(found[1:].view(torch.int32), values[1:].view(torch.int32))


@ranks(1)
@pytest.mark.parametrize("bf16_states", [False, True])
def test_the_pass_over_split_weights_equals_the_pass_over_whole_ones(bf16_states):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from zerotune.backend.optimizers.classes import AdamWBF16States
    from zerotune.backend.step.adams import WholeMasters, stepper_of
    from zerotune.backend.step.kernel import EMAPart, Piece, load_host_step

    kind = AdamWBF16States if bf16_states else DeepSpeedCPUAdam
    random_ = torch.Generator().manual_seed(0)
    numel, moved = 40_007, 0
    start = torch.randn(numel, generator=random_)
    masters = split_of(start)
    whole = torch.nn.Parameter(masters.read())
    keys = whole, torch.nn.Parameter(masters.low, requires_grad=False)
    adams = [kind([key], lr=1e-2, weight_decay=0.01) for key in keys]
    steppers = [stepper_of(adam)(op=load_host_step(), adam=adam) for adam in adams]
    shadow, expected = start.clone(), start.clone()
    out = torch.empty(numel, dtype=torch.bfloat16)
    for _ in range(20):
        gradient = torch.randn(numel, generator=random_).bfloat16()
        for adam, stepper, key in zip(adams, steppers, keys, strict=True):
            is_split = key is not whole
            step = stepper.begin(
                key, gradient=gradient, group=adam.param_groups[0], factor=0.5,
                out=None if is_split else out, places=[(0, 0)],
                masters=masters if is_split else WholeMasters(whole.data),
            )  # fmt: skip
            for part in (slice(16_000, numel), slice(0, 16_000)):
                averages = [EMAPart(tensor=shadow[part], weight=0.1)] if is_split else []
                step.run([Piece(part.start, part.stop, averages)])
        assert torch.equal(masters.high, out)
        exact = whole.detach().clone()
        whole.data.copy_(split_of(exact).read())
        moved += int((whole.detach() != exact).sum())
        assert torch.equal(masters.read(), whole.detach())
        states = [adam.state[key] for adam, key in zip(adams, keys, strict=True)]
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[0][name], states[1][name])
        expected.lerp_(masters.read(), 0.1)
        assert torch.equal(shadow, expected), "averages follow the weights as they are stored"
    assert 0 < moved < 20, "20 steps of 40,007 weights make 6 on average"


@ranks(1)
@pytest.mark.parametrize("kind", ["DeepSpeedCPUAdam", "AdamWBF16States", "AdamW8BitStates"])
def test_an_average_in_the_pass_reads_a_tie_as_one_that_comes_later_does(kind):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from zerotune.backend.optimizers.classes import AdamW8BitStates, AdamWBF16States
    from zerotune.backend.step.adams import stepper_of
    from zerotune.backend.step.kernel import EMAPart, Piece, load_host_step

    classes = {each.__name__: each for each in (DeepSpeedCPUAdam, AdamWBF16States, AdamW8BitStates)}
    # The step takes one unit in the last place from each weight: whole vectors, and a tail.
    above = torch.full((16 + 7,), 0x3F818001, dtype=torch.int32).view(torch.float32)
    masters, gradient = split_of(above), torch.ones(above.numel())
    key = torch.nn.Parameter(masters.low, requires_grad=False)
    adam = classes[kind]([key], lr=2.0**-23, weight_decay=0.0)
    stepper = stepper_of(adam)(op=load_host_step(), adam=adam)
    step = stepper.begin(
        key, gradient=gradient, group=adam.param_groups[0], factor=1.0, out=None, masters=masters,
        places=[(0, 0)],
    )  # fmt: skip
    shadow = torch.zeros_like(above)
    step.run([Piece(0, above.numel(), [EMAPart(tensor=shadow, weight=1.0)])])
    assert torch.equal(masters.read(), above), "0x3F818000 is a tie that is rounded up"
    assert torch.equal(shadow, masters.read())
