"""Damaged checkpoints, and crafted ones with valid hashes: refused before anything changes."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from stress.faults.campaign import Found
from stress.faults.resuming import Resumed
from stress.faults.workers import Team
from tests.checkpoint.crafted import Attacked
from tests.support.runs import PLAIN, Case

IN_HOST_MEMORY: Final = (
    attrs.evolve(PLAIN, stage=2, offload="cpu"),
    attrs.evolve(PLAIN, stage=2, offload="cpu", precision="bf16"),
    Case(stage=2, offload="cpu", precision="bf16", optimizer="AdamWBF16States"),
)
"""Engines whose optimizer is in host memory."""


class Checkpoints:
    """Loads checkpoints with one change into one engine or trainer.

    Args:
        ways: Names in ``tests.checkpoint.crafted.WAYS``, or ``"trainer"`` for the trainer's state.
        cases: Engines, one of which is attacked at random.
    """

    def __init__(self, *ways: str, cases: Sequence[Case] = (PLAIN,)) -> None:
        self._ways, self._cases = ways, cases
        self._folder = tempfile.TemporaryDirectory(prefix="faults-checkpoints-")
        self._teams: dict[tuple[Any, ...], Team] = {}
        self._count = 0

    def inject(self, work: Path, chance: random.Random) -> None:  # noqa: ARG002 - has its own
        way, seed = chance.choice(self._ways), chance.random()
        kind = (Resumed,) if way == "trainer" else (Attacked, chance.choice(self._cases))
        team = self._teams.get(kind)
        if team is None or not team.alive:
            self._count += 1
            root = Path(self._folder.name, str(self._count))
            root.mkdir()
            make, *case = kind
            team = self._teams[kind] = Team(make, str(root), *case)
        ((outcome, said),) = team.ask("attack", way, seed)
        if outcome == "changed":
            raise Found("lost", f"{way}: changed before it was refused: {said}")
        if outcome == "foreign":
            raise Found("foreign", f"{way}: {said}")
        if outcome == "loaded" and way == "damage":
            raise Found("lost", "a damaged checkpoint was loaded")

    def close(self) -> None:
        for team in self._teams.values():
            team.close()
        self._folder.cleanup()
