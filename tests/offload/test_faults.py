"""Real runs that are killed, crowd one root, or lose their folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stress.faults.killing import Victim, digest_of
from stress.faults.trainee import train
from tests.support.ranks import run_ranks
from tests.support.waiting import wait_for
from zerotune.offload import cleanup_stale_swap
from zerotune.offload.lease import find_leases

pytestmark = [pytest.mark.deepspeed, pytest.mark.nvme]

CLEANER = """
import sys, time
from zerotune.offload import cleanup_stale_swap
while True:
    print(*(one.path.name for one in cleanup_stale_swap(sys.argv[1]).failures), flush=True)
    time.sleep(0.02)
"""
PHASES = ("start", "ready", "step 1", "saving 2")


@pytest.fixture
def cleaning():
    """Return a function that starts a process which cleans a root in a loop and must never fail."""
    processes = []

    def start(root):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", CLEANER, str(root)], stdout=subprocess.PIPE, text=True
            )
        )
        assert processes[-1].stdout.readline() == "\n"

    yield start
    for process in processes:
        process.kill()
        assert process.communicate()[0].split() == []


def test_runs_killed_beside_others_resume_as_if_uninterrupted(tmp_path, hold, cleaning):
    root = tmp_path / "swap"
    root.mkdir()
    bystander = Path(hold(root).read())
    before = digest_of(bystander)
    cleaning(root)
    crowd = [Victim(root, tmp_path / f"run{number}") for number in range(len(PHASES))]
    with ThreadPoolExecutor() as killers:
        list(killers.map(Victim.kill_after, crowd, PHASES))
    assert not any("end" in victim.said for victim in crowd)
    cleanup_stale_swap(root)
    # The other cleaner may still be removing folders that this one left to it.
    wait_for(lambda: [lease.path for lease in find_leases(root)] == [bystander])
    # Resume all four at once under the root that is being cleaned, and compare with a run under
    # another root.
    again = [Victim(root, tmp_path / f"run{number}") for number in range(len(PHASES))]
    losses = [run.losses() for run in again]
    expected = Victim(tmp_path / "apart", tmp_path / "alone").losses()
    assert len(set(expected.values())) == len(expected)
    for own in losses:
        assert own == {step: expected[step] for step in own}, "not bit for bit"
    assert losses[0] == losses[1] == expected, "these had saved nothing yet"
    assert min(losses[3]) >= 2, "this one was resumed from a checkpoint"
    assert digest_of(bystander) == before
    assert [path.name for path in root.iterdir()] == [bystander.name]


def fails(root: str, checkpoints: str, spoil: str | None = None) -> tuple[str, str, list[str]]:
    """Start a run that must fail; return its error and the stages it reached."""
    from zerotune.errors import ZeroTuneError

    reached: list[str] = []

    def tell(text: str) -> None:
        reached.append(text)
        if text == spoil:
            shutil.rmtree(root)

    try:
        train(root, checkpoints, tell, save=False)
    except ZeroTuneError as error:
        return type(error).__name__, str(error), reached
    return "", "it trained", reached


def test_a_root_deleted_during_a_run_gives_one_clear_error(tmp_path):
    root = tmp_path / "swap"
    ((kind, said, reached),) = run_ranks(fails, str(root), str(tmp_path / "none"), "step 0")
    assert kind == "OffloadError"
    assert "the swap folder was deleted during the run" in said
    assert "end" not in reached
