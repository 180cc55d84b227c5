"""Ranks that diverge end within seconds, and report where each of them was."""

from __future__ import annotations

import re

import pytest

from tests.support.ranks import RanksFailed, run_ranks
from tests.training import diagnosed
from zerotune.errors import InvalidValueError
from zerotune.training import Watchdog
from zerotune.training.watchdog import EXIT_CODE, _message


def logs(folder):
    return [(folder / f"rank{rank}.log").read_text() for rank in (0, 1)]


@pytest.mark.deepspeed
def test_a_rank_that_skips_a_block_at_stage_3_is_named_with_its_module(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(diagnosed.diverging, str(tmp_path), world_size=2)
    named = r"the ranks disagree \(rank 0: 'blocks\.2\S*', rank 1: 'blocks\.3\S*'\)"
    assert re.search(named, str(failed.value))


def test_a_sleeping_rank_is_distinguished_from_one_that_waits_for_it(tmp_path):
    with pytest.raises(RanksFailed, match=f"died with exit code {EXIT_CODE}"):
        run_ranks(diagnosed.waiting, str(tmp_path), world_size=2)
    for text in logs(tmp_path):
        assert re.search(r"rank 0 is in \w+.* at step 2 \(", text)
        assert re.search(r"rank 1 is in forward at step 2 \(.*diagnosed.py:\d+ in sleepy\)", text)


def test_a_slow_rank_that_makes_progress_is_not_reported():
    first, second = run_ranks(diagnosed.slow_but_alive, world_size=2)
    assert first == second
    assert len(first) == 3


def test_messages_name_every_rank():
    where = "rank 0 is in optimizer at step 12, for 9 s; rank 1 is in forward of a.b, for 9 s"
    stuck = _message(where, lost=[], timeout_s=8)
    assert stuck.startswith(f"no progress for 8 s: {where}. ")
    assert "raise Watchdog(timeout_s=...)" in stuck
    failed = _message(where, lost=[], timeout_s=None)
    assert failed == f"a rank failed or makes no progress, and the other ranks are waiting: {where}"
    lost = _message(where, lost=[1, 2], timeout_s=8)
    assert lost.startswith("rank 1 and rank 2 stopped or exited without an error")
    assert "kill -CONT" in lost


def test_a_timeout_that_is_not_positive_is_refused():
    with pytest.raises(InvalidValueError):
        Watchdog(timeout_s=0)
