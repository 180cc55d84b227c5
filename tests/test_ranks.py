"""Test bodies run in real processes."""

from __future__ import annotations

import os

import pytest

from tests.support.ranks import RanksFailed, call_test, ranks, run_ranks


@pytest.fixture
def word() -> str:
    return "made once"


@pytest.mark.parametrize("world_size", [1, 2])
@ranks()
def test_arguments_and_fixtures_reach_every_rank(world_size, word, tmp_path, monkeypatch):
    monkeypatch.setenv("ONE_OF", str(world_size))
    rank = os.environ.get("RANK", "0")
    assert os.environ.get("WORLD_SIZE", "1") == os.environ["ONE_OF"]
    (tmp_path / rank).write_text(word)
    assert (tmp_path / rank).read_text() == "made once"


def fails_on_rank_1(limit):
    seen = [1, 2, int(os.environ["RANK"])]
    assert seen == [1, 2, limit], "rank by rank"


def test_a_failing_assert_shows_its_rank_and_the_compared_values():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(call_test, __name__, "fails_on_rank_1", {"limit": 0}, world_size=2)
    text = str(failed.value)
    assert text.startswith("rank 1: \ntests/test_ranks.py:")
    assert "AssertionError: rank by rank\nE   assert [1, 2, 1] == [1, 2, 0]" in text
    assert "rank 0" not in text
