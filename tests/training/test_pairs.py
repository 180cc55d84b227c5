"""Two engines alive at once train as each would alone."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.ranks import ranks, run_ranks
from tests.training import pairs
from tests.training.pairs import PAIRS, STAGES, alone, page_example, together


@pytest.mark.deepspeed
@ranks(2)
def test_two_models_trained_in_turn_equal_each_trained_alone_bit_for_bit():
    before = os.environ.get("LOCAL_RANK")
    found = []
    for pair in PAIRS:
        both = together(pair)
        for seed, (case, (losses, trained)) in enumerate(zip(pair, both, strict=True)):
            expected, wanted = alone(case, seed)
            same = [torch.equal(wanted[name], trained[name]) for name in wanted]
            found.append((str(case), [a == b for a, b in zip(expected, losses, strict=True)], same))
    assert os.environ.get("LOCAL_RANK") == before
    assert len(found) == 2 * len(pairs.PAIRS)
    for name, losses, weights in found:
        assert len(losses) == 6
        assert all(losses), name
        assert len(weights) > 5
        assert all(weights), name


@pytest.mark.deepspeed
def test_a_model_trains_through_another_frozen_model():
    ranks = run_ranks(pairs.adversaries, world_size=2)
    for found in ranks:
        expected = found[0]
        assert len(set(expected)) == 8
        for case, losses in zip(pairs.RIVALS, found, strict=True):
            assert losses == pytest.approx(expected, rel=5e-5), [str(each) for each in case]


@pytest.mark.deepspeed
@ranks(1)
def test_the_example_on_the_page_trains_u_nets_at_every_stage():
    found = [page_example(stage) for stage in STAGES]
    assert len(found) == len(pairs.STAGES)
    assert len(set(found[0])) == 6
    for stage, losses in zip(pairs.STAGES, found, strict=True):
        assert losses == pytest.approx(found[0], rel=1e-4), stage
