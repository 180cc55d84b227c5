"""EMAModel in custom loops: torch, accelerate, accelerate with DeepSpeed, DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ema.loops import STEPS, follow_loop
from tests.support.ranks import run_ranks


def check(results: list[dict[str, Any]], *, partitioned: bool) -> None:
    for seen in results:
        assert seen.pop("error") <= 1e-6
        assert seen == {
            "steps": STEPS,
            "copied": True,
            "restored": True,
            "another": True,
            "unfinished": False,
            "sharded": True,
            "partitioned": partitioned,
        }


# The scripts of examples/embedding do so in the suite.
@pytest.mark.deepspeed
@pytest.mark.nightly
def test_the_ema_follows_an_accelerate_loop_with_deepspeed():
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    check(run_ranks(follow_loop, "accelerate", zero), partitioned=False)


@pytest.mark.deepspeed
def test_the_ema_follows_a_deepspeed_loop_at_stage_3_in_bf16_on_two_processes():
    results = run_ranks(follow_loop, "deepspeed", {"stage": 3}, world_size=2)
    check(results, partitioned=True)
