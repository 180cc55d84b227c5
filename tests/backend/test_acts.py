"""Acts on a model between steps give the bits of the optimizer's own step, or a clear error."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.backend.act_runs import AFTER, MODES, ORACLE, Played, cell, play, verdict
from tests.backend.acts import ACTS, KINDS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed

SEED = int(os.environ.get("ZEROTUNE_ACTS_SEED", "28"))
TESTED = ("host", "streamed")
"""Kinds of engines that share the acts among them; DeepSpeed's is their oracle."""
SHORT = 2
"""Steps after the last act in the suite."""
TOGETHER = 14
"""Number of acts done one after the other in one process."""

Batch = tuple[str, tuple[tuple[str, str], ...]]


def batches() -> list[Batch]:
    """Pair every act with one kind and mode, shifted by the seed."""
    found: dict[str, list[tuple[str, str]]] = {kind: [] for kind in TESTED}
    for turn, (name, act) in enumerate(ACTS.items(), SEED):
        kinds = [kind for kind in TESTED if kind in act.kinds]
        found[kinds[turn % len(kinds)]].append((name, [*MODES][turn // 2 % len(MODES)]))
    return [
        (kind, tuple(each[start : start + TOGETHER]))
        for kind, each in found.items()
        for start in range(0, len(each), TOGETHER)
    ]


def play_batch(batch: Batch) -> list[tuple[Played, Played]]:
    """Return each act's run and its oracle's."""
    kind, acts = batch
    return [
        (play(name, KINDS[kind], MODES[mode], SHORT), play(name, KINDS[kind], ORACLE, SHORT))
        for name, mode in acts
    ]


@pytest.mark.parametrize("batch", batches(), ids=lambda batch: f"{batch[0]}: {batch[1][0][0]} …")
def test_acts_change_no_result_or_are_refused(batch):
    (played,) = run_ranks(play_batch, batch)
    found = {
        (name, mode): verdict(name, MODES[mode], mine, theirs)
        for (name, mode), (mine, theirs) in zip(batch[1], played, strict=True)
    }
    assert not failed(found)


def failed(found: dict[Any, str]) -> dict[Any, str]:
    return {what: text for what, text in found.items() if text.startswith("FAIL")}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for name, act in ACTS.items() for kind in TESTED if kind in act.kinds],
)
def test_acts_change_no_result_or_are_refused_under_every_kind_of_engine(kind, name):
    assert not failed(cell(name, KINDS[kind], tuple(MODES), AFTER))
