"""Fine-tune a diffusers pipeline (SDXL, SD3, Flux, …) on a folder of images with captions.

All weights of the U-Net or transformer, or adapters beside it:

    torchrun examples/finetune.py MODEL PHOTOS runs/sdxl --plan examples/plans/sdxl.json
    torchrun examples/finetune.py MODEL PHOTOS runs/lora --plan examples/plans/sdxl-lora.json \
        --lora 16
    torchrun examples/finetune.py MODEL PHOTOS runs/sd3 --plan examples/plans/sd3.json
    torchrun examples/finetune.py MODEL PHOTOS runs/flux --plan examples/plans/flux-lora.json \
        --lora 16 --lr 2e-4 --batch 2 --resolution 768

--lr and --batch go before what the plan says. An installed zerotune has it too:
torchrun -m zerotune.examples.finetune, with --plan sdxl, sdxl-lora, sd3 or flux-lora.
``zerotune init`` writes it for one model, card and folder of images.

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

from zerotune import DeepSpeedPlan, Trainer, latest_checkpoint
from zerotune.diffusion import ActivationOffload, LoRA, add_lora, encode_dataset, load_pretrained
from zerotune.diffusion.data import AspectBuckets, Augmentation, ImageFolder, PreparedImages
from zerotune.training import Callback, ProgressBar, SaveEvery, ValidationImages

HERE = Path(__file__).resolve().parent

# A folder with model_index.json, or the id of a pipeline on the hub.
MODEL = "stabilityai/stable-diffusion-xl-base-1.0"

# Its family, where the pipeline's class does not say it: a name, or "module:Class" of your own.
FAMILY = None

# Images, each with its caption beside it (cat.png, cat.txt), or with a metadata.jsonl.
PHOTOS = Path("photos")

# Everything the run makes: latents and embeddings, checkpoints, validation images, the export.
OUTPUT = Path("runs/finetune")

# ZeRO stage, offload, batch and learning rate.
PLAN = HERE / "plans" / "sdxl.json"

# Rank of adapters; 0 trains all weights. Each needs a plan of its own.
LORA = 0

# Optimizer steps, counted from the beginning of the first run.
STEPS = 2000

# Steps between two checkpoints, and between two sheets of validation images.
EVERY = 500

# What the validation images show.
PROMPTS = ["a photo of a cat", "a cup of coffee"]

# Pixels of a square's side; each image is brought to the nearest of several shapes of that area.
RESOLUTION = 1024

# How activations fit beside the plan: "auto" recomputes them if memory demands it.
GRADIENT_CHECKPOINTING = "auto"
ACTIVATION_OFFLOAD = False


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    # The weights wait in their files until the engine takes them: no process holds a copy.
    loaded = load_pretrained(options.model, plan=plan_of(options), family=FAMILY)
    if options.lora:
        adapters = LoRA(rank=options.lora, targets=loaded.family.lora_targets)
        add_lora(loaded.model, adapters, base_dtype=options.base_dtype)

    images = PreparedImages(
        ImageFolder(options.photos),
        # Sides are multiples of the step.
        buckets=AspectBuckets(
            area=options.resolution**2, step=min(64, max(1, options.resolution // 4))
        ),
        # Some captions are left out, so that guidance works.
        augmentation=Augmentation(caption_dropout=0.1),
    )
    # Computed once; then VAE and text encoders leave the card.
    data = encode_dataset(images, family=loaded.family, folder=options.output / "cache")

    with Trainer(
        model=loaded,
        data=data,
        # Decay of the average of the weights, which is drawn with and exported.
        ema=0.999,
        activations=ActivationOffload() if ACTIVATION_OFFLOAD else None,
        gradient_checkpointing=GRADIENT_CHECKPOINTING,
        callbacks=callbacks(options),
    ) as trainer:
        if checkpoint := latest_checkpoint(options.output / "checkpoints") or options.start:
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)

        # A run that was stopped exports nothing; the next one does.
        if report.stopped is None or options.export_stopped:
            name, dtype = ("adapters", "fp32") if options.lora else ("pipeline", "bf16")
            trainer.export(options.output / name, dtype=dtype)
        if trainer.is_main:
            print(report.render())
    return list(report.losses)


def plan_of(options: argparse.Namespace) -> DeepSpeedPlan:
    """The plan, with what the command line says otherwise."""
    shipped = HERE / "plans" / f"{options.plan}.json"
    plan = DeepSpeedPlan.from_json(shipped if shipped.is_file() else options.plan)
    said = {
        "optimizer.params.lr": options.lr,
        "train_micro_batch_size_per_gpu": options.batch,
    }
    return plan.with_overrides({name: each for name, each in said.items() if each is not None})


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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says; else what stands above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("photos", nargs="?", type=Path, default=PHOTOS)
    parser.add_argument("output", nargs="?", type=Path, default=OUTPUT)
    parser.add_argument("--plan", default=PLAN, help="a DeepSpeed configuration")
    parser.add_argument("--lr", type=float, help="learning rate; the plan's when not given")
    parser.add_argument("--batch", type=int, help="images per card; the plan's when not given")
    parser.add_argument("--resolution", type=int, default=RESOLUTION, help="pixels of a side")
    parser.add_argument("--lora", type=int, default=LORA, help="rank of adapters; 0 trains all")
    parser.add_argument("--base-dtype", default="bf16", help="of the weights beside adapters")
    parser.add_argument("--start", type=Path, help="checkpoint to begin with, also a converted one")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=EVERY, help="steps between checkpoints")
    parser.add_argument("--export-stopped", action="store_true", help="also after a signal")
    parser.add_argument("--draw-steps", type=int, default=30)
    parser.add_argument("--prompts", nargs="+", default=PROMPTS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
