"""Train adapters of SDXL, SD3, Flux, … on which of two images of a caption was preferred.

    torchrun examples/recipes/preference.py --base SDXL --data pairs --output runs/dpo --steps 2000

pairs/preferred holds images with their captions (cat.png, cat.txt), pairs/rejected images of the
same names. The model without its adapters is the reference that --beta holds it to. The same
command goes on after a stop.
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
        augmentation=Augmentation(flip=0.5),  # Of both images of a pair.
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
    parser.add_argument("--data", type=Path, required=True, help="has preferred and rejected")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--beta", type=float, default=5000.0, help="higher stays closer to base")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--area", type=int, default=1024 * 1024, help="most pixels of an image")
    parser.add_argument("--bucket-step", type=int, default=64)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--batch", type=int, default=1, help="pairs")
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-5)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
