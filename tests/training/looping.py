"""What the ranks of the loop tests do."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.support.models import tiny_unet
from tests.training.workers import Losses, dataset, plan, regression, trainer
from zerotune.ema import BackgroundEMA, EMAShadow, EMAShadows
from zerotune.errors import ZeroTuneError
from zerotune.training import (
    Callback,
    MetricsFile,
    RollBackNonFinite,
    SaveEvery,
    SaveEveryInBackground,
    SkipNonFinite,
    StopOnSignals,
    Trackers,
    ValidationImages,
    ValidationLoss,
    read_metrics,
)


class At(Callback):
    """Does something after one step, on one rank or all."""

    def __init__(self, step: int, work: Any, *, rank: int | None = None) -> None:
        self._step, self._work, self._rank = step, work, rank

    def on_step_end(self, trainer, metrics):
        if metrics.step == self._step and self._rank in (None, trainer.engine.group.rank):
            self._work(trainer)


class Once(At):
    """``At`` that does nothing when a run comes there again."""

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


def told(work: Any) -> str:
    try:
        work()
    except ZeroTuneError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextmanager
def warnings_of_zerotune() -> Any:
    """What is logged inside the block."""
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


def interrupted(deepspeed: bool, folder: str, number: int, rank: int | None) -> dict[str, Any]:
    """Six steps without interruption; then two, a signal, and the rest after a resume."""
    # A shell without job control starts background jobs, this one's parents, with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with trainer(deepspeed) as running:
        whole = running.fit(steps=6).losses
    losses = Losses()
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    callbacks = [SaveEvery(steps=100, root=folder), losses, At(2, send(number), rank=rank)]
    with trainer(deepspeed, callbacks=callbacks) as running:
        report = running.fit(steps=6)
        decisions = [str(decision) for decision in running.decisions]
        after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with trainer(deepspeed, seed=99) as running:
        running.resume(Path(folder, "step-00000002"))
        rest = running.fit(steps=6).losses
    return {
        "whole": whole,
        "first": report.losses,
        "stopped": report.stopped,
        "events": losses.events,
        "decisions": decisions,
        "restored": before == after,
        "rest": rest,
    }


def own_handlers(folder: str) -> dict[str, Any]:
    """Handlers of the script's own, signals named outright, and a second signal."""
    caught: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    found: dict[str, Any] = {}
    with trainer(False, callbacks=[At(1, send(signal.SIGTERM))]) as running:
        found["kept"] = (running.fit(steps=2).stopped, list(caught))
    named = StopOnSignals(signals=[signal.SIGTERM, signal.SIGUSR1], save_to=folder)
    with trainer(False, callbacks=[named, At(1, send(signal.SIGUSR1))]) as running:
        found["named"] = (running.fit(steps=2).stopped, running.last_saved[0])
        try:
            callbacks = [At(2, send(signal.SIGTERM)), At(2, send(signal.SIGTERM))]
            running.callbacks = (*running.callbacks, *callbacks)
            running.fit(steps=9)
        except KeyboardInterrupt as error:
            found["twice"] = (str(error), running.step)
    with trainer(False, callbacks=[StopOnSignals(signals=())]) as running:
        running.callbacks = (*running.callbacks, At(1, send(signal.SIGTERM)))
        found["off"] = running.fit(steps=2).stopped
    found["caught"] = len(caught)
    threads = []
    thread = threading.Thread(target=lambda: threads.append(in_a_thread()))
    thread.start()
    thread.join()
    found["thread"] = threads
    return found


def in_a_thread() -> int:
    with trainer(False) as running:
        return running.fit(steps=1).steps


def goals(folder: str) -> dict[str, Any]:
    """Every way to say when to stop, and to save on the way."""
    found: dict[str, Any] = {}
    with trainer(False) as running:  # 22 samples, 8 in a step
        found["one epoch"] = running.fit(epochs=1).steps
        found["two epochs"] = running.fit(epochs=2).steps
        found["earliest"] = running.fit(epochs=9, steps=7).steps
        # A second, so that a run which does not see that it is over ends all the same.
        found["fewer"] = running.fit(steps=3, time_limit=1).steps
        found["nothing"] = told(running.fit)
        found["negative"] = told(lambda: running.fit(time_limit=-1))
        found["half a step"] = told(lambda: running.fit(steps=1.5))
    batches = [{"images": torch.zeros(8, 1, 8, 8), "labels": torch.zeros(8).long()}]
    with trainer(False, data=batches) as running:
        found["no length"] = told(lambda: running.fit(epochs=1))
    losses = Losses()
    with warnings_of_zerotune() as lines, trainer(False, callbacks=[losses]) as running:
        found["time"] = running.fit(time_limit=0.05)
        found["time steps"], found["time warned"] = running.step, list(lines)
    ask = At(2, lambda running: running.request_stop("the loss is low enough"))
    saving = SaveEvery(minutes=1e-6, root=Path(folder, "minutes"), keep=1)
    losses = Losses()
    with trainer(False, callbacks=[ask, saving, losses]) as running:
        found["asked"] = running.fit(steps=9).stopped
        found["asked step"] = running.step
        found["asked again"] = running.fit(steps=3).stopped
    found["minutes"] = losses.events
    found["kept"] = sorted(path.name for path in Path(folder, "minutes").iterdir())
    found["no interval"] = told(lambda: SaveEvery(root=folder))
    return found


