"""Functions that the ranks of these tests run, in a module that processes can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zerotune import DeepSpeedPlan, FlowMatchingObjective, Trainer, Unconditional
from zerotune.diffusion.data import (
    AspectBuckets,
    Augmentation,
    ImageFolder,
    PreparedImages,
    sources,
)


def color_unet() -> Any:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )


class Watched:
    """An objective that records the captions and shapes of its batches."""

    def __init__(self) -> None:
        self._objective = FlowMatchingObjective(family=Unconditional())
        self.seen: list[tuple[tuple[str, ...], tuple[int, ...]]] = []

    def __call__(self, engine: Any, batch: Any, generator: torch.Generator) -> Any:
        self.seen.append((tuple(batch["captions"]), tuple(batch["images"].shape[2:])))
        return self._objective(engine, batch, generator)


def pictures(folder: str) -> PreparedImages:
    return PreparedImages(
        ImageFolder(folder),
        buckets=AspectBuckets(area=32 * 32, step=8),
        minimum=2,
        augmentation=Augmentation(flip=0.5),
    )


def train(folder: str, checkpoint: str, resume: bool, steps: int) -> list[Any]:
    """Train, save at the end, and return the captions and sizes that this rank saw."""
    objective = Watched()
    trainer = Trainer(
        model=color_unet(),
        plan=DeepSpeedPlan.build(
            stage=0, precision="fp32", train_batch_size=4, micro_batch_size=2,
            gradient_accumulation_steps=None,
        ),
        data=pictures(folder),
        objective=objective,
        callbacks=[],
        deepspeed=False,
        seed=3,
    )  # fmt: skip
    with trainer:
        if resume:
            trainer.resume(checkpoint)
        trainer.fit(steps=steps)
        if not resume:
            trainer.save(checkpoint)
    return objective.seen


def count_files(log: Path) -> None:
    """Log a line for each file whose size is read in this process."""
    read = sources.image_size

    def counted(file: Any, check: Any) -> Any:
        with log.open("a") as lines:
            lines.write("looked\n")
        return read(file, check)

    sources.image_size = counted


def open_counted(folder: str, log: str) -> list[Any]:
    count_files(Path(log))
    source = ImageFolder(folder)
    return [source.item(index) for index in range(len(source))]
