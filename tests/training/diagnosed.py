"""Rank functions of the tests of diagnoses."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.models import tiny_unet
from tests.training import workers
from zerotune.errors import OutOfMemoryError
from zerotune.training import Watchdog


class Skipping(torch.nn.Module):
    """Four blocks, of which rank 1 skips one from call ``from_call`` on."""

    def __init__(self, from_call: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.calls, self.from_call = 0, from_call

    def forward(self, x):
        self.calls += 1
        skips = self.calls >= self.from_call and os.environ["RANK"] == "1"
        for number, block in enumerate(self.blocks):
            if not (skips and number == 2):
                x = torch.tanh(block(x))
        return x


def repeat(engine: Any, batch: Any, _generator: Any) -> torch.Tensor:
    x = batch["images"].flatten(1)
    return (engine(x) - x).pow(2).mean()


def diverging(folder: str) -> None:
    """Train with rank 1 skipping a block from its third forward pass on."""
    rank = os.environ["RANK"]
    handler = logging.FileHandler(Path(folder) / f"rank{rank}.log")
    logging.getLogger("zerotune").addHandler(handler)
    wanted = workers.plan(3, "none", stage3_param_persistence_threshold=0)
    model = Skipping(from_call=3)
    with workers.trainer(
        model=model, wanted=wanted, objective=repeat, watchdog=Watchdog(timeout_s=3)
    ) as running:
        assert all(parameter.numel() == 0 for parameter in model.parameters()), "partitioned"
        running.fit(steps=20)


def waiting(folder: str) -> None:
    """Let rank 1 sleep before a step in which rank 0 waits: a hang without a failure."""
    rank = os.environ["RANK"]
    handler = logging.FileHandler(Path(folder) / f"rank{rank}.log")
    logging.getLogger("zerotune").addHandler(handler)
    calls = []

    def sleepy(engine, batch, generator):
        calls.append(1)
        if len(calls) == 2 and rank == "1":
            time.sleep(600)
        return workers.regression(engine, batch, generator)

    with workers.trainer(False, objective=sleepy, watchdog=Watchdog(timeout_s=2)) as running:
        running.fit(steps=5)


def slow_but_alive() -> list[float]:
    """Let a rank sample between steps for longer than the timeout, which is no hang."""

    class Busy(workers.Losses):
        def on_step_end(self, trainer, metrics):
            super().on_step_end(trainer, metrics)
            end = time.monotonic() + 3.5
            while trainer.is_main and metrics.step == 1 and time.monotonic() < end:
                sum(range(1000))

    losses = Busy()
    with workers.trainer(False, callbacks=[losses], watchdog=Watchdog(timeout_s=2)) as running:
        running.fit(steps=3)
    return losses.losses


def out_of_memory(kind: str) -> dict[str, Any]:
    """Run out of memory in the second forward pass."""
    calls = []

    def greedy(engine, batch, generator):
        calls.append(1)
        if len(calls) == 2 and kind == "device":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. ...")
        if len(calls) == 2:
            _limit(2**30)
            torch.empty(2**40, dtype=torch.uint8)
        return workers.regression(engine, batch, generator)

    def _limit(spare: int) -> None:
        import resource

        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + spare, resource.RLIM_INFINITY))

    with workers.trainer(False, objective=greedy, model=tiny_unet()) as running:
        try:
            running.fit(steps=3)
        except OutOfMemoryError as error:
            return {
                "message": str(error),
                "cause": type(error.__cause__).__name__,
                "plan": error.plan,
                "step": running.step,
            }
    return {}
