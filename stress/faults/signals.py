"""One or two signals at any moment of a run, with and without background saves.

The process always ends soon, in a documented way; every published checkpoint is complete; and a run
resumed from the newest checkpoint has losses bit-identical to those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import attrs
import torch

from stress.faults.campaign import Found
from stress.faults.resuming import batches, loss
from stress.faults.workers import quiet
from tests.support.ranks import _fork_server
from zerotune import DeepSpeedPlan, ImageTensors, Trainer
from zerotune.checkpoint import latest_checkpoint
from zerotune.checkpoint.folders import verify_checkpoint
from zerotune.errors import ZeroTuneError
from zerotune.training import Callback, SaveEvery, SaveEveryInBackground

STEPS = 12
ALLOWED_S = 10.0


@attrs.frozen(kw_only=True)
class Disturbance:
    """Signals to send, after which step, and with which pauses."""

    signals: tuple[int, ...]
    after: int
    pauses: tuple[float, ...]
    background: bool
    slow: float
    """Seconds that each write of a checkpoint takes."""

    @classmethod
    def by_chance(cls, chance: random.Random) -> Disturbance:
        count = chance.choice([1, 2, 2])
        kinds = (signal.SIGINT, signal.SIGTERM)
        return cls(
            signals=tuple(int(chance.choice(kinds)) for _ in range(count)),
            after=chance.randrange(-1, STEPS),
            pauses=tuple(
                chance.choice([0.0, 0.01, 0.05, 0.2]) * chance.random() for _ in range(count)
            ),
            background=bool(chance.randrange(4)),
            slow=chance.choice([0.0, 0.002, 0.02]),
        )


class Telling(Callback):
    """Reports every step through a pipe."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        self._pipe.send((trainer.step, metrics.loss))


def disturbed(root: str, pipe: Any, background: bool, slow: float) -> None:
    """Train to the end from the newest checkpoint, and report how the run ended."""
    quiet()
    if slow:
        slowly(slow)
    saver = SaveEveryInBackground if background else SaveEvery
    torch.manual_seed(0)
    ending = "end"
    try:
        with Trainer(
            model=torch.nn.Conv2d(1, 1, 3, padding=1),
            plan=DeepSpeedPlan.build(
                stage=0, micro_batch_size=4, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}
            ),
            data=ImageTensors(images=torch.cat([each["images"] for each in batches()])),
            objective=loss,
            callbacks=[saver(steps=1, root=root, keep=3), Telling(pipe)],
            deepspeed=False,
        ) as trainer:
            if (newest := latest_checkpoint(root)) is not None:
                trainer.resume(newest)
            pipe.send((-1, 0.0))
            report = trainer.fit(steps=STEPS)
            ending = report.stopped or "end"
    except KeyboardInterrupt:
        ending = "interrupted"
    except ZeroTuneError:
        ending = f"refused: {traceback.format_exc()}"
    except BaseException:  # noqa: BLE001 - what is looked for
        ending = f"foreign: {traceback.format_exc()}"
    # Wait for a checkpoint being written, as an exiting interpreter does.
    import threading

    for thread in threading.enumerate():
        if thread.name == "zerotune-checkpoint":
            while thread.is_alive():
                with contextlib.suppress(KeyboardInterrupt):
                    thread.join(0.05)
    with contextlib.suppress(OSError):
        pipe.send(ending)
    os._exit(0)


def slowly(seconds: float) -> None:
    from zerotune.checkpoint import tensors

    write = tensors.write_at

    def writing(*arguments: Any) -> None:
        time.sleep(seconds)
        write(*arguments)

    tensors.write_at = writing


class Run:
    """A run in its own process."""

    def __init__(self, root: Path, *, background: bool, slow: float) -> None:
        context = _fork_server()
        self._pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=disturbed, args=(str(root), theirs, background, slow), daemon=True
        )
        self.process.start()
        theirs.close()
        self.losses: dict[int, float] = {}
        self.ending = ""
        self._step = -2

    def follow(self, step: int, *, seconds: float) -> None:
        """Return when the step or the run is over."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self._step < step and not self.ending:
                if not self._pipe.poll(max(0, deadline - time.monotonic())):
                    self.process.kill()
                    raise Found("hung", f"nothing after step {self._step} for {seconds:g} s")
                said = self._pipe.recv()
                if isinstance(said, str):
                    self.ending = said
                else:
                    self._step, self.losses[said[0]] = said
        if self._step < step and not self.ending:
            self.process.join(seconds)
            self.ending = f"code {self.process.exitcode}"

    def end(self) -> None:
        self.follow(STEPS + 1, seconds=60 if self.process.is_alive() else 1)
        self.process.join(10)
        self.losses.pop(-1, None)


class Signals:
    """Runs that receive signals, and are then resumed."""

    def __init__(self) -> None:
        self._expected: dict[int, float] = {}

    def inject(self, work: Path, chance: random.Random) -> float:
        if not self._expected:
            alone = Run(work / "alone", background=False, slow=0.0)
            alone.end()
            self._expected = alone.losses
        how = Disturbance.by_chance(chance)
        run = Run(work / "run", background=how.background, slow=how.slow)
        run.follow(how.after, seconds=60)
        began = time.monotonic()
        for number, pause in zip(how.signals, how.pauses, strict=True):
            time.sleep(pause)
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.process.pid or 0, number)
        run.follow(STEPS + 1, seconds=ALLOWED_S)
        seconds = time.monotonic() - began
        run.end()
        self._judge(how, run, work / "run")
        again = Run(work / "run", background=how.background, slow=0.0)
        again.end()
        if again.ending != "end":
            raise Found("foreign", f"{how}: resumed, and then: {again.ending}")
        for step, value in {**again.losses, **run.losses}.items():
            if self._expected[step] != value:
                raise Found("lost", f"{how}: another loss at step {step}")
        return seconds

    def _judge(self, how: Disturbance, run: Run, root: Path) -> None:
        died = [f"code -{number}" for number in how.signals]
        # Outside ``fit``, Python's and the system's own handlers apply.
        expected = ("end", "signal ", "interrupted", *died)
        if not run.ending.startswith(expected):
            raise Found("foreign", f"{how}: {run.ending}")
        for path in root.glob("step-????????"):
            verify_checkpoint(path)
        if len(how.signals) == 1 and run.ending.startswith("signal"):
            reached = max(run.losses, default=0)
            newest = latest_checkpoint(root)
            if newest is None or int(newest.name[5:]) < reached:
                raise Found("lost", f"{how}: stopped after step {reached}, saved {newest}")

    def close(self) -> None:
        """Do nothing: no process is left."""
