"""How runs end, skip bad steps, keep EMAs, track and validate."""

from __future__ import annotations

import io
import logging
import math
import os
import shutil
import signal
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

from tests.support.errors import error_of
from tests.support.ranks import ranks
from tests.support.sampling import nightly
from tests.training.workers import Losses, dataset, plan, regression, trainer
from zerotune.ema import EMAShadow, EMAShadows
from zerotune.training import (
    Callback,
    MetricsFile,
    ProgressBar,
    RollBackNonFinite,
    SaveEvery,
    SaveEveryInBackground,
    SkipNonFinite,
    StopOnSignals,
    Trackers,
    ValidationImages,
    ValidationLoss,
)
from zerotune.training.events import read_metrics


class At(Callback):
    """Call a function after one step, on one rank or all."""

    def __init__(self, step: int, work: Any, *, rank: int | None = None) -> None:
        self._step, self._work, self._rank = step, work, rank

    def on_step_end(self, trainer, metrics):
        if metrics.step == self._step and self._rank in (None, trainer.engine.group.rank):
            self._work(trainer)


class Once(At):
    """``At`` that acts only once, also if a run repeats the step."""

    def on_step_end(self, trainer, metrics):
        super().on_step_end(trainer, metrics)
        if metrics.step == self._step:
            self._step = -1


def poison(trainer: Any) -> None:
    """Make one weight NaN."""
    with trainer.engine.master_weights.editing() as fragments:
        for number, fragment in enumerate(fragments):
            if number == 0:
                fragment.value[0] = float("nan")


def send(number: int) -> Any:
    return lambda _: os.kill(os.getpid(), number)


