"""Two engines alive at once train as each would alone."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.ranks import ranks, run_ranks
from tests.support.sampling import nightly
from tests.training.pairs import PAIRS, RIVALS, adversaries, alone, together


def names(cases):
    return " and ".join(map(str, cases))


@pytest.mark.deepspeed
@pytest.mark.parametrize("pair", [PAIRS[1], *nightly((PAIRS[0],), (PAIRS[2],))], ids=names)
@ranks(2)
def test_two_models_trained_in_turn_equal_each_trained_alone_bit_for_bit(pair):
    before = os.environ.get("LOCAL_RANK")
    for seed, (case, (losses, trained)) in enumerate(zip(pair, together(pair), strict=True)):
        expected, wanted = alone(case, seed)
        assert losses == expected
        assert len(losses) == 6
        assert len(wanted) > 5
        assert all(torch.equal(wanted[name], trained[name]) for name in wanted)
    assert os.environ.get("LOCAL_RANK") == before


@pytest.mark.deepspeed
@pytest.mark.parametrize("rivals", [RIVALS[2], *nightly((RIVALS[1],), (RIVALS[3],))], ids=names)
def test_a_model_trains_through_another_frozen_model(rivals):
    for expected, losses in run_ranks(adversaries, (RIVALS[0], rivals), world_size=2):
        assert len(set(expected)) == 8
        assert losses == pytest.approx(expected, rel=5e-5)