def averaged(folder: str) -> dict[str, Any]:
    """Several EMAs in the background, saved in the background, and taken up again."""

    def emas() -> EMAShadows:
        return EMAShadows(shadows={"fast": EMAShadow(decay=0.5), "slow": EMAShadow(decay=0.9)})

    losses = Losses()
    saving = SaveEveryInBackground(steps=2, root=folder, keep=2)
    background = BackgroundEMA(shadow=emas())
    with trainer(False, ema=background, callbacks=[saving, losses]) as running:
        report = running.fit(steps=5)
        labels = torch.tensor([1, 2])
        images = {
            ema: running.sample(labels=labels, steps=2, ema=ema)
            for ema in (True, "fast", "slow", False)
        }
        other = told(lambda: running.sample(count=1, ema="medium"))
        running.export(Path(folder, "slow"), weights="slow")
        expected = shadows(running)
        explained = running.explain()
    names = sorted(path.name for path in Path(folder).iterdir() if path.name != "slow")
    with trainer(False, ema=emas()) as running:
        running.resume(Path(folder, "step-00000004"))
        rest = running.fit(steps=5).losses
        resumed = shadows(running)
    from diffusers import UNet2DModel

    exported = UNet2DModel.from_pretrained(Path(folder, "slow")).state_dict()
    return {
        "rest": (report.losses[4:], rest),
        "shadows": [torch.equal(expected[key], resumed[key]) for key in expected],
        "differ": {ema: not torch.equal(images[ema], images[False]) for ema in ("fast", "slow")},
        "first": torch.equal(images[True], images["fast"]),
        "other": other,
        "exported": all(
            torch.equal(exported[n[5:]], t) for n, t in expected.items() if n[:4] == "slow"
        ),
        "events": losses.events,
        "names": names,
        "explained": explained,
        "watching": background.watching,
    }


def shadows(running: Any) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": full.clone()
        for name, shadow in running.averages.shadows.items()
        for key, full in shadow.gather()
    }


def poisoned(at: set[int], *, gradient: bool = False) -> Any:
    """A loss that is not finite in these calls, on the last rank; or only its gradient."""
    calls: list[int] = []

    def objective(engine, batch, generator):
        calls.append(1)
        loss = regression(engine, batch, generator)
        last = engine.group.rank == engine.group.world_size - 1
        if len(calls) not in at or not last:
            return loss
        if gradient:
            # Finite itself: 0 * sqrt(0) has an infinite derivative.
            return loss + (loss - loss.detach()).abs().sqrt() * 1e30
        return loss * float("nan")

    return objective


def skipped(folder: str) -> dict[str, Any]:
    """Policies of a run whose third and fourth steps are bad on the last rank."""
    found: dict[str, Any] = {}
    policy = SkipNonFinite(most_in_a_row=2)
    metrics = MetricsFile(Path(folder, "metrics.jsonl"))
    with warnings_of_zerotune() as lines:
        with trainer(
            False,
            objective=poisoned({3, 4}),
            non_finite=policy,
            callbacks=[metrics],
            ema=EMAShadow(decay=0.5),
        ) as running:
            found["losses"] = running.fit(steps=6).losses
            found["skipped"] = (policy.skipped, running.engine.state.skipped_steps)
            found["ema steps"] = running.ema.steps
        found["lines"] = list(lines)
    if running.is_main:
        found["applied"] = [line.applied for line in read_metrics(metrics.path)]
    with trainer(False, objective=poisoned({1, 2, 3}), non_finite=policy) as running:
        found["too many"] = told(lambda: running.fit(steps=6))
    with trainer(False, objective=poisoned({2}, gradient=True)) as running:
        found["gradient"] = told(lambda: running.fit(steps=3))
        found["gradient step"] = running.engine.state.skipped_steps
    with trainer(
        False, objective=poisoned({2}, gradient=True), non_finite=SkipNonFinite()
    ) as running:
        found["gradient skipped"] = running.fit(steps=3).steps
    return found


