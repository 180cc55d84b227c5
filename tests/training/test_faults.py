"""When a rank is lost or differs, everybody is told which one, and in what."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.offload.plans import swapping_plan
from tests.support.ranks import RanksFailed, free_port, ranks, run_ranks
from tests.training import failing_run, faulty
from tests.training.faulty import small, told
from tests.training.test_loop import clean_environment
from zerotune.checkpoint.save import PendingCheckpoint
from zerotune.offload import OffloadManager
from zerotune.training.setup import leased
from zerotune.training.watchdog import EXIT_CODE, Beat, Position, _aged, _message, _stuck


@ranks(2)
def test_a_rank_that_differs_is_told_in_what():
    """One rank has another model, rate or data."""
    rank = int(os.environ["RANK"])
    swapping = swapping_plan(world_size=2, lr=1e-2 * (1 + rank))
    with contextlib.ExitStack() as resources:
        found = {"swap": told(lambda: leased(swapping, OffloadManager(), resources, 30.0))}
    found |= {
        "model": told(lambda: small(channels=1 + rank)),
        "lr": told(lambda: small(lr=1e-2 * (1 + rank))),
    }
    with small(count=24 + 4 * rank) as trainer:
        found["data"] = told(lambda: trainer.fit(epochs=1))
    assert found["model"].startswith("CollectiveError: model: the ranks disagree (weight: ")
    assert "rank 0: 'torch.float32 [1, 1, 3, 3]'" in found["model"]
    assert "rank 1: 'torch.float32 [2, 2, 3, 3]'" in found["model"]
    assert re.search(r"[ (]optimizer\S*\.lr: rank 0: 0.01, rank 1: 0.02[;)]", found["lr"])
    assert found["swap"].startswith("CollectiveError: resolved plan: the ranks disagree (")
    assert "optimizer.params.lr: rank 0: 0.01, rank 1: 0.02" in found["swap"]
    assert found["data"].startswith("CollectiveError: data: the ranks disagree (")
    assert "rank 0: 24, rank 1: 28" in found["data"]
    assert max(map(len, found.values())) < 600


@pytest.mark.deepspeed
@ranks(2)
def test_a_rank_that_differs_under_deepspeed_is_told_in_what():
    """The same, found before DeepSpeed starts."""
    rank = int(os.environ["RANK"])
    assert told(lambda: small(channels=1 + rank, deepspeed=True)).startswith(
        "CollectiveError: model: the ranks disagree (weight: "
    )
    assert "(config.optimizer.params.lr: rank 0: 0.01, rank 1: 0.02)" in told(
        lambda: small(lr=1e-2 * (1 + rank), deepspeed=True)
    )


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("caller", "what", "purpose"),
    [
        (0, "save", "saving check"),
        (1, "save", "saving check"),
        (0, "draw", "drawing images"),
        (1, "export", "exporting to"),
    ],
)
def test_a_call_on_one_rank_only_is_told_who_is_missing(tmp_path, caller, what, purpose):
    results = run_ranks(faulty.alone, str(tmp_path), caller, what, world_size=2)
    error, seconds = results[caller]
    start = f"CollectiveError: rank {caller}: not every rank came to '{purpose}"
    assert error.startswith(start)
    assert f"within {faulty.TIMEOUT_S:g} s" in error
    assert f"Rank {1 - caller} failed to come: rank {1 - caller} last came to" in error
    assert "not inside `if rank == 0`" in error
    assert seconds < 2 * faulty.TIMEOUT_S
    assert list(tmp_path.iterdir()) == []


@pytest.mark.world_size(2)
def test_whatever_needs_all_ranks_begins_at_a_barrier_that_says_what_it_is():
    found = run_ranks(faulty.first_meetings, world_size=2)[0]
    for name, begins in {
        "save": "saving checkpoint nowhere/step",
        "resume": "resuming from nowhere/there",
        "roll back": "loading checkpoint nowhere/there",
        "export": "exporting to nowhere/model",
        "export a pipeline": "exporting to ",
        "export adapters": "exporting adapters to ",
        "merge": "merging into nowhere/merged",
        "draw": "drawing images",
        "run on an average": "running on averaged weights",
        "gather an average": "gathering the weights",
        "save in the background": "saving in nowhere",
    }.items():
        assert found.pop(name).startswith(begins), name
    assert not found


@pytest.mark.world_size(2)
def test_a_background_save_waits_for_a_rank_no_longer_than_the_trainer_does(tmp_path):
    found = run_ranks(faulty.slow_background, str(tmp_path), 1, world_size=2)
    error, seconds = found[0]
    assert error.startswith("CollectiveError: rank 0: not every rank came to 'write the weights'")
    assert f"within {faulty.ALONE_S:g} s" in error
    assert seconds < 4 * faulty.ALONE_S + 10
    assert found[1][0].startswith("CollectiveError: "), "the slow one is told that it was given up"


@pytest.mark.world_size(2)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_is_named_and_not_the_survivor(tmp_path, lost):
    with pytest.raises(RanksFailed, match=f"rank {lost}: died with exit code -9"):
        run_ranks(faulty.losing, str(tmp_path), lost, faulty.KILL, True, world_size=2)
    pid = (tmp_path / "pid").read_text()
    seconds, error = (tmp_path / "told").read_text().split(" ", 1)
    assert float(seconds) < 60
    assert error.startswith(f"CollectiveError: rank {1 - lost}: a rank was lost in training (")
    assert f"Rank {lost} failed to come: rank {lost} has ended (process {pid})" in error
    log = (tmp_path / f"rank{1 - lost}.log").read_text()
    assert f"rank {1 - lost} gave up: CollectiveError" in log
    assert f"rank {lost} has ended (process {pid})" in log
    assert f"rank {1 - lost} failed" not in log


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [None, pytest.param(2, marks=pytest.mark.deepspeed)])
def test_a_rank_that_is_killed_is_named_in_a_loop_of_ones_own(tmp_path, stage):
    with pytest.raises(RanksFailed, match=r"^rank 1: died with exit code -9$"):
        run_ranks(faulty.losing_in_a_loop, str(tmp_path), stage, world_size=2)
    pid, error = ((tmp_path / name).read_text() for name in ("pid", "told"))
    assert error.startswith("CollectiveError: rank 0: a rank was lost in training (")
    assert f"Rank 1 failed to come: rank 1 has ended (process {pid})" in error


@pytest.mark.world_size(2)
@pytest.mark.parametrize("lost", [0, 1])
def test_the_watchdog_finds_a_stopped_rank_without_its_last_word(tmp_path, lost):
    with pytest.raises(RanksFailed, match=f"rank {1 - lost}: died with exit code {EXIT_CODE}"):
        run_ranks(faulty.losing, str(tmp_path), lost, faulty.STOP, True, world_size=2)
    pid, message = (tmp_path / "pid").read_text(), (tmp_path / "ended").read_text()
    assert message.startswith(f"rank {lost} stopped or ended without a word and the others wait")
    assert f"rank {lost} is stopped (process {pid}); it was" in message
    assert "kill -CONT" in message


@pytest.mark.world_size(3)
def test_no_watchdog_takes_another_one_that_ended_its_rank_for_the_fault(tmp_path):
    with pytest.raises(RanksFailed):
        run_ranks(faulty.losing, str(tmp_path), 1, faulty.STOP, True, world_size=3)
    for rank in (0, 2):
        message = (tmp_path / f"ended-{rank}").read_text()
        assert message.startswith("rank 1 stopped or ended without a word and the others wait")


@pytest.mark.deepspeed
@pytest.mark.world_size(2)
@pytest.mark.parametrize(("missing", "deepspeed"), [(0, False), (1, False), (0, True), (1, True)])
def test_a_rank_that_never_starts_is_named(missing, deepspeed):
    results = run_ranks(faulty.missing_at_the_start, missing, deepspeed, world_size=2)
    error, seconds = results[1 - missing]
    assert error.startswith(f"CollectiveError: rank {1 - missing}: not every rank came to the st")
    assert f"Rank {missing} failed to come: rank {missing} " in error
    assert seconds < faulty.TIMEOUT_S + 10


@pytest.mark.world_size(2)
def test_a_stopped_rank_is_named_without_a_watchdog(tmp_path):
    with pytest.raises(RanksFailed, match="rank 0: died with exit code -9"):
        run_ranks(faulty.losing, str(tmp_path), 0, faulty.STOP, False, world_size=2)
    pid = (tmp_path / "pid").read_text()
    seconds, error = (tmp_path / "told").read_text().split(" ", 1)
    assert float(seconds) < faulty.TIMEOUT_S + 10
    assert f"Rank 0 failed to come: rank 0 is stopped (process {pid})" in error


@pytest.mark.world_size(2)
def test_a_rank_that_is_told_of_another_ones_failure_has_not_failed_itself(tmp_path):
    first, second = run_ranks(faulty.failing_to_write, str(tmp_path), world_size=2)
    assert "rank 1 reports: " in first
    assert "rank 1 reports: " not in second
    assert "No space left on device" in first
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(2)]
    assert "rank 0 gave up: CheckpointError" in logs[0]
    assert "rank 1 failed: CheckpointError" in logs[1]
    assert not any("rank 0 failed" in log for log in logs)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("ending", ["closing", "without closing"])
def test_an_error_under_torchrun_gives_the_swap_folder_back(tmp_path, ending):
    root = tmp_path / "swap"
    root.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *(f"--master-port={free_port()}", "-m", failing_run.__name__, str(root), ending),
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode != 0
    assert "ValueError: no such thing" in done.stderr
    assert list(root.iterdir()) == [], done.stderr[-3000:]


def beat(rank, **changes):
    position = Position(step=3, phase="forward", module=None)
    return Beat(**({"rank": rank, "position": position, "still_s": 1.0} | changes))


def test_a_silent_rank_of_another_machine_is_told_by_its_silence():
    silent = _aged(beat(1), silent_s=20, ended=None, interval_s=1)
    assert _stuck([beat(0, still_s=9), silent], 8, 2)
    text = _message([beat(0, still_s=9), silent], 2, 8)
    assert text.startswith("rank 1 stopped or ended without a word")
    assert "rank 1 has not been heard of for 20 s; it was in forward at step 3" in text
    assert _aged(beat(1), silent_s=2, ended=None, interval_s=1) == beat(1), "a pause is no end"
    let_down = beat(0, failed="CollectiveError: a rank was lost", let_down=True, done=True)
    assert _message([let_down, beat(1)], 2, 8).startswith("a rank was lost and the others wait")


def interrupted(*_):
    raise KeyboardInterrupt


def test_an_interrupted_wait_does_not_end_the_writing():
    goes_on = threading.Event()

    def run():
        goes_on.wait(120)
        return Path("step")

    former = signal.signal(signal.SIGALRM, interrupted)
    try:
        pending = PendingCheckpoint(SimpleNamespace(run=run))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - which may come at once
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                pending.wait()
            assert not pending.done, "it still writes"
        goes_on.set()
        assert pending.wait() == Path("step")
        assert pending.done
    finally:
        signal.signal(signal.SIGALRM, former)
