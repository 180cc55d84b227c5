"""Two engines alive at once train as each would alone."""

from __future__ import annotations

import math

import pytest

from tests.support.ranks import run_ranks
from tests.training import pairs


@pytest.mark.deepspeed
@pytest.mark.world_size(2)
def test_two_models_in_turn_are_bit_for_bit_what_they_are_alone():
    for found in run_ranks(pairs.compare, world_size=2):
        assert len(found) == 2 * len(pairs.PAIRS)
        for name, losses, weights in found:
            assert len(losses) == 6
            assert all(losses), name
            assert len(weights) > 5
            assert all(weights), name


@pytest.mark.deepspeed
def test_both_forward_passes_may_come_before_either_step():
    (losses,) = run_ranks(pairs.adversaries)
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[2] < losses[0]
