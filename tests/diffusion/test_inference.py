"""A rank that fails is an error on every rank, at once."""

from __future__ import annotations

import time

import pytest

from tests.support.ranks import run_ranks
from zerotune.diffusion.sampling import shared
from zerotune.errors import CollectiveError


def fail_on_the_last() -> tuple[str, str, float, list[int]]:
    from zerotune.backend.distributed import ProcessGroup

    group = ProcessGroup(backend="gloo", timeout_s=60)
    last = group.rank == group.world_size - 1
    before = shared(group, "counting", lambda: group.rank)
    begun = time.perf_counter()
    try:
        shared(group, "drawing images", lambda: 1 / (0 if last else 1))
    except (ArithmeticError, CollectiveError) as error:
        return type(error).__name__, str(error), time.perf_counter() - begun, before
    return "", "no error", 0.0, before


@pytest.mark.world_size(2)
def test_the_others_are_told_which_rank_failed_and_why():
    first, last = run_ranks(fail_on_the_last, world_size=2)
    assert first[0] == CollectiveError.__name__
    assert first[1] == "drawing images: rank 1 reports ZeroDivisionError: division by zero."
    assert last[:2] == ("ZeroDivisionError", "division by zero")
    for _, _, seconds, before in (first, last):
        assert seconds < 30, "nobody waited for the timeout"
        assert before == [0, 1]


def test_alone_there_is_nobody_to_tell():
    assert shared(None, "counting", lambda: 5) == [5]
    with pytest.raises(ZeroDivisionError):
        shared(None, "dividing", lambda: 1 / 0)