def rolled_back(folder: str) -> dict[str, Any]:
    """Two bad steps in a row: back to the checkpoint before them."""
    found: dict[str, Any] = {}
    root = Path(folder, "checkpoints")
    policy = RollBackNonFinite(root=root, after=2, most=1)
    metrics = MetricsFile(Path(folder, "rolled.jsonl"))
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
    root = Path(folder, "poisoned")
    policy = RollBackNonFinite(root=root, most=1)
    callbacks = [Once(3, poison), SaveEvery(steps=1, root=root, keep=2)]
    with trainer(False, non_finite=policy, callbacks=callbacks) as running:
        running.fit(steps=4)
        found["after poison"] = (running.step, policy.rolled_back)
        found["decided"] = str(running.decisions[-1])
        finite = [full.isfinite().all() for _, full in running.engine.master_weights.gather()]
        found["finite"] = all(map(bool, finite))
    found["kept"] = sorted(path.name for path in root.iterdir())
    callbacks = [Once(2, poison), SaveEvery(steps=1, root=Path(folder, "raised"))]
    with trainer(False, callbacks=callbacks) as running:
        found["raised"] = told(lambda: running.fit(steps=3))
    root = Path(folder, "skipped")
    callbacks = [Once(2, poison), SaveEvery(steps=1, root=root, keep=1)]
    with trainer(False, callbacks=callbacks, non_finite=SkipNonFinite()) as running:
        found["not skipped"] = told(lambda: running.fit(steps=4))
    found["not skipped kept"] = [path.name for path in root.iterdir()]
    root = Path(folder, "beside")
    policy = RollBackNonFinite(root=root, after=1)
    with trainer(False, objective=poisoned({3}), non_finite=policy) as running:
        running.fit(steps=1)
        good = running.save(root / "step-00000001")
        poison(running)
        running.save(root / "step-00000009", allow_not_finite=True)
        running.roll_back(good, reason="of a test")
        running.fit(steps=3)
        found["past a poisoned one"] = (running.step, str(running.decisions[-1]))
    policy = RollBackNonFinite(root=Path(folder, "x"), after=1)
    with trainer(False, objective=poisoned({1, 2}), non_finite=policy) as running:
        found["nothing to go back to"] = told(lambda: running.fit(steps=3))
    return found


class WhenBack(Callback):
    """Keeps the weights at the moment of going back."""

    def on_resume(self, trainer, _path):
        self.weights = {n: full.clone() for n, full in trainer.engine.master_weights.gather()}


def tracked(folder: str) -> dict[str, Any]:
    """Trackers of a run; rank 0 alone writes."""
    held = ValidationLoss(every=2, data=dataset(20), batches=2)
    tracker = Trackers("tensorboard", folder=Path(folder, "runs"), project="digits")
    with trainer(False, callbacks=[tracker, held]) as running:
        running.fit(steps=2)
        losses = running.fit(steps=4).losses
        running.show("drawn", torch.linspace(-1, 1, 2 * 3 * 4 * 4).view(2, 3, 4, 4))
    messages = {
        "unknown": told(lambda: with_tracker("tensorbored")),
        "missing": told(lambda: with_tracker("clearml")),
        "none": told(Trackers),
    }
    with warnings_of_zerotune() as lines:
        failing = with_tracker(Failing())
    return {
        "losses": losses,
        "history": held.history,
        "messages": messages,
        "failing": (failing, list(lines)),
    }


def with_tracker(tracker: Any) -> int:
    with trainer(False, callbacks=[Trackers(tracker)]) as running:
        return running.fit(steps=2).steps


class Failing:
    """A tracker of somebody's own, whose service is down."""

    name = "mine"

    def start(self):
        pass

    def store_init_configuration(self, _values):
        raise ConnectionError("no route to host")


def validated(folder: str) -> dict[str, Any]:
    """At stage 3: the same losses with images and held-out losses on the way as without."""
    wanted = plan(stage=3, offload="none", stage3_param_persistence_threshold=0)
    ema = EMAShadow(decay=0.5)
    with trainer(True, wanted, ema=EMAShadow(decay=0.5), model=tiny_unet()) as running:
        alone = running.fit(steps=4).losses
        sizes = {parameter.numel() for parameter in running.engine.module.parameters()}
    labels = torch.tensor([3, 1, 4])
    drawn = Drawn()
    callbacks = [
        ValidationImages(every=2, folder=Path(folder, "images"), labels=labels, steps=2),
        ValidationLoss(every=3, data=dataset(10), batches=2, ema=True),
        drawn,
    ]
    with trainer(True, wanted, ema=ema, callbacks=callbacks) as running:
        watched = running.fit(steps=4).losses
        failing = ValidationImages(every=1, folder=Path(folder, "taken"), labels=labels, steps=1)
        running.callbacks = (failing,)
        if running.is_main:
            Path(folder, "taken").write_text("a file where the folder should be")
        disk = told(lambda: running.fit(steps=5))
    return {
        "alone": alone,
        "watched": watched,
        "sizes": sizes,
        "images": drawn.images,
        "values": drawn.values,
        "disk": disk,
    }


class Drawn(Callback):
    def __init__(self) -> None:
        self.images: list[tuple[int, Any]] = []
        self.values: list[tuple[int, dict[str, float]]] = []

    def on_images(self, trainer, _name, images):
        self.images.append((trainer.step, images.numpy()))

    def on_values(self, trainer, values):
        self.values.append((trainer.step, dict(values)))


def over_after_kills(folder: str) -> dict[str, list[str]]:
    """A run with nothing left to do, in the folder where it was killed between save and prune."""
    root, seen = Path(folder), {}
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
    return seen
