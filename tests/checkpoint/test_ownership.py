"""Only one run at a time saves in a folder of checkpoints; a second gets an error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zerotune.decisions
from tests.checkpoint.samples import publish
from tests.support.ranks import run_ranks
from tests.training import faulty
from zerotune._util import ownership as mechanism
from zerotune.checkpoint import RootHold, latest_checkpoint
from zerotune.checkpoint.folders import prune, step_folder
from zerotune.checkpoint.holding import OWNER_LOCK
from zerotune.errors import CheckpointError

HOLDER = """
import os, sys, time
from zerotune.checkpoint import RootHold
hold = RootHold(sys.argv[1])
child = os.fork() if sys.argv[2] == "fork" else 1
if child == 0:
    time.sleep(60)
print(child, flush=True)
sys.stdin.read()
hold.close()
"""


@pytest.fixture
def holder():
    """Return a function that starts a process that holds a folder; end all at teardown."""
    running = []

    def start(root, how="alone"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(root), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(zerotune.decisions.__file__).parents[1])},
        )
        running.append(process)
        process.child = int(process.stdout.readline())
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_a_second_process_gets_an_error_that_names_the_first(tmp_path, holder):
    first = holder(tmp_path)
    for number in (1, 2):
        publish(step_folder(tmp_path, number))
    with pytest.raises(CheckpointError) as caught:
        RootHold(tmp_path)
    assert f"process {first.pid} on {os.uname().nodename} (since 20" in caught.value.reason
    assert caught.value.reason.endswith("saves checkpoints in this folder and is still running")
    assert caught.value.key == str(tmp_path)
    assert "started twice" in caught.value.fix
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 2), "looking needs no hold"
    assert prune(tmp_path, keep=1)
    first.communicate("")
    assert names(tmp_path) == ["step-00000002"]
    with RootHold(tmp_path) as hold:
        assert hold.decisions == ()


def test_the_folder_of_a_killed_process_is_taken_over(tmp_path, holder):
    first = holder(tmp_path)
    first.kill()
    first.communicate()
    assert names(tmp_path) == [OWNER_LOCK]
    with RootHold(tmp_path) as hold:
        (decision,) = hold.decisions
        assert decision.severity == "note"
        assert f"process {first.pid} on {os.uname().nodename} (since 20" in decision.reason
        assert f"\nprocess {os.getpid()} on " in (tmp_path / OWNER_LOCK).read_text()
    assert names(tmp_path) == []


def test_a_warning_names_a_former_holder_on_another_machine(tmp_path):
    (tmp_path / OWNER_LOCK).write_text("other\nprocess 7 on other (since 2026-01-01T00:00:00)")
    with RootHold(tmp_path) as hold:
        (decision,) = hold.decisions
        assert decision.severity == "warning"
        assert "process 7 on other (since 2026" in decision.reason


def test_a_worker_that_outlives_its_trainer_does_not_hold_the_folder(tmp_path, holder):
    first = holder(tmp_path, "fork")
    first.kill()
    first.wait()
    try:
        os.kill(first.child, 0)
        RootHold(tmp_path).close()
    finally:
        os.kill(first.child, 9)


def test_one_process_may_hold_a_folder_twice(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "root")
    (tmp_path / "root").mkdir()
    first, second = RootHold(tmp_path / "root"), RootHold(tmp_path / "link")
    first.close()
    first.close()
    assert names(tmp_path / "root") == [OWNER_LOCK]
    second.close()
    assert names(tmp_path / "root") == []


def test_a_warning_says_that_locks_are_not_supported(tmp_path, monkeypatch):
    def none(*_, **__):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(mechanism, "try_lock", none)
    with RootHold(tmp_path) as hold:
        (decision,) = hold.decisions
        assert decision.severity == "warning"
        assert "supports no file locks" in decision.reason


@pytest.mark.parametrize("way", ["fifo", "link", "folder", "file"])
def test_a_folder_that_cannot_be_locked_raises_one_checkpoint_error(tmp_path, way):
    root = tmp_path / "root"
    if way == "file":
        root.touch()
    else:
        root.mkdir()
        made = {
            "fifo": os.mkfifo,
            "link": lambda path: path.symlink_to(tmp_path / "other"),
            "folder": Path.mkdir,
        }
        made[way](root / OWNER_LOCK)
    with pytest.raises(CheckpointError, match="cannot be used for saving") as caught:
        RootHold(root)
    assert caught.value.key == str(root)
    assert "but may be readable" in caught.value.reason
    assert caught.value.fix
    assert not (tmp_path / "other").exists()


def test_a_job_started_twice_fails_on_every_rank_before_its_first_step(tmp_path):
    with RootHold(tmp_path):
        told = run_ranks(faulty.saving_where_another_does, str(tmp_path), world_size=2)
    for rank, (error, steps) in enumerate(told):
        assert error.startswith(f"CheckpointError: {tmp_path}: ")
        assert ("rank 0 reports: " in error) == (rank == 1)
        assert f"process {os.getpid()} on " in error
        assert steps == 0
    told = run_ranks(faulty.saving_where_another_does, str(tmp_path), world_size=2)
    assert told == [("", 2), ("", 2)]
    assert names(tmp_path) == ["step-00000002"]
