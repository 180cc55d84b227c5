"""Damaged checkpoints: refused before anything changes."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import attrs

from stress.faults.campaign import Found
from stress.faults.workers import Team
from tests.checkpoint.refusals import Tried
from tests.checkpoint.runs import everything
from tests.support.runs import PLAIN, Case
from zerotune.errors import ZeroTuneError

CASES: Final = (
    PLAIN,
    attrs.evolve(PLAIN, stage=2, offload="cpu"),
    attrs.evolve(PLAIN, stage=2, offload="cpu", precision="bf16"),
    Case(stage=2, offload="cpu", precision="bf16", optimizer="AdamWBF16States"),
)
"""Engines whose checkpoints are damaged."""


def damage_file(folder: Path, chance: random.Random) -> None:
    """Flip bits, cut, lengthen, empty, remove or replace any file, so that its hash is wrong."""
    path = chance.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    way = chance.choice(["bit", "bits", "cut", "longer", "empty", "remove", "pipe", "link", "dir"])
    if way in ("bit", "bits"):
        for _ in range(1 if way == "bit" else 50):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    elif way == "cut":
        os.truncate(path, chance.randrange(len(content)))
    elif way == "longer":
        path.write_bytes(content + chance.randbytes(chance.randrange(1, 100)))
    elif way == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if way == "pipe":
            os.mkfifo(path)
        elif way == "link":
            path.symlink_to("nowhere")
        elif way == "dir":
            path.mkdir()


class Attacked:
    """A trained engine into which damaged checkpoints are loaded."""

    def __init__(self, root: str, case: Case) -> None:
        self._tried = Tried(root, case)
        self._tried.load(self._tried.good, rng=False)
        self._before = self._now()

    def attack(self, seed: float) -> None:
        """Load a damaged copy of the good checkpoint."""
        folder = self._tried.root / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._tried.good, folder)
        damage_file(folder, random.Random(seed))
        try:
            self._tried.load(folder)
        except ZeroTuneError as error:
            if self._now() != self._before:
                raise Found("lost", f"changed before it was refused: {error}") from error
        else:
            raise Found("lost", "a damaged checkpoint was loaded")

    def _now(self) -> dict[str, Any]:
        found = everything(self._tried.engine, self._tried.ema)
        found.pop("random")
        return found


class Checkpoints:
    """Loads damaged checkpoints; each kind of engine has its own process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="faults-checkpoints-")
        self._teams: dict[Case, Team] = {}

    def inject(self, work: Path, chance: random.Random) -> None:
        case = chance.choice(CASES)
        team = self._teams.get(case)
        if team is None or not team.alive:
            root = Path(self._folder.name, work.name)
            root.mkdir()
            team = self._teams[case] = Team(Attacked, str(root), case)
        team.ask("attack", chance.random())

    def close(self) -> None:
        for team in self._teams.values():
            team.close()
        self._folder.cleanup()
