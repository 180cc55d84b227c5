"""Train adapters for SD 1.5, SDXL, SD3 or FLUX.1 and for its CLIP text encoders.

    torchrun examples/recipes/text_encoder.py --base SDXL --data photos --output runs/zoe \
        --trigger "ohwx, " --steps 2000 --text-steps 500

--all trains all weights instead of adapters. The learning rate of the text encoders is --text-lr;
text encoders are trained only in the first --text-steps steps. Captions are encoded in each step.
To resume a stopped run, use the same command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import zerotune
from zerotune import AspectBuckets, ImageFolder, OptimizerResolver, PreparedImages
from zerotune.diffusion.data import Augmentation
from zerotune.optim import ParameterGroups


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = zerotune.DeepSpeedPlan.build(
        stage=options.stage, offload="cpu", precision="bf16", micro_batch_size=options.batch,
        optimizer="AdamW", lr=options.lr,
    )  # fmt: skip
    # The denoiser and its CLIPs are parts of one model, which one engine trains.
    loaded = zerotune.load_pretrained(options.base, plan=plan, text_encoders=True)
    denoiser, *encoders = loaded.model.names
    if not options.all:
        zerotune.add_lora(loaded.model[denoiser], zerotune.LoRA(targets=loaded.family.lora_targets))
        for name in encoders:
            zerotune.add_lora(loaded.model[name], zerotune.LoRA())
    rates = {name: {"lr": options.text_lr, "until": options.text_steps} for name in encoders}
    groups = ParameterGroups.per_part({denoiser: {"lr": options.lr}, **rates})

    images = PreparedImages(
        ImageFolder(options.data),
        buckets=AspectBuckets(area=options.area, step=options.bucket_step),
        augmentation=Augmentation(prefix=options.trigger),
    )
    # Only latents are cached, because embeddings change while the encoders are trained.
    cache = options.output / "cache"
    data = zerotune.encode_dataset(images, family=loaded.family, folder=cache)
    checkpoints = options.output / "checkpoints"
    saving = zerotune.SaveEvery(steps=options.every, root=checkpoints, keep=2)
    with zerotune.Trainer(
        model=loaded, data=data, resolver=OptimizerResolver(groups=groups), ema=0.999,
        callbacks=[saving],
    ) as trainer:  # fmt: skip
        if checkpoint := zerotune.latest_checkpoint(checkpoints):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        trainer.export(options.output / ("pipeline" if options.all else "lora.safetensors"))
    return list(report.losses)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--data", type=Path, required=True, help="images with captions")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=2000, help="total optimizer steps")
    parser.add_argument("--text-steps", type=int, default=500, help="steps of text encoders")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--trigger", default="", help="words before each caption")
    parser.add_argument("--all", action="store_true", help="train all weights, not adapters")
    for name, default in (("--lr", 1e-4), ("--text-lr", 5e-6)):
        parser.add_argument(name, type=float, default=default)
    sizes = {"stage": 2, "batch": 2, "area": 1024 * 1024, "bucket-step": 64}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
