"""Kill training at random moments, clean up and start again: ``python -m tests.offload.faults``.

Each round starts a run on a root that two living runs share, kills it with SIGKILL at a random
moment between its start and its last save, cleans up, and resumes it to the end. The losses must
be those of a run that was never killed, bit for bit, and the living runs' folders unchanged.
Every third round has its parameters on NVMe as well.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.offload.conftest import Holder
from tests.offload.killing import PHASES, Kill, Victim, digest_of, kill_and_start_again
from zerotune.offload import find_leases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--crowd", type=int, default=4, help="runs at once on one root, at the end")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="zerotune-faults-") as folder:
        work = Path(folder)
        expected = {
            param: Victim(work / "apart", work / f"alone-{param}", param=param).losses()
            for param in ("cpu", "nvme")
        }
        kills = rounds(work, arguments.kills, random.Random(arguments.seed), expected)
        crowd(work, arguments.crowd, expected["cpu"])
    phases = {kill.phase.split()[0] for kill in kills}
    left = sum(kill.left > 0 for kill in kills)
    print(f"{len(kills)} kills ({', '.join(sorted(phases))}), {left} left files; all went on")
    return 0


def rounds(
    work: Path, count: int, chance: random.Random, expected: dict[str, dict[int, float]]
) -> list[Kill]:
    root = work / "swap"
    root.mkdir()
    neighbours = [Holder(root) for _ in range(2)]
    folders = [Path(neighbour.read()) for neighbour in neighbours]
    before = [digest_of(one) for one in folders]
    kills = []
    for number in range(count):
        param = "nvme" if number % 3 == 2 else "cpu"
        checkpoints = work / f"run{number}"
        kill, losses = kill_and_start_again(
            root, checkpoints, chance, phase=chance.choice(PHASES), param=param
        )
        assert losses == {step: expected[param][step] for step in losses}, (number, losses)
        assert [digest_of(one) for one in folders] == before, "a living run was touched"
        assert {lease.path for lease in find_leases(root)} == set(folders)
        print(f"{number + 1:3}: {kill}, resumed {len(losses)} steps", flush=True)
        shutil.rmtree(checkpoints, ignore_errors=True)
        kills.append(kill)
    for neighbour in neighbours:
        neighbour.leave()
    assert list(root.iterdir()) == []
    return kills


def crowd(work: Path, count: int, expected: dict[int, float]) -> None:
    """So many runs at once on one root: each as if it were alone."""
    root = work / "crowd"
    runs = [Victim(root, work / f"crowd{number}") for number in range(count)]
    for run in runs:
        assert run.losses() == expected
    assert list(root.iterdir()) == []


if __name__ == "__main__":
    sys.exit(main())