@contextmanager
def warnings_of_zerotune() -> Any:
    """Record the messages logged inside the block."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Lines(logging.WARNING)
    logging.getLogger("zerotune").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("zerotune").removeHandler(handler)


def in_a_thread() -> int:
    with trainer(False) as running:
        return running.fit(steps=1).steps


def shadows(running: Any) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": full.clone()
        for name, shadow in running.emas.shadows.items()
        for key, full in shadow.gather()
    }


def poisoned(at: set[int], *, gradient: bool = False) -> Any:
    """Return an objective whose loss or gradient is not finite in these calls on the last rank."""
    calls: list[int] = []

    def objective(engine, batch, generator):
        calls.append(1)
        loss = regression(engine, batch, generator)
        last = engine.group.rank == engine.group.world_size - 1
        if len(calls) not in at or not last:
            return loss
        if gradient:
            # The loss stays finite, but sqrt(0) has an infinite derivative.
            return loss + (loss - loss.detach()).abs().sqrt() * 1e30
        return loss * float("nan")

    return objective


class WhenBack(Callback):
    """Record the weights at the moment of rolling back."""

    def on_resume(self, trainer, _path):
        self.weights = {n: full.clone() for n, full in trainer.engine.master_weights.gather()}


@pytest.mark.parametrize(
    ("world_size", "number", "rank"),
    [*nightly((1, signal.SIGINT, None)), (2, signal.SIGTERM, 1)],
)
@ranks()
def test_a_signal_to_one_rank_ends_all_after_the_same_step(world_size, number, rank, tmp_path):
    # A shell without job control ignores SIGINT in background jobs, and so in this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with trainer(False) as running:
        whole = running.fit(steps=6).losses
    losses = Losses()
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    callbacks = [SaveEvery(steps=100, root=tmp_path), losses, At(2, send(number), rank=rank)]
    with trainer(False, callbacks=callbacks) as running:
        report = running.fit(steps=6)
        assert str(running.decisions[-1]).startswith("fit.last_step: 6 -> 2 (stopped early: signal")
        assert before == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    where = "" if rank is None else f" on rank {rank}"
    assert report.stopped == f"signal {signal.Signals(number).name}{where}"
    assert report.losses == whole[:2]
    assert losses.events == ["start 0 of 6", "save step-00000002", "end"]
    text = io.StringIO()
    shown = ProgressBar(console=Console(file=text, soft_wrap=True))
    with trainer(False, seed=99, callbacks=[shown]) as running:
        running.resume(tmp_path / "step-00000002")
        (said,) = [str(each) for each in running.decisions if each.key == "step"]
        assert said.endswith(f"continues from {tmp_path / 'step-00000002'})")
        assert said.startswith("step: 0 -> 2 (after 0.73 epochs; ")
        assert running.fit(steps=6).losses == whole[2:], "resumed bit for bit"
        assert text.getvalue().startswith(said if running.is_main else "")


def clean_environment() -> dict[str, str]:
    hidden = ("RANK", "WORLD", "MASTER", "ACCELERATE", "DS_", "LOCAL")
    return {k: v for k, v in os.environ.items() if not k.startswith(hidden)} | {
        "OMP_NUM_THREADS": "1"
    }


@ranks(1)
def test_script_handlers_are_restored_and_a_second_signal_interrupts(tmp_path):
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
def test_fit_stops_at_its_epochs_steps_or_time_limit(tmp_path):
    with trainer(False) as running:  # 22 samples, 8 in a step
        assert running.fit(epochs=1).steps == math.ceil(22 / 8)
        assert running.fit(epochs=2).steps == math.ceil(44 / 8)
        assert running.fit(epochs=9, steps=7).steps == 7
        # The limit is one second, in case the run does not notice its end.
        assert running.fit(steps=3, time_limit=1).steps == 7, "there is nothing left to do"
        assert error_of(running.fit).startswith("InvalidValueError: fit: no limit is given")
        assert error_of(lambda: running.fit(time_limit=-1)).startswith(
            "InvalidValueError: fit(time_limit) = -1"
        )
        assert error_of(lambda: running.fit(steps=1.5)).startswith(
            "InvalidValueError: fit(steps) = 1.5"
        )
    batches = [{"images": torch.zeros(8, 1, 8, 8), "labels": torch.zeros(8).long()}]
    with trainer(False, data=batches) as running:
        assert error_of(lambda: running.fit(epochs=1)).startswith(
            "DataError: fit(epochs) = 1: RepeatedBatches has no epoch length"
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
    assert error_of(lambda: SaveEvery(root=tmp_path)).startswith("InvalidValueError: SaveEvery = ")
    assert time_seen.steps == time_steps >= 1
    (warning,) = time_warned
    assert "no checkpoint was saved; add SaveEvery or" in warning
    saves = [event for event in minutes if event.startswith("save")]
    assert saves == ["save step-00000001", "save step-00000002", "save step-00000003"]


@ranks(1)
def test_a_run_killed_while_saving_keeps_no_more_checkpoints_than_requested(tmp_path):
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
def test_several_emas_are_updated_saved_and_resumed(tmp_path):
    def emas() -> EMAShadows:
        return EMAShadows(shadows={"fast": EMAShadow(decay=0.5), "slow": EMAShadow(decay=0.9)})

    losses = Losses()
    saving = SaveEveryInBackground(steps=2, root=tmp_path, keep=2)
    with trainer(False, ema=emas(), callbacks=[saving, losses]) as running:
        report = running.fit(steps=5)
        labels = torch.tensor([1, 2])
        images = {
            ema: running.sample(labels=labels, steps=2, ema=ema)
            for ema in (True, "fast", "slow", False)
        }
        other = error_of(lambda: running.sample(count=1, ema="medium"))
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
    assert "one of: trained, fast, slow" in other
    assert all(torch.equal(exported[n[5:]], t) for n, t in expected.items() if n[:4] == "slow")
    # The checkpoint of step 2 is complete before step 4 is saved.
    saved = [f"save step-0000000{step}" for step in (2, 4, 5)]
    assert losses.events == ["start 0 of 5", *saved, "end"]
    assert names == ["step-00000004", "step-00000005"]
    assert "fast: EMA" in explained


@ranks(2)
def test_non_finite_steps_are_dropped_on_all_ranks(tmp_path):
    policy = SkipNonFinite(most_in_a_row=2)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    with (
        warnings_of_zerotune() as lines,
        trainer(
            False,
            objective=poisoned({3, 4}),
            non_finite=policy,
            callbacks=[metrics],
            ema=EMAShadow(decay=0.5),
        ) as running,
    ):
        losses = running.fit(steps=6).losses
        assert [math.isfinite(loss) for loss in losses] == [1, 1, 0, 0, 1, 1]
        assert policy.skipped == running.engine.state.skipped_steps == 2
        assert running.ema.steps == 4
    steps = [line.split(" on rank")[0][-6:] for line in lines if "skipped" in line]
    assert steps == (["step 3", "step 4"] if running.is_main else [])
    if running.is_main:
        applied = [line.applied for line in read_metrics(metrics.path)]
        assert applied == [True, True, False, False, True, True]
    with trainer(False, objective=poisoned({1, 2, 3}), non_finite=policy) as running:
        message = error_of(lambda: running.fit(steps=6))
        assert "at step 3 on rank(s) 1" in message
        assert "number 3 in a row" in message
    with trainer(False, objective=poisoned({2}, gradient=True)) as running:
        message = error_of(lambda: running.fit(steps=3))
        assert message.startswith("TrainingError: gradient norm = ")
        assert "not finite at step 2" in message
        assert "the weights are unchanged" in message
        assert running.engine.state.skipped_steps == 1
    with trainer(
        False, objective=poisoned({2}, gradient=True), non_finite=SkipNonFinite()
    ) as running:
        assert running.fit(steps=3).steps == 3


@ranks(1)
def test_after_several_bad_steps_a_run_rolls_back_to_its_newest_checkpoint(tmp_path):
    root = tmp_path / "checkpoints"
    metrics = MetricsFile(tmp_path / "rolled.jsonl")
    back = WhenBack()
    policy = RollBackNonFinite(root=root, after=2, most=1)
    options = {"non_finite": policy, "callbacks": [metrics, back]}
    # The step after the checkpoint is good but is rolled back too.
    with trainer(False, objective=poisoned({4, 5}), **options) as running:
        running.fit(steps=2)
        running.save(root / "step-00000002")
        saved = {name: full.clone() for name, full in running.engine.master_weights.gather()}
        position = running.stream.position
        running.fit(steps=5)
        assert running.step == 5
        assert str(running.decisions[-1]).startswith(
            "step: 5 -> 2 (not finite at step 5 on rank(s) 0; the weights are unchanged"
        )
        assert running.stream.position - position == (1 + 2 + 3) * 8, "data go on where they are"
        assert [line.step for line in read_metrics(metrics.path)] == [1, 2, 3, 4, 5]
    assert saved
    assert all(torch.equal(saved[name], back.weights[name]) for name in saved)


@ranks(1)
def test_non_finite_checkpoints_are_neither_saved_nor_rolled_back_to(tmp_path):
    root = tmp_path / "poisoned"
    policy = RollBackNonFinite(root=root, most=1)
    callbacks = [Once(3, poison), SaveEvery(steps=1, root=root, keep=2)]
    with trainer(False, non_finite=policy, callbacks=callbacks) as running:
        running.fit(steps=4)
        assert (running.step, policy.rolled_back) == (4, 1)
        assert str(running.decisions[-1]).startswith("step: 3 -> 2 (not finite at step 3")
        assert all(full.isfinite().all() for _, full in running.engine.master_weights.gather())
    assert sorted(path.name for path in root.iterdir()) == ["step-00000003", "step-00000004"]
    root = tmp_path / "skipped"
    for name, non_finite in (("raised", None), ("skipped", SkipNonFinite())):
        callbacks = [Once(2, poison), SaveEvery(steps=1, root=tmp_path / name, keep=1)]
        with trainer(False, callbacks=callbacks, non_finite=non_finite) as running:
            message = error_of(lambda: running.fit(steps=3))
        assert message.startswith("TrainingError: weights = nan: not finite at step 2")
        assert "the weights already contain the update" in message
    assert [path.name for path in root.iterdir()] == ["step-00000001"], "no good one went"
    root = tmp_path / "beside"
    policy = RollBackNonFinite(root=root, after=1)
    with trainer(False, objective=poisoned({3}), non_finite=policy) as running:
        running.fit(steps=1)
        good = running.save(root / "step-00000001")
        poison(running)
        running.save(root / "step-00000009", allow_not_finite=True)
        running.roll_back(good, reason="of a test")
        running.fit(steps=3)
        assert running.step == 3
        assert str(running.decisions[-1]).startswith("step: 3 -> 1 (not finite at step 3")
    policy = RollBackNonFinite(root=tmp_path / "x", after=1)
    with trainer(False, objective=poisoned({1, 2}), non_finite=policy) as running:
        message = error_of(lambda: running.fit(steps=3))
        assert "contains no finite checkpoint" in message


@ranks(2)
def test_trackers_get_all_metrics_and_images_from_one_rank(tmp_path):
    held = ValidationLoss(every=2, data=dataset(20), batches=2)
    tracker = Trackers("tensorboard", folder=tmp_path / "runs", project="digits")
    with trainer(False, callbacks=[tracker, held]) as running:
        running.fit(steps=2)
        losses = running.fit(steps=4).losses
        running.show("drawn", torch.linspace(-1, 1, 2 * 3 * 4 * 4).view(2, 3, 4, 4))
    assert "accelerate has no tracker" in error_of(lambda: with_tracker("tensorbored"))
    assert "pip install clearml" in error_of(lambda: with_tracker("clearml"))
    assert "needs at least one tracker" in error_of(Trackers)
    with warnings_of_zerotune() as lines:
        assert with_tracker(Failing()) == 2, "training goes on"
    if running.is_main:
        (warning,) = lines
        assert warning.startswith("mine failed and is disabled for the rest of the run (Conn")
        check_tensorboard(tmp_path / "runs" / "digits", losses, held.history)


def check_tensorboard(folder, losses, history):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    files = [path for path in folder.iterdir() if path.is_file()]
    assert len(files) == 1, "one run of two fits, on one rank"
    tracked = {event.step: event.value for event in events.Scalars("train/loss")}
    assert tracked == pytest.approx(dict(enumerate(losses, start=1)))
    held = {event.step: event.value for event in events.Scalars("validation/loss")}
    assert held == pytest.approx(dict(history))
    assert set(held) == {0, 2, 4}
    for name in ("train/lr", "train/grad_norm", "speed/samples_per_second", "time/forward"):
        assert len(events.Scalars(name)) == 4
    assert events.Scalars("memory/host_peak_gib")[0].value > 0.05
    text = events.Tensors("run/plan/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "optimizer.type = 'AdamW', " in text
    (image,) = events.Images("drawn")
    assert (image.width, image.height) == (8, 4), "two of them, side by side"


def with_tracker(tracker: Any) -> int:
    with trainer(False, callbacks=[Trackers(tracker)]) as running:
        return running.fit(steps=2).steps


class Failing:
    """A custom tracker whose service is down."""

    name = "mine"

    def start(self):
        pass

    def store_init_configuration(self, _values):
        raise ConnectionError("no route to host")


@pytest.mark.deepspeed
@ranks(2)
def test_validation_at_stage_3_does_not_change_training(tmp_path):
    wanted = plan(stage=3, offload="none", stage3_param_persistence_threshold=0)
    with trainer(True, wanted, ema=EMAShadow(decay=0.5)) as running:
        alone = running.fit(steps=4).losses
        sizes = {parameter.numel() for parameter in running.engine.module.parameters()}
        assert sizes == {0}, "parameters are partitioned"
    labels = torch.tensor([3, 1, 4])
    drawn = Drawn()
    callbacks = [
        ValidationImages(every=2, folder=tmp_path / "images", labels=labels, steps=2),
        ValidationLoss(every=3, data=dataset(10), batches=2, ema=True),
        drawn,
    ]
    with trainer(True, wanted, ema=EMAShadow(decay=0.5), callbacks=callbacks) as running:
        assert running.fit(steps=4).losses == alone, "bit for bit"
        taken = tmp_path / "taken"
        running.callbacks = (ValidationImages(every=1, folder=taken, labels=labels, steps=1),)
        if running.is_main:
            taken.write_text("a file where the folder should be")
        message = error_of(lambda: running.fit(steps=5))
        assert "taken" in message, "a full disk of rank 0 is an error on every rank"
    assert [step for step, _ in drawn.images] == [0, 2, 4]
    first, second, third = (images for _, images in drawn.images)
    assert first.shape == second.shape == third.shape == (3, 1, 8, 8)
    assert torch.equal(first, second), "the warm-up begins with a learning rate of 0"
    assert not torch.equal(first, third)
    assert [step for step, _ in drawn.values] == [0, 3, 4]
    assert len({values["validation/loss"] for _, values in drawn.values}) == 3
    assert "validation/loss/0.1" in drawn.values[0][1]
    names = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert names == ["step-00000000.png", "step-00000002.png", "step-00000004.png"]
    with Image.open(tmp_path / "images" / names[2]) as grid:
        assert grid.size == (4 + 2 * 12, 4 + 2 * 12)


class Drawn(Callback):
    def __init__(self) -> None:
        self.images: list[tuple[int, torch.Tensor]] = []
        self.values: list[tuple[int, dict[str, float]]] = []

    def on_images(self, trainer, _name, images):
        self.images.append((trainer.step, images))

    def on_values(self, trainer, values):
        self.values.append((trainer.step, dict(values)))
