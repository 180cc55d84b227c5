"""DeepSpeed's CPU Adam steps after a resume as in an uninterrupted run, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import ranks
from zerotune.backend.deepspeed.engine import replay_adam_steps

pytestmark = pytest.mark.deepspeed

LAST = 12


def weights_by_step(
    kind: str, first: int, replay: bool, groups: tuple[tuple[float, float], ...]
) -> list[str]:
    """Return the weights after each step from ``first`` on, with an earlier process's states."""
    import deepspeed.ops.adam

    from zerotune.backend.op_builds import same_ninja

    def parameters(step: int) -> list[torch.nn.Parameter]:
        # The restored values do not matter here, as long as all runs have the same.
        generator = torch.Generator().manual_seed(step)
        return [torch.nn.Parameter(torch.randn(257, generator=generator)) for _ in groups]

    held = parameters(0)
    with same_ninja():
        adam = getattr(deepspeed.ops.adam, kind)(
            [{"params": [p], "betas": b} for p, b in zip(held, groups, strict=True)], lr=0.1
        )
    if replay:
        replay_adam_steps(adam, first - 1)
    found = []
    for step in range(first, LAST + 1):
        for own, fresh in zip(held, parameters(step), strict=True):
            own.data.copy_(fresh.data)
            own.grad = fresh.data.cos()
            for group in adam.param_groups:
                group["step"] = step - 1
            adam.state[own] = {
                "step": step - 1,
                "exp_avg": fresh.data.sin(),
                "exp_avg_sq": fresh.data.abs(),
            }
        adam.step()
        found.append("".join(p.data.numpy().tobytes().hex() for p in held))
    return found


@pytest.mark.parametrize(
    "groups",
    [((0.9, 0.999), (0.9, 0.999)), ((0.9, 0.999), (0.8, 0.99))],
    ids=["alike", "different"],
)
@pytest.mark.parametrize("kind", ["DeepSpeedCPUAdam", "FusedAdam"])
@ranks(1)
def test_a_resumed_optimizer_steps_like_an_uninterrupted_one(kind, groups):
    whole = weights_by_step(kind, 1, False, groups)
    found = {
        way: [
            first
            for first in range(1, LAST + 1)
            if weights_by_step(kind, first, replay, groups) != whole[first - 1 :]
        ]
        for way, replay in (("as it is", False), ("replayed", True))
    }
    assert found["replayed"] == []
    if groups[0] == groups[-1]:
        assert found["as it is"], "DeepSpeed rounds alike now, so the correction can go"
