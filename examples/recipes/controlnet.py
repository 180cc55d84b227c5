"""Train a ControlNet for SDXL, SD3, FLUX.1 or Qwen-Image on images and condition images.

    torchrun examples/recipes/controlnet.py --base SDXL --data photos --output runs/edges

photos contains, for each image cat.png, the caption cat.txt and the condition cat.reference.png,
such as the image's edges. With --conditions, condition images are in a separate folder, under the
names of the images. To resume a stopped run, use the same command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zerotune import DeepSpeedPlan, EMAShadow, Trainer, latest_checkpoint
from zerotune.diffusion import encode_dataset, load_pretrained
from zerotune.diffusion.data import AspectBuckets, Augmentation, ImageFolder, PreparedImages
from zerotune.training import SaveEvery, ValidationImages


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = DeepSpeedPlan.build(
        stage=options.stage, offload="cpu", micro_batch_size=options.batch, lr=options.lr
    )
    # The ControlNet starts as a copy of the base model's first blocks; the base model is frozen.
    loaded = load_pretrained(options.base, family="controlnet", plan=plan)
    images = PreparedImages(
        ImageFolder(options.data, reference_folder=options.conditions),
        buckets=AspectBuckets(area=options.area, step=options.bucket_step),
        # Conditions are cropped and mirrored like their images.
        augmentation=Augmentation(flip=0.5, caption_dropout=0.1),
    )
    data = encode_dataset(images, family=loaded.family, folder=options.output / "cache")
    shown = images[0]
    drawing = ValidationImages(
        every=options.every,
        prompts=[shown["captions"]],
        references=shown["reference_images"][None],
        size=tuple(shown["reference_images"].shape[-2:]),
        steps=options.draw_steps,
        folder=options.output / "validation",
    )
    saving = SaveEvery(steps=options.every, root=options.output / "checkpoints", keep=2)
    with Trainer(
        model=loaded, data=data, ema=EMAShadow(decay=0.999), callbacks=[saving, drawing]
    ) as trainer:
        if checkpoint := latest_checkpoint(options.output / "checkpoints"):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        trainer.export(options.output / "controlnet")
    return list(report.losses)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a ControlNet.")
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--data", type=Path, required=True, help="images with captions")
    parser.add_argument("--conditions", type=Path, help="folder of condition images")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=5000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--batch", type=int, default=4, help="micro batch size per GPU")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--area", type=int, default=1024 * 1024, help="maximum pixels per image")
    parser.add_argument("--bucket-step", type=int, default=64, help="divisor of image sides")
    parser.add_argument("--draw-steps", type=int, default=30, help="sampling steps")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
