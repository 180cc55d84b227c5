"""How a run ends, what is skipped on the way, what is averaged, tracked and validated."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.ranks import free_port, ranks, run_ranks
from tests.training import interrupted, looping
from tests.training.looping import (
    At,
    Once,
    WhenBack,
    in_a_thread,
    poison,
    poisoned,
    send,
    shadows,
    told,
    warnings_of_zerotune,
)
from tests.training.workers import Losses, trainer
from zerotune.ema import BackgroundEMA, EMAShadow, EMAShadows
from zerotune.training import (
    MetricsFile,
    RollBackNonFinite,
    SaveEvery,
    SaveEveryInBackground,
    SkipNonFinite,
    StopOnSignals,
    read_metrics,
)


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


@ranks(1)
def test_handlers_of_the_script_stay_and_a_second_signal_interrupts(tmp_path):
    """Handlers of the script's own, signals named outright, and a second signal."""
    caught: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    with trainer(False, callbacks=[At(1, send(signal.SIGTERM))]) as running:
        assert (running.fit(steps=2).stopped, list(caught)) == (None, [signal.SIGTERM])
    named = StopOnSignals(signals=[signal.SIGTERM, signal.SIGUSR1], save_to=tmp_path)
    with trainer(False, callbacks=[named, At(1, send(signal.SIGUSR1))]) as running:
        assert (running.fit(steps=2).stopped, running.last_saved[0]) == ("signal SIGUSR1", 1)
        try:
            callbacks = [At(2, send(signal.SIGTERM)), At(2, send(signal.SIGTERM))]
            running.callbacks = (*running.callbacks, *callbacks)
            running.fit(steps=9)
        except KeyboardInterrupt as error:
            twice = (str(error), running.step)
    with trainer(False, callbacks=[StopOnSignals(signals=())]) as running:
        running.callbacks = (*running.callbacks, At(1, send(signal.SIGTERM)))
        assert running.fit(steps=2).stopped is None
    assert len(caught) == 2, "with no signals taken over, the script's own handler is called"
    threads = []
    thread = threading.Thread(target=lambda: threads.append(in_a_thread()))
    thread.start()
    thread.join()
    assert threads == [1], "outside of the main thread a run is just not interruptible"
    assert twice == ("SIGTERM", 2)


@ranks(1)
def test_when_to_stop(tmp_path):
    """Every way to say when to stop, and to save on the way."""
    with trainer(False) as running:  # 22 samples, 8 in a step
        assert running.fit(epochs=1).steps == math.ceil(22 / 8)
        assert running.fit(epochs=2).steps == math.ceil(44 / 8)
        assert running.fit(epochs=9, steps=7).steps == 7
        # A second, so that a run which does not see that it is over ends all the same.
        assert running.fit(steps=3, time_limit=1).steps == 7, "there is nothing left to do"
        assert told(running.fit).startswith("InvalidValueError: fit: nothing says when to stop")
        assert told(lambda: running.fit(time_limit=-1)).startswith(
            "InvalidValueError: fit(time_limit) = -1"
        )
        assert told(lambda: running.fit(steps=1.5)).startswith(
            "InvalidValueError: fit(steps) = 1.5"
        )
    batches = [{"images": torch.zeros(8, 1, 8, 8), "labels": torch.zeros(8).long()}]
    with trainer(False, data=batches) as running:
        assert told(lambda: running.fit(epochs=1)).startswith(
            "DataError: fit(epochs) = 1: RepeatedBatches does not"
        )
    losses = Losses()
    with warnings_of_zerotune() as lines, trainer(False, callbacks=[losses]) as running:
        time_seen = running.fit(time_limit=0.05)
        assert "stopped early: time limit of 0.05 s" in time_seen.render()
        assert time_seen.stopped == "time limit of 0.05 s"
        time_steps, time_warned = running.step, list(lines)
    ask = At(2, lambda running: running.request_stop("the loss is low enough"))
    saving = SaveEvery(minutes=1e-6, root=tmp_path / "minutes", keep=1)
    losses = Losses()
    with trainer(False, callbacks=[ask, saving, losses]) as running:
        assert running.fit(steps=9).stopped == "the loss is low enough"
        assert running.step == 2
        assert running.fit(steps=3).stopped is None, "a request holds for one fit"
    minutes = losses.events
    assert sorted(path.name for path in (tmp_path / "minutes").iterdir()) == ["step-00000003"]
    assert told(lambda: SaveEvery(root=tmp_path)).startswith("InvalidValueError: SaveEvery = ")
    assert time_seen.steps == time_steps >= 1
    (warning,) = time_warned
    assert "nothing was saved; SaveEvery or" in warning
    saves = [event for event in minutes if event.startswith("save")]
    assert saves == ["save step-00000001", "save step-00000002", "save step-00000003"]


@ranks(1)
def test_a_run_that_was_killed_at_its_end_keeps_no_more_than_asked(tmp_path):
    """A run with nothing left to do, in the folder where it was killed between save and prune."""
    root, seen = tmp_path, {}
    for kind in (SaveEvery, SaveEveryInBackground):
        own = root / kind.__name__
        with trainer(False, callbacks=[kind(steps=2, root=own, keep=2)]) as running:
            running.fit(steps=4)
            shutil.copytree(own / "step-00000002", own / "step-00000001")
            for name in ("step-00000003.tmp-00000000000a", "step-00000001.trash-00000000000b"):
                (own / name).mkdir()
                (own / name / "rank-0.safetensors").write_bytes(b"half")
            running.fit(steps=4)
        seen[kind.__name__] = sorted(path.name for path in own.iterdir())
    whole = ["step-00000002", "step-00000004"]
    assert seen == {"SaveEvery": whole, "SaveEveryInBackground": whole}


