"""Fine-tune SDXL, SD 1.5/2.1, SD3/3.5 or Flux on a folder of images with captions.

All weights of the U-Net or transformer, or adapters beside it:

    torchrun examples/finetune.py MODEL PHOTOS runs/sdxl --plan examples/plans/sdxl.json
    torchrun examples/finetune.py MODEL PHOTOS runs/lora --plan examples/plans/sdxl-lora.json \
        --lora 16
    torchrun examples/finetune.py MODEL PHOTOS runs/sd3 --plan examples/plans/sd3.json
    torchrun examples/finetune.py MODEL PHOTOS runs/flux --plan examples/plans/flux-lora.json \
        --lora 16

An installed zerotune has it too: torchrun -m zerotune.examples.finetune, with --plan sdxl,
sdxl-lora, sd3 or flux-lora.

MODEL is a folder or a hub id, such as stabilityai/stable-diffusion-xl-base-1.0; what it is stands
in its model_index.json. PHOTOS holds images, each with its caption beside it (cat.png, cat.txt).
The same command goes on after a stop, also under another plan or number of GPUs, and with more
--steps after the end. A run that was stopped exports nothing unless --export-stopped asks for it;
an export takes the place of that of an earlier run. --start goes on from another script's run: of
accelerate's and DeepSpeed's own folders ``zerotune checkpoint convert`` makes a checkpoint. Which
plan fits your card: ``zerotune plan advise --family sdxl --vram 12GiB``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zerotune import DeepSpeedPlan, EMAShadow, Trainer, latest_checkpoint
from zerotune.checkpoint import export_adapters, export_pipeline
from zerotune.diffusion import LoRA, Pretrained, add_lora, encode_dataset, load_pretrained
from zerotune.diffusion.data import AspectBuckets, Augmentation, ImageFolder, PreparedImages
from zerotune.training import Callback, ProgressBar, SaveEvery, ValidationImages

PLANS = Path(__file__).parent / "plans"


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    shipped = PLANS / f"{options.plan}.json"
    plan = DeepSpeedPlan.from_json(shipped if shipped.is_file() else options.plan)
    loaded = load_pretrained(options.model, plan=plan)
    if options.lora:
        adapters = LoRA(rank=options.lora, targets=loaded.family.lora_targets)
        add_lora(loaded.model, adapters, base_dtype=options.base_dtype)
    images = PreparedImages(
        ImageFolder(options.photos),
        buckets=AspectBuckets(area=options.area, step=options.bucket_step),
        augmentation=Augmentation(caption_dropout=0.1),
    )
    # Latents and embeddings are computed once; then VAE and text encoders leave the GPU.
    data = encode_dataset(images, family=loaded.family, folder=options.output / "cache")
    with Trainer(
        model=loaded.model,
        plan=plan,
        data=data,
        objective=loaded.objective(),
        ema=EMAShadow(decay=0.999),
        callbacks=callbacks(options),
    ) as trainer:
        if checkpoint := latest_checkpoint(options.output / "checkpoints") or options.start:
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        if report.stopped is None or options.export_stopped:
            export(trainer, loaded, options)
        if trainer.is_main:
            print(report.render())
    return list(report.losses)


def callbacks(options: argparse.Namespace) -> list[Callback]:
    return [
        ProgressBar(),
        SaveEvery(steps=options.every, root=options.output / "checkpoints", keep=2),
        ValidationImages(
            every=options.every,
            prompts=options.prompts,
            steps=options.draw_steps,
            guidance_scale=5.0,
            folder=options.output / "validation",
        ),
    ]


def export(trainer: Trainer, loaded: Pretrained, options: argparse.Namespace) -> None:
    """What other programs load: ``load_lora_weights``, or ``from_pretrained``."""
    if options.lora:
        export_adapters(options.output / "adapters", engine=trainer.engine, weights=trainer.ema)
    else:
        export_pipeline(
            options.output / "pipeline",
            engine=trainer.engine,
            base=loaded.folder,
            weights=trainer.ema,
            dtype="bf16",
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("photos", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--plan", required=True, help="a DeepSpeed configuration, or sdxl, …")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0 trains all")
    parser.add_argument("--base-dtype", default="bf16", help="of the weights beside adapters")
    parser.add_argument("--start", type=Path, help="checkpoint to begin with, also a converted one")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--export-stopped", action="store_true", help="also after a signal")
    parser.add_argument("--area", type=int, default=1024 * 1024, help="most pixels of an image")
    parser.add_argument("--bucket-step", type=int, default=64)
    parser.add_argument("--draw-steps", type=int, default=30)
    parser.add_argument("--prompts", nargs="+", default=["a photo of a cat", "a cup of coffee"])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
