"""Trace a few steps of a trainer with torch's profiler.

    torchrun examples/recipes/profile_steps.py --output runs/profile

The script trains a small model on noise. To profile your own run, copy the callback.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DModel

import zerotune
from zerotune.training import Callback


class ProfileSteps(Callback):
    """Traces steps after a warm-up, during which caches fill and kernels compile."""

    def __init__(self, folder: Path, *, steps: int = 3, warmup: int = 1) -> None:
        self.folder, self.first, self.last = folder, warmup, warmup + steps
        self.profiler, self.seen = torch.profiler.profile(profile_memory=True), 0

    def on_step_end(self, trainer: Any, metrics: Any) -> None:  # noqa: ARG002
        """Count the step; begin or end the trace."""
        self.seen += 1
        if self.seen == self.first:
            self.profiler.start()
        elif self.seen == self.last:
            self.profiler.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            rank = trainer.engine.group.rank
            self.profiler.export_chrome_trace(str(self.folder / f"trace-rank{rank}.json"))
            print(self.profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=10))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    model = UNet2DModel(
        sample_size=32, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    plan = zerotune.DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="fp32", micro_batch_size=4, optimizer="AdamW", lr=1e-4
    )
    images = zerotune.ImageTensors(images=torch.rand(64, 3, 32, 32) * 2 - 1)
    callbacks = [ProfileSteps(options.output, steps=options.steps - 1)]
    with zerotune.Trainer(model=model, plan=plan, data=images, callbacks=callbacks) as trainer:
        return list(trainer.fit(steps=options.steps).losses)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the trace")
    parser.add_argument("--steps", type=int, default=4, help="total optimizer steps")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