@ranks(1)
def test_several_averages_in_the_background(tmp_path):
    """Several EMAs in the background, saved in the background, and taken up again."""

    def emas() -> EMAShadows:
        return EMAShadows(shadows={"fast": EMAShadow(decay=0.5), "slow": EMAShadow(decay=0.9)})

    losses = Losses()
    saving = SaveEveryInBackground(steps=2, root=tmp_path, keep=2)
    background = BackgroundEMA(shadow=emas())
    with trainer(False, ema=background, callbacks=[saving, losses]) as running:
        report = running.fit(steps=5)
        labels = torch.tensor([1, 2])
        images = {
            ema: running.sample(labels=labels, steps=2, ema=ema)
            for ema in (True, "fast", "slow", False)
        }
        other = told(lambda: running.sample(count=1, ema="medium"))
        running.export(tmp_path / "slow", weights="slow")
        expected = shadows(running)
        explained = running.explain()
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != "slow")
    with trainer(False, ema=emas()) as running:
        running.resume(tmp_path / "step-00000004")
        rest = running.fit(steps=5).losses
        resumed = shadows(running)
    from diffusers import UNet2DModel

    exported = UNet2DModel.from_pretrained(tmp_path / "slow").state_dict()
    rest_seen = (report.losses[4:], rest)
    shadows_seen = [torch.equal(expected[key], resumed[key]) for key in expected]
    assert rest_seen[0] == rest_seen[1]
    assert len(shadows_seen) > 20
    assert all(shadows_seen)
    assert ({ema: not torch.equal(images[ema], images[False]) for ema in ("fast", "slow")}) == {
        "fast": True,
        "slow": True,
    }
    assert torch.equal(images[True], images["fast"])
    assert "one of trained, fast, slow" in other
    assert all(torch.equal(exported[n[5:]], t) for n, t in expected.items() if n[:4] == "slow")
    # The checkpoint of step 2 is known to be whole when that of step 4 is due.
    saved = [f"save step-0000000{step}" for step in (2, 4, 5)]
    assert losses.events == ["start 0 of 5", *saved, "end"]
    assert names == ["step-00000004", "step-00000005"]
    assert "fast: EMA" in explained
    assert not background.watching, "closing the trainer ends the thread's watch"


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


@ranks(1)
def test_after_several_bad_steps_a_run_goes_back_to_its_newest_checkpoint(tmp_path):
    """Two bad steps in a row: back to the checkpoint before them."""
    found: dict[str, Any] = {}
    root = tmp_path / "checkpoints"
    policy = RollBackNonFinite(root=root, after=2, most=1)
    metrics = MetricsFile(tmp_path / "rolled.jsonl")
    back = WhenBack()
    options = {"non_finite": policy, "callbacks": [metrics, back]}
    # The step after the checkpoint is good, and lost.
    with trainer(False, objective=poisoned({4, 5}), **options) as running:
        running.fit(steps=2)
        running.save(root / "step-00000002")
        saved = {name: full.clone() for name, full in running.engine.master_weights.gather()}
        position = running.stream.position
        running.fit(steps=5)
        found["step"] = running.step
        found["decisions"] = [str(decision) for decision in running.decisions]
        found["position"] = running.stream.position - position
        found["lines"] = [line.step for line in read_metrics(metrics.path)]
        found["weights"] = [torch.equal(saved[name], back.weights[name]) for name in saved]
    root = tmp_path / "poisoned"
    policy = RollBackNonFinite(root=root, most=1)
    callbacks = [Once(3, poison), SaveEvery(steps=1, root=root, keep=2)]
    with trainer(False, non_finite=policy, callbacks=callbacks) as running:
        running.fit(steps=4)
        found["after poison"] = (running.step, policy.rolled_back)
        found["decided"] = str(running.decisions[-1])
        finite = [full.isfinite().all() for _, full in running.engine.master_weights.gather()]
        found["finite"] = all(map(bool, finite))
    found["kept"] = sorted(path.name for path in root.iterdir())
    callbacks = [Once(2, poison), SaveEvery(steps=1, root=tmp_path / "raised")]
    with trainer(False, callbacks=callbacks) as running:
        found["raised"] = told(lambda: running.fit(steps=3))
    root = tmp_path / "skipped"
    callbacks = [Once(2, poison), SaveEvery(steps=1, root=root, keep=1)]
    with trainer(False, callbacks=callbacks, non_finite=SkipNonFinite()) as running:
        found["not skipped"] = told(lambda: running.fit(steps=4))
    found["not skipped kept"] = [path.name for path in root.iterdir()]
    root = tmp_path / "beside"
    policy = RollBackNonFinite(root=root, after=1)
    with trainer(False, objective=poisoned({3}), non_finite=policy) as running:
        running.fit(steps=1)
        good = running.save(root / "step-00000001")
        poison(running)
        running.save(root / "step-00000009", allow_not_finite=True)
        running.roll_back(good, reason="of a test")
        running.fit(steps=3)
        found["past a poisoned one"] = (running.step, str(running.decisions[-1]))
    policy = RollBackNonFinite(root=tmp_path / "x", after=1)
    with trainer(False, objective=poisoned({1, 2}), non_finite=policy) as running:
        found["nothing to go back to"] = told(lambda: running.fit(steps=3))
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
