"""Train SDXL on pixel art at 128 x 128.

    torchrun examples/pixel_art.py MODEL SPRITES runs/pixels

A batch of eight images needs no more memory than one image of 1024 x 1024. Images are enlarged
without smoothing. Offset noise lets the model learn flat, dark and bright backgrounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zerotune import DeepSpeedPlan, EMAShadow, Trainer, latest_checkpoint
from zerotune.checkpoint import export_pipeline
from zerotune.diffusion import OffsetNoise, encode_dataset, load_pretrained
from zerotune.diffusion.data import (
    AspectBuckets,
    Augmentation,
    ImageFolder,
    Preparation,
    PreparedImages,
)
from zerotune.training import ProgressBar, SaveEvery, ValidationImages

PLAN = Path(__file__).parent / "plans" / "pixel-art.json"


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = DeepSpeedPlan.from_json(options.plan)
    loaded = load_pretrained(options.model, plan=plan)
    images = PreparedImages(
        ImageFolder(options.sprites),
        buckets=AspectBuckets(area=options.side**2, step=8),
        preparation=Preparation(resampling="nearest"),
        augmentation=Augmentation(flip=0.5, caption_dropout=0.1),
    )
    data = encode_dataset(
        images, family=loaded.family, folder=options.output / "cache", batch_size=32
    )
    checkpoints = options.output / "checkpoints"
    drawing = ValidationImages(
        every=options.every,
        prompts=options.prompts,
        size=(options.side, options.side),
        steps=options.draw_steps,
        guidance_scale=5.0,
        folder=options.output / "validation",
    )
    with Trainer(
        model=loaded.model,
        plan=plan,
        data=data,
        objective=loaded.objective(noise=OffsetNoise(strength=0.05), snr_gamma=5.0),
        ema=EMAShadow(decay=0.999),
        callbacks=[ProgressBar(), SaveEvery(steps=options.every, root=checkpoints), drawing],
    ) as trainer:
        if checkpoint := latest_checkpoint(checkpoints):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        if report.stopped is None:
            export_pipeline(
                options.output / "pipeline",
                engine=trainer.engine,
                base=loaded.folder,
                weights=trainer.ema,
            )
    return list(report.losses)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder or hub id of the pipeline")
    parser.add_argument("sprites", type=Path, help="folder of images with captions")
    parser.add_argument("output", type=Path, help="folder for results")
    parser.add_argument("--plan", default=PLAN, help="DeepSpeed configuration file")
    parser.add_argument("--side", type=int, default=128, help="side of the images in pixels")
    parser.add_argument("--steps", type=int, default=5000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--draw-steps", type=int, default=30, help="sampling steps")
    parser.add_argument("--prompts", nargs="+", default=["pixel art of a knight"])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
