"""What ranks do of which one is lost, or differs from the others."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from zerotune import DeepSpeedPlan, ImageTensors, Trainer
from zerotune.errors import ZeroTuneError
from zerotune.training import Watchdog
from zerotune.training.watchdog import EXIT_CODE

TIMEOUT_S = 3.0


def small(*, channels: int = 1, count: int = 24, lr: float = 1e-2, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "model": torch.nn.Conv2d(channels, channels, 3, padding=1),
        "plan": DeepSpeedPlan.build(
            stage=0, micro_batch_size=4, optimizer={"type": "AdamW", "params": {"lr": lr}}
        ),
        "data": ImageTensors(images=torch.zeros(count, channels, 4, 4)),
        "objective": lambda engine, batch, _: (engine(batch["images"]) - 1).pow(2).mean(),
        "callbacks": [],
        "deepspeed": False,
        "timeout_s": TIMEOUT_S,
    }
    return Trainer(**(options | changes))


def told(work: Any) -> str:
    try:
        work()
    except ZeroTuneError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differing() -> dict[str, str]:
    """One rank has another model, rate or data."""
    rank = int(os.environ["RANK"])
    found = {
        "model": told(lambda: small(channels=1 + rank)),
        "lr": told(lambda: small(lr=1e-2 * (1 + rank))),
    }
    with small(count=24 + 4 * rank) as trainer:
        found["data"] = told(lambda: trainer.fit(epochs=1))
    return found


def saving_alone(folder: str, saver: int) -> tuple[str, float]:
    """``if trainer.is_main: trainer.save(...)``."""
    trainer = small()
    trainer.fit(steps=1)
    began = time.monotonic()
    if trainer.engine.group.rank != saver:
        time.sleep(2 * TIMEOUT_S)
        return "", 0.0
    error = told(lambda: trainer.save(folder))
    return error, time.monotonic() - began


def losing(folder: str, lost: int, number: int, watched: bool) -> None:
    """A signal that leaves rank ``lost`` no last word, in its second step."""
    rank = int(os.environ["RANK"])
    logging.getLogger("zerotune").addHandler(logging.FileHandler(Path(folder) / f"rank{rank}.log"))
    calls: list[int] = []

    def loss(engine, batch, generator):
        calls.append(1)
        if len(calls) == 2 and rank == lost:
            (Path(folder) / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), number)
        return (engine(batch["images"]) - 1).pow(2).mean()

    def end(message):
        (Path(folder) / "ended").write_text(message)
        put_away(folder)
        os._exit(EXIT_CODE)

    watchdog = Watchdog(timeout_s=1.5, end=end) if watched else False
    timeout_s = 20.0 if watched else TIMEOUT_S
    trainer = small(objective=loss, watchdog=watchdog, timeout_s=timeout_s)
    began = time.monotonic()
    error = told(lambda: trainer.fit(steps=50))
    (Path(folder) / "told").write_text(f"{time.monotonic() - began:.1f} {error}")
    put_away(folder)


def put_away(folder: str) -> None:
    """End the process that was stopped, for which the test would wait."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((Path(folder) / "pid").read_text()), signal.SIGKILL)


KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
