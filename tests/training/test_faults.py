"""When a rank is lost or differs, every rank's error names it and the difference."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoint.refusals import failing_write
from tests.offload.plans import swapping_plan
from tests.support.errors import error_of
from tests.support.ranks import RanksFailed, free_port, ranks, run_ranks
from tests.support.sampling import nightly
from tests.support.waiting import wait_for
from tests.training import failing_run, faulty
from tests.training.faulty import ALONE_S, TIMEOUT_S, needing_all, small
from tests.training.test_loop import clean_environment
from zerotune.backend.distributed import ProcessGroup
from zerotune.checkpoint.save import PendingCheckpoint
from zerotune.checkpoint.writing import Writing
from zerotune.ema import EMAShadow
from zerotune.offload import OffloadManager
from zerotune.training import SaveEvery, SaveEveryInBackground
from zerotune.training.setup import leased
from zerotune.training.watchdog import EXIT_CODE


@ranks(2)
def test_a_rank_with_different_settings_is_told_the_difference():
    rank = int(os.environ["RANK"])
    swapping = swapping_plan(world_size=2, lr=1e-2 * (1 + rank))
    with contextlib.ExitStack() as resources:
        found = {"swap": error_of(lambda: leased(swapping, OffloadManager(), resources, 30.0))}
    found |= {
        "model": error_of(lambda: small(channels=1 + rank)),
        "lr": error_of(lambda: small(lr=1e-2 * (1 + rank))),
    }
    with small(count=24 + 4 * rank) as trainer:
        found["data"] = error_of(lambda: trainer.fit(epochs=1))
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
def test_a_rank_with_different_settings_under_deepspeed_is_told_the_difference():
    rank = int(os.environ["RANK"])
    assert error_of(lambda: small(channels=1 + rank, deepspeed=True)).startswith(
        "CollectiveError: model: the ranks disagree (weight: "
    )
    assert "(config.optimizer.params.lr: rank 0: 0.01, rank 1: 0.02)" in error_of(
        lambda: small(lr=1e-2 * (1 + rank), deepspeed=True)
    )


@pytest.mark.parametrize(
    ("caller", "what", "purpose"),
    [
        (0, "save", "saving check"),
        *nightly((1, "export", "exporting to")),
    ],
)
@ranks(2)
def test_a_call_on_one_rank_only_names_the_missing_ranks(tmp_path, caller, what, purpose):
    """Scripts make this mistake with ``if trainer.is_main: trainer.save(...)``."""
    # A generous timeout for the start on a busy machine; a short one for the calls on one rank.
    trainer = small(ema=EMAShadow(decay=0.9), timeout_s=60.0)
    trainer.fit(steps=1)
    trainer.engine.group._timeout = timedelta(seconds=TIMEOUT_S)
    began, over = time.monotonic(), Path(f"{tmp_path}.over")
    if trainer.engine.group.rank != caller:
        wait_for(over.exists)
        return
    error = error_of(needing_all(trainer, tmp_path)[what])
    over.touch()
    assert time.monotonic() - began < 2 * TIMEOUT_S
    assert error.startswith(f"CollectiveError: rank {caller}: not every rank reached '{purpose}")
    assert f"within {TIMEOUT_S:g} s" in error
    assert f"Rank {1 - caller} is missing: rank {1 - caller} last reached" in error
    assert "not inside `if rank == 0`" in error
    assert list(tmp_path.iterdir()) == []


class Came(Exception):
    """Raised when a rank reaches a barrier."""


@ranks(2)
def test_collective_calls_begin_at_a_barrier_that_names_their_purpose(monkeypatch):
    trainer = small(ema=EMAShadow(decay=0.9))
    if not trainer.is_main:
        trainer.engine.group.barrier("the end")
        return
    begins = {
        "save": "saving checkpoint nowhere/step",
        "resume": "resuming from nowhere/there",
        "roll back": "loading checkpoint nowhere/there",
        "export": "exporting to nowhere/model",
        "export a pipeline": "exporting to ",
        "export adapters": "exporting adapters to ",
        "draw": "drawing images",
        "run on an average": "running with averaged weights",
        "gather an average": "gathering the weights",
        "save in the background": "making a BackgroundSaver",
    }

    def come(_, purpose, **__):
        raise Came(purpose)

    with monkeypatch.context() as patch:
        patch.setattr(ProcessGroup, "barrier", come)
        calls = needing_all(trainer, Path("nowhere"))
        assert calls.keys() == begins.keys()
        for name, call in calls.items():
            with pytest.raises(Came, match=f"^{begins[name]}"):
                call()
    trainer.engine.group.barrier("the end")


@ranks(2)
def test_a_background_save_waits_for_a_rank_no_longer_than_the_trainer_does(tmp_path, monkeypatch):
    rank, write = int(os.environ["RANK"]), Writing._write
    every = SaveEveryInBackground(steps=1, root=tmp_path)
    trainer = small(callbacks=[every], timeout_s=60.0, watchdog=False)
    trainer.running.timeout_s = ALONE_S

    def delayed(writing):
        time.sleep(4 * ALONE_S if rank == 1 else 0)
        return write(writing)

    monkeypatch.setattr(Writing, "_write", delayed)
    began = time.monotonic()
    error = error_of(lambda: trainer.fit(steps=1))
    seconds = time.monotonic() - began
    (tmp_path / f"told-{rank}").touch()
    wait_for((tmp_path / "told-1").exists)
    assert error.startswith("CollectiveError: "), "the slow one is told that it was given up"
    if rank == 0:
        assert "rank 0: not every rank reached 'write the weights'" in error
        assert f"within {ALONE_S:g} s" in error
        assert seconds < 4 * ALONE_S + 10


@pytest.mark.parametrize("lost", [1, *nightly(0)])
def test_a_killed_rank_is_named_and_the_survivor_is_not(tmp_path, lost):
    with pytest.raises(RanksFailed, match=f"rank {lost}: died with exit code -9"):
        run_ranks(faulty.losing, str(tmp_path), lost, faulty.KILL, True, world_size=2)
    pid = (tmp_path / "pid").read_text()
    seconds, error = (tmp_path / "told").read_text().split(" ", 1)
    assert float(seconds) < 60
    assert error.startswith(f"CollectiveError: rank {1 - lost}: a rank was lost during training (")
    assert f"Rank {lost} is missing: rank {lost} has ended (process {pid})" in error
    log = (tmp_path / f"rank{1 - lost}.log").read_text()
    assert f"rank {1 - lost} gave up: CollectiveError" in log
    assert f"rank {lost} has ended (process {pid})" in log
    assert f"rank {1 - lost} failed" not in log


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, *nightly(None)])
def test_a_killed_rank_is_named_in_a_custom_loop(tmp_path, stage):
    with pytest.raises(RanksFailed, match=r"^rank 1: died with exit code -9$"):
        run_ranks(faulty.losing_in_a_loop, str(tmp_path), stage, world_size=2)
    pid, error = ((tmp_path / name).read_text() for name in ("pid", "told"))
    assert error.startswith("CollectiveError: rank 0: a rank was lost during training (")
    assert f"Rank 1 is missing: rank 1 has ended (process {pid})" in error


def test_the_watchdogs_name_a_stopped_rank_and_none_that_another_watchdog_ended(tmp_path):
    with pytest.raises(RanksFailed, match=f"died with exit code {EXIT_CODE}"):
        run_ranks(faulty.losing, str(tmp_path), 1, faulty.STOP, True, world_size=3)
    for rank in (0, 2):
        message = (tmp_path / f"ended-{rank}").read_text()
        assert message.startswith(
            "rank 1 stopped or exited without an error, and the other ranks are waiting"
        )
        assert f"rank 1 is stopped (process {(tmp_path / 'pid').read_text()})" in message
        assert "kill -CONT" in message


@pytest.mark.deepspeed
@pytest.mark.parametrize(("missing", "deepspeed"), [(0, True), *nightly((1, False))])
@ranks(2)
def test_a_rank_that_never_starts_is_named(missing, deepspeed):
    if int(os.environ["RANK"]) == missing:
        time.sleep(2 * TIMEOUT_S)
        return
    began = time.monotonic()
    error = error_of(lambda: small(deepspeed=deepspeed))
    assert time.monotonic() - began < TIMEOUT_S + 10
    assert error.startswith(f"CollectiveError: rank {1 - missing}: not every rank reached the st")
    assert f"Rank {missing} is missing: rank {missing} " in error


def test_a_stopped_rank_is_named_without_a_watchdog(tmp_path):
    with pytest.raises(RanksFailed, match="rank 0: died with exit code -9"):
        run_ranks(faulty.losing, str(tmp_path), 0, faulty.STOP, False, world_size=2)
    pid = (tmp_path / "pid").read_text()
    seconds, error = (tmp_path / "told").read_text().split(" ", 1)
    assert float(seconds) < TIMEOUT_S + 10
    assert f"Rank 0 is missing: rank 0 is stopped (process {pid})" in error


@ranks(2)
def test_a_rank_that_hears_of_another_ranks_failure_is_not_reported_as_failed(tmp_path):
    rank, log = int(os.environ["RANK"]), tmp_path / f"{os.environ['RANK']}.log"
    logging.getLogger("zerotune").addHandler(logging.FileHandler(log))
    trainer = small(callbacks=[SaveEvery(steps=1, root=tmp_path / "checkpoints")])
    with failing_write(0) if rank == 1 else contextlib.nullcontext():
        error = error_of(lambda: trainer.fit(steps=2))
    text = log.read_text()
    if rank == 0:
        assert "rank 1 reports: " in error
        assert "No space left on device" in error
        assert "rank 0 gave up: CheckpointError" in text
    else:
        assert "rank 1 reports: " not in error
        assert "rank 1 failed: CheckpointError" in text
    assert "rank 0 failed" not in text


# test_trainer covers ranks without a launcher.
@pytest.mark.nightly
@pytest.mark.parametrize("ending", ["closing", "without closing"])
def test_an_error_under_torchrun_removes_the_swap_folder(tmp_path, ending):
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
