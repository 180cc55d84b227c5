"""Train all weights of a model from a single file, and export a single file.

    torchrun examples/recipes/single_file.py --base sd_xl_base_1.0.safetensors \
        --config SDXL --data photos --output runs/one

The file has ComfyUI's layout or the layout of the model's first publication. --config is the
folder or hub id of a pipeline with the same model; by default, diffusers infers the hub id. To
resume a stopped run, use the same command. The export replaces runs/one/model.safetensors.
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
    # The engine reads the weights from the file; at stage 3, each rank reads only its part.
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
        # EMA weights with the names of the base file, plus the file's remaining tensors.
        trainer.export(options.output / "model.safetensors", dtype=options.dtype)
    return list(report.losses)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model that is stored in one file.")
    parser.add_argument("--base", required=True, help=".safetensors file")
    parser.add_argument("--config", help="folder or hub id of a pipeline with the same model")
    parser.add_argument("--data", type=Path, required=True, help="images with captions")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=2000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--batch", type=int, default=4, help="micro batch size per GPU")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--dtype", default="fp16", help="dtype of trained weights in the export")
    parser.add_argument("--area", type=int, default=1024 * 1024, help="maximum pixels per image")
    parser.add_argument("--bucket-step", type=int, default=64, help="divisor of image sides")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
