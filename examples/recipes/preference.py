"""Train adapters for SDXL, SD3, FLUX.1, … on pairs of a preferred and a rejected image.

    torchrun examples/recipes/preference.py --base SDXL --data pairs --output runs/dpo --steps 2000

pairs/preferred contains images with captions (cat.png, cat.txt); pairs/rejected contains images
with the same names. The reference model is the trained model without its adapters; a larger --beta
keeps the trained model closer to the reference model. To resume a stopped run, use the same
command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import zerotune
from zerotune import AspectBuckets, ImageFolder
from zerotune.diffusion import PreferenceObjective
from zerotune.diffusion.data import Augmentation, PreferencePairs


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = zerotune.DeepSpeedPlan.build(
        stage=options.stage, offload="cpu", precision="bf16", micro_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation, optimizer="AdamW", lr=options.lr,
    )  # fmt: skip
    loaded = zerotune.load_pretrained(options.base, plan=plan)
    adapters = zerotune.LoRA(rank=options.rank, targets=loaded.family.lora_targets)
    zerotune.add_lora(loaded.model, adapters)
    pairs = PreferencePairs(
        ImageFolder(options.data / "preferred"),
        ImageFolder(options.data / "rejected"),
        buckets=AspectBuckets(area=options.area, step=options.bucket_step),
        augmentation=Augmentation(flip=0.5),  # Both images of a pair are mirrored, or neither.
    )
    data = zerotune.encode_dataset(pairs, family=loaded.family, folder=options.output / "cache")
    checkpoints = options.output / "checkpoints"
    saving = zerotune.SaveEvery(steps=options.every, root=checkpoints, keep=2)
    with zerotune.Trainer(
        model=loaded,
        data=data,
        objective=PreferenceObjective(objective=loaded.objective(), beta=options.beta),
        callbacks=[saving],
    ) as trainer:
        if checkpoint := zerotune.latest_checkpoint(checkpoints):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        trainer.export(options.output / "lora.safetensors")
    return list(report.losses)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--data", type=Path, required=True, help="parent of the two image folders")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=2000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--beta", type=float, default=5000.0, help="strength of the reference")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--area", type=int, default=1024 * 1024, help="maximum pixels per image")
    parser.add_argument("--bucket-step", type=int, default=64, help="divisor of image sides")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--batch", type=int, default=1, help="pairs per GPU and micro batch")
    parser.add_argument("--accumulation", type=int, default=8, help="micro batches per step")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
