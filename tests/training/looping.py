"""What the ranks of the loop tests do."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.support.models import tiny_unet
from tests.training.workers import Losses, dataset, plan, regression, trainer
from zerotune.ema import EMAShadow
from zerotune.errors import ZeroTuneError
from zerotune.training import (
    Callback,
    MetricsFile,
    SaveEvery,
    SkipNonFinite,
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


def in_a_thread() -> int:
    with trainer(False) as running:
        return running.fit(steps=1).steps


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
