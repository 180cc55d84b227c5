"""A training script as a user writes it; the signal test starts it under torchrun."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from zerotune import DeepSpeedPlan, ImageTensors, Trainer
from zerotune.training import Callback, SaveEvery


class Slow(Callback):
    """Slows each step down, so that the test can send its signal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step_end(self, trainer, _metrics) -> None:
        rank = trainer.engine.group.rank
        (self._folder / f"pid-{rank}").write_text(str(os.getpid()))
        time.sleep(0.05)


def loss(engine, batch, generator):
    noise = torch.rand(batch["images"].shape, generator=generator)
    return (engine(batch["images"] + noise) - 1).pow(2).mean()


def main(folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images = torch.randn(24, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    plan = DeepSpeedPlan.build(
        stage=0, micro_batch_size=4, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}
    )
    callbacks = [SaveEvery(steps=10**6, root=folder / "checkpoints"), Slow(folder)]
    with Trainer(
        model=torch.nn.Conv2d(1, 1, 3, padding=1),
        plan=plan,
        data=ImageTensors(images=images),
        objective=loss,
        callbacks=callbacks,
        deepspeed=False,
        timeout_s=60,
    ) as trainer:
        report = trainer.fit(steps=steps)
        if trainer.is_main:
            result = {"stopped": report.stopped, "step": trainer.step, "losses": report.losses}
            (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
