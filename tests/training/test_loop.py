"""How a run ends, what is skipped on the way, what is averaged, tracked and validated."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.ranks import free_port, run_ranks
from tests.training import interrupted, looping


@pytest.mark.parametrize(
    ("deepspeed", "ranks", "number", "rank"),
    [
        (False, 1, signal.SIGINT, None),
        pytest.param(False, 2, signal.SIGTERM, 1, marks=pytest.mark.world_size(2)),
    ],
)
def test_a_signal_to_one_rank_ends_all_after_the_same_step(
    deepspeed, ranks, number, rank, tmp_path
):
    arguments = (deepspeed, str(tmp_path), number, rank)
    for result in run_ranks(looping.interrupted, *arguments, world_size=ranks):
        where = "" if rank is None else f" on rank {rank}"
        assert result["stopped"] == f"signal {signal.Signals(number).name}{where}"
        assert result["first"] == result["whole"][:2]
        assert result["rest"] == result["whole"][2:], "resumed bit for bit"
        assert result["events"] == ["start 0 of 6", "save step-00000002", "end"]
        assert result["decisions"][-1].startswith("fit.last_step: 6 -> 2 (stopped early: signal")
        assert result["restored"]


@pytest.mark.world_size(2)
def test_a_signal_to_a_child_of_torchrun_ends_the_job_with_exit_code_0(tmp_path):
    process = subprocess.Popen(
        command(tmp_path, 10**6), env=clean_environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        pid = tmp_path / "pid-1"
        deadline = time.monotonic() + 200
        while not pid.exists() or not pid.read_text():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(int(pid.read_text()), signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["stopped"] == "signal SIGTERM on rank 1"
    assert result["step"] >= 1
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{result['step']:08d}"


def command(folder: Path, steps: int) -> list[str]:
    script = Path(interrupted.__file__)
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
        *(f"--master-port={free_port()}", str(script), str(folder), str(steps)),
    ]


def clean_environment() -> dict[str, str]:
    hidden = ("RANK", "WORLD", "MASTER", "ACCELERATE", "DS_", "LOCAL")
    return {k: v for k, v in os.environ.items() if not k.startswith(hidden)} | {
        "OMP_NUM_THREADS": "1"
    }


def test_handlers_of_the_script_stay_and_a_second_signal_interrupts(tmp_path):
    (found,) = run_ranks(looping.own_handlers, str(tmp_path))
    assert found["kept"] == (None, [signal.SIGTERM])
    assert found["named"] == ("signal SIGUSR1", 1)
    assert found["twice"] == ("SIGTERM", 2)
    assert found["off"] is None
    assert found["caught"] == 2, "with no signals taken over, the script's own handler is called"
    assert found["thread"] == [1], "outside of the main thread a run is just not interruptible"


def test_when_to_stop(tmp_path):
    (found,) = run_ranks(looping.goals, str(tmp_path))
    assert found["one epoch"] == math.ceil(22 / 8)
    assert found["two epochs"] == math.ceil(44 / 8)
    assert found["earliest"] == 7
    assert found["fewer"] == 7, "there is nothing left to do"
    assert found["nothing"].startswith("InvalidValueError: fit: nothing says when to stop")
    assert found["negative"].startswith("InvalidValueError: fit(time_limit) = -1")
    assert found["half a step"].startswith("InvalidValueError: fit(steps) = 1.5")
    assert found["no length"].startswith("DataError: fit(epochs) = 1: RepeatedBatches does not")
    assert found["time"].stopped == "time limit of 0.05 s"
    assert found["time"].steps == found["time steps"] >= 1
    assert "stopped early: time limit of 0.05 s" in found["time"].render()
    (warning,) = found["time warned"]
    assert "nothing was saved; SaveEvery or" in warning
    assert found["asked"] == "the loss is low enough"
    assert found["asked step"] == 2
    assert found["asked again"] is None, "a request holds for one fit"
    saves = [event for event in found["minutes"] if event.startswith("save")]
    assert saves == ["save step-00000001", "save step-00000002", "save step-00000003"]
    assert found["kept"] == ["step-00000003"]
    assert found["no interval"].startswith("InvalidValueError: SaveEvery = ")


def test_a_run_that_was_killed_at_its_end_keeps_no_more_than_asked(tmp_path):
    (found,) = run_ranks(looping.over_after_kills, str(tmp_path))
    whole = ["step-00000002", "step-00000004"]
    assert found == {"SaveEvery": whole, "SaveEveryInBackground": whole}


def test_several_averages_in_the_background(tmp_path):
    (found,) = run_ranks(looping.averaged, str(tmp_path))
    assert found["rest"][0] == found["rest"][1]
    assert len(found["shadows"]) > 20
    assert all(found["shadows"])
    assert found["differ"] == {"fast": True, "slow": True}
    assert found["first"]
    assert "one of trained, fast, slow" in found["other"]
    assert found["exported"]
    # The checkpoint of step 2 is known to be whole when that of step 4 is due.
    saved = [f"save step-0000000{step}" for step in (2, 4, 5)]
    assert found["events"] == ["start 0 of 5", *saved, "end"]
    assert found["names"] == ["step-00000004", "step-00000005"]
    assert "fast: EMA" in found["explained"]
    assert not found["watching"], "closing the trainer ends the thread's watch"


@pytest.mark.world_size(2)
def test_steps_that_are_not_finite_are_dropped_on_all_ranks(tmp_path):
    ranks = run_ranks(looping.skipped, str(tmp_path), world_size=2)
    for found in ranks:
        assert [math.isfinite(loss) for loss in found["losses"]] == [1, 1, 0, 0, 1, 1]
        assert found["skipped"] == (2, 2)
        assert found["ema steps"] == 4
        told = [line for line in found["lines"] if "skipped" in line]
        assert [line.split(" on rank")[0][-6:] for line in told] == (
            ["step 3", "step 4"] if found is ranks[0] else []
        )
        assert "at step 3 on rank(s) 1" in found["too many"]
        assert "number 3 in a row" in found["too many"]
        assert found["gradient"].startswith("TrainingError: gradient norm = ")
        assert "not finite at step 2" in found["gradient"]
        assert "the weights are still those of the step before" in found["gradient"]
        assert found["gradient step"] == 1
        assert found["gradient skipped"] == 3
    assert ranks[0]["applied"] == [True, True, False, False, True, True]


def test_after_several_bad_steps_a_run_goes_back_to_its_newest_checkpoint(tmp_path):
    (found,) = run_ranks(looping.rolled_back, str(tmp_path))
    assert found["step"] == 5
    assert found["decisions"][-1].startswith(
        "step: 5 -> 2 (not finite at step 5 on rank(s) 0; the weights are still those of the"
    ), found["decisions"]
    assert found["position"] == (1 + 2 + 3) * 8, "the data go on from where they are"
    assert found["weights"]
    assert all(found["weights"]), "the checkpoint's"
    assert found["lines"] == [1, 2, 3, 4, 5]
    assert "holds no checkpoint to go back to" in found["nothing to go back to"]
    assert found["after poison"] == (4, 1), "what is not finite is neither saved nor gone back to"
    assert found["decided"].startswith("step: 3 -> 2 (not finite at step 3"), found["decided"]
    assert found["finite"]
    assert found["kept"] == ["step-00000003", "step-00000004"]
    for what in ("raised", "not skipped"):
        assert found[what].startswith("TrainingError: weights = nan: not finite at step 2")
        assert "the weights have been changed by it" in found[what]
    assert found["not skipped kept"] == ["step-00000001"], "no good one went"
    step, decided = found["past a poisoned one"]
    assert step == 3
    assert decided.startswith("step: 3 -> 1 (not finite at step 3"), decided


@pytest.mark.world_size(2)
def test_trackers_get_all_there_is_from_one_rank(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks = run_ranks(looping.tracked, str(tmp_path), world_size=2)
    found = ranks[0]
    events = EventAccumulator(str(tmp_path / "runs" / "digits"))
    events.Reload()
    files = [path for path in (tmp_path / "runs" / "digits").iterdir() if path.is_file()]
    assert len(files) == 1, "one run of two fits, on one rank"
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx(dict(enumerate(found["losses"], start=1)))
    held = {event.step: event.value for event in events.Scalars("validation/loss")}
    assert held == pytest.approx(dict(found["history"]))
    assert set(held) == {0, 2, 4}
    for name in ("train/lr", "train/grad_norm", "speed/samples_per_second", "time/forward"):
        assert len(events.Scalars(name)) == 4
    assert events.Scalars("memory/host_peak_gib")[0].value > 0.05
    text = events.Tensors("run/plan/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "optimizer.type = 'AdamW' [ok]" in text
    (image,) = events.Images("drawn")
    assert (image.width, image.height) == (8, 4), "two of them, side by side"
    for seen in ranks:
        assert "accelerate knows" in seen["messages"]["unknown"]
        assert "pip install clearml" in seen["messages"]["missing"]
        assert "needs a tracker" in seen["messages"]["none"]
        assert seen["failing"][0] == 2, "training goes on"
    (warning,) = found["failing"][1]
    assert warning.startswith("mine fails and is left out from here on (ConnectionError")


@pytest.mark.deepspeed
@pytest.mark.world_size(2)
def test_training_at_stage_3_goes_on_as_if_nobody_had_looked(tmp_path):
    ranks = run_ranks(looping.validated, str(tmp_path), world_size=2)
    for found in ranks:
        assert found["sizes"] == {0}, "parameters are partitioned"
        assert found["watched"] == found["alone"], "bit for bit"
        assert [step for step, _ in found["images"]] == [0, 2, 4]
        drawn = [images for _, images in found["images"]]
        assert all(images.shape == (3, 1, 8, 8) for images in drawn)
        assert np.array_equal(drawn[0], drawn[1]), "the warm-up begins with a learning rate of 0"
        assert not np.array_equal(drawn[0], drawn[2])
        assert [step for step, _ in found["values"]] == [0, 3, 4]
        losses = [values["validation/loss"] for _, values in found["values"]]
        assert len(set(losses)) == 3
        assert "validation/loss/0.1" in found["values"][0][1]
        assert "taken" in found["disk"], "a full disk of rank 0 is an error on every rank"
    names = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert names == ["step-00000000.png", "step-00000002.png", "step-00000004.png"]
    with Image.open(tmp_path / "images" / names[2]) as grid:
        assert grid.size == (4 + 2 * 12, 4 + 2 * 12)
