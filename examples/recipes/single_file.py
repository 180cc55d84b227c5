"""Train all weights of a model that comes in one file, and write one file again.

    torchrun examples/recipes/single_file.py --base sd_xl_base_1.0.safetensors \
        --config SDXL --data photos --output runs/one

The file is one of ComfyUI's or of the model's first publication. --config is the folder or hub id
of a pipeline with the same sizes; it is asked for on the hub when not given. The same command goes
on after a stop, and runs/one/model.safetensors takes the place of that of an earlier run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import zerotune
from zerotune import AspectBuckets, ImageFolder, PreparedImages
from zerotune.diffusion.data import Augmentation


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = zerotune.DeepSpeedPlan.build(
        stage=options.stage, offload="cpu", precision="bf16", micro_batch_size=options.batch,
        optimizer="AdamW", lr=options.lr,
    )  # fmt: skip
    # The weights wait in the file: the engine reads them, each rank its own part at stage 3.
    loaded = zerotune.load_pretrained(options.base, config=options.config, plan=plan)
    images = PreparedImages(
        ImageFolder(options.data),
        buckets=AspectBuckets(area=options.area, step=options.bucket_step),
        augmentation=Augmentation(caption_dropout=0.1),
    )
    cache = options.output / "cache"
    data = zerotune.encode_dataset(images, family=loaded.family, folder=cache)
    checkpoints = options.output / "checkpoints"
    saving = zerotune.SaveEvery(steps=options.every, root=checkpoints, keep=2)
    with zerotune.Trainer(model=loaded, data=data, ema=0.999, callbacks=[saving]) as trainer:
        if checkpoint := zerotune.latest_checkpoint(checkpoints):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        # The EMA's weights under the names of the file that was given, with its other tensors.
        trainer.export(options.output / "model.safetensors", dtype=options.dtype)
    return list(report.losses)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model in one file.")
    parser.add_argument("--base", required=True, help="a .safetensors file")
    parser.add_argument("--config", help="folder or hub id of a pipeline of the same sizes")
    parser.add_argument("--data", type=Path, required=True, help="images with captions")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--dtype", default="fp16", help="of the trained weights in the file")
    parser.add_argument("--area", type=int, default=1024 * 1024, help="most pixels of an image")
    parser.add_argument("--bucket-step", type=int, default=64)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
