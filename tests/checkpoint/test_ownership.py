"""Only one run at a time saves in a folder of checkpoints; a second gets an error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import zerotune.decisions
from tests.checkpoint.samples import publish
from tests.support.ranks import run_ranks
from tests.training import faulty
from zerotune._util import ownership as mechanism
from zerotune.checkpoint import RootHold, holding, latest_checkpoint
from zerotune.checkpoint.folders import prune, step_folder
from zerotune.checkpoint.holding import OWNER_LOCK, OWNER_RECORD
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
    assert names(tmp_path) == [OWNER_RECORD, OWNER_LOCK]
    with RootHold(tmp_path) as hold:
        (decision,) = hold.decisions
        assert decision.severity == "note"
        assert f"process {first.pid} on " in decision.reason
        assert decision.reason.endswith("has ended, so this process takes over the folder")
    assert names(tmp_path) == []


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
    second.confirm()
    assert names(tmp_path / "root") == [OWNER_RECORD, OWNER_LOCK]
    second.close()
    assert names(tmp_path / "root") == []


def test_a_running_process_holds_its_folder_even_without_its_lock_file(tmp_path, holder):
    first = holder(tmp_path)
    (tmp_path / OWNER_LOCK).unlink()
    with pytest.raises(CheckpointError, match=rf"process {first.pid} on .* is still running"):
        RootHold(tmp_path)


def elsewhere(root):
    """Write the record of a run on another machine, whose lock is not visible here."""
    hold = RootHold(root)
    record = (root / OWNER_RECORD).read_text()
    hold.close()
    here = mechanism.ProcessIdentity.current()
    assert here.boot_id in record
    record = record.replace(here.boot_id, "another").replace(f'"{here.host}"', '"far-away"')
    (root / OWNER_RECORD).write_text(record)
    return record


@pytest.mark.parametrize(
    ("kind", "severity", "says"),
    [
        ("overlay", "note", "on far-away .* has ended"),
        ("nfs4", "warning", "taken over from process .* on far-away .*, although .* nfs4"),
    ],
)
def test_a_run_fails_at_its_next_save_if_another_machine_has_taken_its_folder(
    tmp_path, monkeypatch, kind, severity, says
):
    monkeypatch.setattr(holding, "filesystem_kind", lambda _: kind)
    theirs = elsewhere(tmp_path)
    with RootHold(tmp_path) as hold:
        (decision,) = hold.decisions
        assert decision.severity == severity
        assert mechanism.re.search(says, decision.reason)
        hold.confirm()
        # The other run takes over: this run's next save fails, and it removes nothing.
        (tmp_path / OWNER_RECORD).write_text(theirs)
        with pytest.raises(CheckpointError, match=r"far-away .* has taken it over"):
            hold.confirm()
    assert (tmp_path / OWNER_RECORD).read_text() == theirs


def test_a_deleted_record_is_written_again(tmp_path):
    with RootHold(tmp_path) as hold:
        for path in tmp_path.iterdir():
            path.unlink()
        hold.confirm()
        assert names(tmp_path) == [OWNER_RECORD, OWNER_LOCK]
        hold.confirm()
    assert names(tmp_path) == []


def test_only_the_record_is_checked_where_locks_are_not_supported(tmp_path, monkeypatch, holder):
    def none(*_, **__):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(mechanism, "try_lock", none)
    with RootHold(tmp_path / "new") as hold:
        assert "does not support file locks" in hold.decisions[0].reason
    first = holder(tmp_path)
    with pytest.raises(CheckpointError, match=rf"process {first.pid} on .* is still running"):
        RootHold(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1}'])
def test_a_damaged_record_does_not_block_saving(tmp_path, text):
    (tmp_path / OWNER_RECORD).write_text(text)
    with RootHold(tmp_path) as hold:
        assert "the folder is not locked" in hold.decisions[0].reason
    assert names(tmp_path) == []


@pytest.mark.parametrize("what", ["pipe", "half a record"])
def test_a_pipe_or_file_at_the_path_of_the_draft_does_not_block_saving(tmp_path, what):
    root, tried = tmp_path / "root", []

    def take():
        with RootHold(root):
            tried.append(names(root))

    root.mkdir()
    (os.mkfifo if what == "pipe" else Path.touch)(root / f".{OWNER_RECORD.lstrip('.')}.tmp")
    waiting = threading.Thread(target=take, daemon=True)
    waiting.start()
    waiting.join(60)
    assert tried == [[OWNER_RECORD, OWNER_LOCK]]


@pytest.mark.parametrize("name", ["pipe", "folder"])
def test_a_pipe_or_folder_in_place_of_the_record_is_not_waited_for(tmp_path, name):
    (os.mkfifo if name == "pipe" else Path.mkdir)(tmp_path / OWNER_RECORD)
    if name == "pipe":
        with RootHold(tmp_path) as hold:
            assert "is not a regular file" in hold.decisions[0].reason
    else:
        with pytest.raises(CheckpointError, match="cannot be used for saving"):
            RootHold(tmp_path)


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
