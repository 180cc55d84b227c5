"""A failure on one rank raises on every rank at once."""

from __future__ import annotations

import time

import pytest

from tests.support.ranks import ranks
from zerotune.diffusion.sampling import shared
from zerotune.errors import CollectiveError


@ranks(2)
def test_the_other_ranks_learn_which_rank_failed_and_why():
    from zerotune.backend.distributed import ProcessGroup

    group = ProcessGroup(backend="gloo", timeout_s=60)
    last = group.rank == group.world_size - 1
    assert shared(group, "counting", lambda: group.rank) == [0, 1]
    begun = time.perf_counter()
    error, message = (
        (ZeroDivisionError, "^division by zero$")
        if last
        else (
            CollectiveError,
            "^drawing images: rank 1 reports ZeroDivisionError: division by zero.$",
        )
    )
    with pytest.raises(error, match=message):
        shared(group, "drawing images", lambda: 1 / (0 if last else 1))
    assert time.perf_counter() - begun < 30, "nobody waited for the timeout"


def test_without_a_group_results_and_errors_pass_through():
    assert shared(None, "counting", lambda: 5) == [5]
    with pytest.raises(ZeroDivisionError):
        shared(None, "dividing", lambda: 1 / 0)
