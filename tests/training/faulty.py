"""Rank functions of runs in which a rank is lost, or differs from the others."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.errors import error_of
from zerotune import DeepSpeedPlan, ImageTensors, Trainer, prepare
from zerotune.checkpoint import export_adapters, export_pipeline
from zerotune.training import SaveEvery, SaveEveryInBackground, Watchdog
from zerotune.training.watchdog import EXIT_CODE

TIMEOUT_S = 3.0
ALONE_S = 1.5


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


def needing_all(trainer: Trainer, root: Path) -> dict[str, Any]:
    """Return the operations that all ranks must call together."""
    engine, ema = trainer.engine, trainer.emas.shadows["ema"]
    background = SaveEveryInBackground(steps=1, root=root)
    return {
        "save": lambda: trainer.save(root / "step"),
        "resume": lambda: trainer.resume(root / "there"),
        "roll back": lambda: trainer.roll_back(root / "there", reason="a test"),
        "export": lambda: trainer.export(root / "model"),
        "export a pipeline": lambda: export_pipeline(root / "p", engine=engine, base=root),
        "export adapters": lambda: export_adapters(root / "lora", engine=engine),
        "draw": lambda: trainer.sample(count=1),
        "run on an average": lambda: ema.swapped_in().__enter__(),
        "gather an average": lambda: next(ema.gather()),
        "save in the background": lambda: background.on_stop(trainer, "a test"),
    }


def saving_where_another_does(root: str) -> tuple[str, int]:
    """Return the error of a job whose checkpoint folder may be in use, and its last step."""
    with small(callbacks=[SaveEvery(steps=2, root=root, keep=1)]) as trainer:
        error = error_of(lambda: trainer.fit(steps=2))
        return error, trainer.step


def losing(folder: str, lost: int, number: int, watched: bool) -> None:
    """Train; in its second step, rank ``lost`` gets a signal after which it can report nothing."""
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
        (Path(folder) / f"ended-{rank}").write_text(message)
        others = set(range(int(os.environ["WORLD_SIZE"]))) - {lost}
        # The last rank to end kills the stopped one, as a launcher or scheduler would.
        if all((Path(folder) / f"ended-{other}").exists() for other in others):
            put_away(folder)
        os._exit(EXIT_CODE)

    watchdog = Watchdog(timeout_s=2.5, end=end) if watched else False
    timeout_s = 20.0 if watched else TIMEOUT_S
    trainer = small(objective=loss, watchdog=watchdog, timeout_s=timeout_s)
    began = time.monotonic()
    error = error_of(lambda: trainer.fit(steps=50))
    (Path(folder) / "told").write_text(f"{time.monotonic() - began:.1f} {error}")
    put_away(folder)


def losing_in_a_loop(folder: str, stage: int | None) -> None:
    """Run a custom loop whose rank 1 is killed in its second step."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    engine = prepare(
        model=torch.nn.Conv2d(1, 1, 3, padding=1),
        plan=DeepSpeedPlan.build(
            stage=stage or 0,
            precision="fp32",
            micro_batch_size=4,
            optimizer={"type": "AdamW", "params": {"lr": 1e-2}},
        ),
        deepspeed=stage is not None,
        timeout_s=60.0,
    )

    def loop() -> None:
        for number in range(3):
            if number == 1 and rank == 1:
                (Path(folder) / "pid").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            engine.backward((engine(torch.zeros(4, 1, 4, 4)) - 1).pow(2).mean())
            engine.step()

    (Path(folder) / "told").write_text(error_of(loop))


def put_away(folder: str) -> None:
    """Kill the stopped process; otherwise the test would wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((Path(folder) / "pid").read_text()), signal.SIGKILL)


KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
