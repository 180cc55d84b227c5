"""The same run under every stage: ZeRO must not change the arithmetic.

NVMe, which needs a larger model to swap anything, is compared in ``tests/offload``.
"""

from __future__ import annotations

import functools

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case, train_unet
from tests.support.sampling import sampled

pytestmark = pytest.mark.deepspeed

STEPS = 8
# fp32 sums run in another order when partitioned; Adam's division by small second moments
# amplifies that to about 2e-5 by step 40. A wrong lr, decay mode or clipping is off by 1e-3.
TOLERANCE = 5e-5

CASES = [
    Case(stage=0),
    Case(stage=1),
    Case(stage=2),
    Case(stage=3),
    Case(stage=1, offload="cpu"),
    Case(stage=2, offload="cpu"),
    Case(stage=3, offload="cpu"),
    Case(stage=3, offload="cpu", offload_param="cpu"),
]


# Each case runs on one process or on two, and nightly on both.
ONE = [CASES[6]]
TWO = [Case(stage=1), Case(stage=2, offload="cpu"), CASES[-1]]


@functools.cache
def reference(world_size: int) -> list[list[float]]:
    return run_ranks(train_unet, PLAIN, STEPS, world_size=world_size)


def worst(losses: list[list[float]], expected: list[list[float]]) -> float:
    return max(
        abs(a - b) / abs(b)
        for mine, theirs in zip(losses, expected, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("case", sampled(CASES, ONE), ids=str)
def test_one_process_matches_the_plain_engine(case: Case) -> None:
    losses = run_ranks(train_unet, case, STEPS)
    assert losses[0][-1] < losses[0][0], "the run must learn, or agreement means nothing"
    assert worst(losses, reference(1)) < TOLERANCE


@pytest.mark.parametrize("case", sampled(CASES, TWO), ids=str)
def test_two_processes_match_the_plain_engine(case: Case) -> None:
    losses = run_ranks(train_unet, case, STEPS, world_size=2)
    assert losses[0] != losses[1], "the ranks must see different data"
    assert worst(losses, reference(2)) < TOLERANCE


def test_accumulation_matches_the_plain_engine() -> None:
    plain = Case(deepspeed=False, accumulation=4)
    expected = run_ranks(train_unet, plain, STEPS)
    for case in (Case(stage=0, accumulation=4), Case(stage=2, offload="cpu", accumulation=4)):
        assert worst(run_ranks(train_unet, case, STEPS), expected) < TOLERANCE
