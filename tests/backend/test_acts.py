"""Whatever is done to a model between steps: the optimizer's own step's bits, or a clear error."""

from __future__ import annotations

import os
import random

import pytest

from tests.backend.act_runs import AFTER, MODES, cell, modes_of
from tests.backend.acts import ACTS, KINDS

pytestmark = pytest.mark.deepspeed

EVERY = "ZEROTUNE_MATRIX" in os.environ
SEED = int(os.environ.get("ZEROTUNE_ACTS_SEED", "28"))
HIDDEN = ("plain cpu", "plain apart", "z1 cpu", "z2 cpu", "z3 cpu")
"""Kinds of engines whose steps may be under way."""


def diagonal() -> list[tuple[str, str, str]]:
    """Each act once, in a configuration that the seed turns to: those in which steps are hidden."""
    chance, found = random.Random(SEED), []
    turn = chance.randrange(100)
    for index, (name, act) in enumerate(ACTS.items()):
        kinds = [kind for kind in HIDDEN if kind in act.kinds]
        kind = kinds[(index + turn) % len(kinds)]
        modes = [m for m in modes_of(KINDS[kind], act) if m != "default"]
        found.append((name, kind, modes[(index // len(kinds) + turn) % len(modes)]))
    return found


@pytest.mark.parametrize(("name", "kind", "mode"), diagonal())
def test_an_act_changes_nothing_or_is_refused(name, kind, mode):
    found = cell(name, KINDS[kind], (mode,), after=4)
    assert not found[mode].startswith("FAIL"), found


def test_every_act_can_be_done_where_steps_are_hidden():
    assert len(ACTS) >= 40
    for name, act in ACTS.items():
        assert act.kinds & set(HIDDEN), name


@pytest.mark.slow
@pytest.mark.skipif(not EVERY, reason="set ZEROTUNE_MATRIX=1; the suite has a diagonal of it")
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", list(ACTS))
def test_nor_does_it_anywhere(name, kind):
    act = ACTS[name]
    if kind not in act.kinds:
        pytest.skip("there is nothing to do")
    found = cell(name, KINDS[kind], modes_of(KINDS[kind], act), after=AFTER)
    assert not [verdict for verdict in found.values() if verdict.startswith("FAIL")], found
    assert set(found) <= {"oracle", *MODES}
