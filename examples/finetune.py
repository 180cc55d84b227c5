"""Fine-tune a diffusers pipeline (SDXL, SD3, Flux, …) on a folder of images with captions.

The script trains all weights of the U-Net or transformer, or adapters (--lora):

    torchrun examples/finetune.py MODEL PHOTOS runs/sdxl --plan examples/plans/sdxl.json
    torchrun examples/finetune.py MODEL PHOTOS runs/lora --plan examples/plans/sdxl-lora.json \
        --lora 16
    torchrun examples/finetune.py MODEL PHOTOS runs/sd3 --plan examples/plans/sd3.json
    torchrun examples/finetune.py MODEL PHOTOS runs/flux --plan examples/plans/flux-lora.json \
        --lora 16 --lr 2e-4 --batch 2 --resolution 768

--lr and --batch override the plan. The script is part of the zerotune package: run
torchrun -m zerotune.examples.finetune, with --plan sdxl, sdxl-lora, sd3 or flux-lora.
``zerotune init`` writes the same run as a file, for one model, GPU and folder of images.

After a stop, the same command continues the run; the plan and the number of GPUs may differ. After
the end, a larger --steps continues the run. A stopped run exports nothing without --export-stopped.
An export replaces the previous export. --start resumes from the checkpoint of a different script;
the recipe convert.py converts checkpoint folders of accelerate and DeepSpeed. To find a plan for
your GPU, run ``zerotune plan advise --family sdxl --vram 12GiB``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zerotune import DeepSpeedPlan, Trainer, latest_checkpoint
from zerotune.checkpoint import check_replaceable
from zerotune.diffusion import ActivationOffload, LoRA, add_lora, encode_dataset, load_pretrained
from zerotune.diffusion.data import AspectBuckets, Augmentation, ImageFolder, PreparedImages
from zerotune.training import Callback, ProgressBar, SaveEvery, ValidationImages

HERE = Path(__file__).resolve().parent

# Folder with model_index.json, or hub id of a pipeline.
MODEL = "stabilityai/stable-diffusion-xl-base-1.0"

# Family of the model, if the pipeline's class does not imply it: a name, or "module:Class".
FAMILY = None

# Folder of images with captions in text files (cat.png, cat.txt) or in metadata.jsonl.
PHOTOS = Path("photos")

# Folder for all results: latents and embeddings, checkpoints, validation images, the export.
OUTPUT = Path("runs/finetune")

# DeepSpeed configuration: ZeRO stage, offload, batch size and learning rate.
PLAN = HERE / "plans" / "sdxl.json"

# Rank of the adapters; 0 trains all weights. Adapters and all weights need different plans.
LORA = 0

# Total number of optimizer steps, including steps before a resume.
STEPS = 2000

# Steps between checkpoints, and between grids of validation images.
EVERY = 500

# Prompts of the validation images.
PROMPTS = ["a photo of a cat", "a cup of coffee"]

# Side in pixels of a square image; other images get the nearest aspect ratio of the same area.
RESOLUTION = 1024

# Activation memory: "auto" recomputes activations if they do not fit otherwise.
GRADIENT_CHECKPOINTING = "auto"
ACTIVATION_OFFLOAD = False

# Where weights are updated whose optimizer is in host memory: "host", "device", "device:split" or
# "device:stochastic" (docs/streaming.md).
UPDATE = "host"


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    name, dtype = ("adapters", "fp32") if options.lora else ("pipeline", "bf16")
    # An export does not replace other files; find them before training, not after it.
    check_replaceable(options.output / name)
    # The engine reads the weights from their files, so that no process holds a full copy.
    loaded = load_pretrained(options.model, plan=plan_of(options), family=FAMILY)
    if options.lora:
        adapters = LoRA(rank=options.lora, targets=loaded.family.lora_targets)
        add_lora(loaded.model, adapters, base_dtype=options.base_dtype)

    images = PreparedImages(
        ImageFolder(options.photos),
        # Sides of images are multiples of step.
        buckets=AspectBuckets(
            area=options.resolution**2, step=min(64, max(1, options.resolution // 4))
        ),
        # Some captions are dropped, as classifier-free guidance requires.
        augmentation=Augmentation(caption_dropout=0.1),
    )
    # Latents and embeddings are computed once; then VAE and text encoders leave the GPU.
    data = encode_dataset(images, family=loaded.family, folder=options.output / "cache")

    with Trainer(
        model=loaded,
        data=data,
        # Decay of the EMA; validation images and the export use the EMA weights.
        ema=0.999,
        activations=ActivationOffload() if ACTIVATION_OFFLOAD else None,
        gradient_checkpointing=GRADIENT_CHECKPOINTING,
        update=UPDATE,
        callbacks=callbacks(options),
    ) as trainer:
        if checkpoint := latest_checkpoint(options.output / "checkpoints") or options.start:
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)

        # A stopped run exports nothing by default, because the next run continues it.
        if report.stopped is None or options.export_stopped:
            trainer.export(options.output / name, dtype=dtype)
        if trainer.is_main:
            print(report.render())
    return list(report.losses)


def plan_of(options: argparse.Namespace) -> DeepSpeedPlan:
    """Return the plan, with overrides from the command line."""
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
    """Read the command line; the constants above are the defaults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=MODEL, help="pipeline folder or hub id")
    parser.add_argument("photos", nargs="?", type=Path, default=PHOTOS, help="images and captions")
    parser.add_argument("output", nargs="?", type=Path, default=OUTPUT, help="folder for results")
    parser.add_argument("--plan", default=PLAN, help="DeepSpeed configuration file")
    parser.add_argument("--lr", type=float, help="learning rate (default: from the plan)")
    parser.add_argument("--batch", type=int, help="images per GPU and micro batch (default: plan)")
    parser.add_argument("--resolution", type=int, default=RESOLUTION, help="side in pixels")
    parser.add_argument("--lora", type=int, default=LORA, help="adapter rank; 0 trains all weights")
    parser.add_argument("--base-dtype", default="bf16", help="dtype of frozen weights with --lora")
    parser.add_argument("--start", type=Path, help="checkpoint to start from in a new run")
    parser.add_argument("--steps", type=int, default=STEPS, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=EVERY, help="steps between checkpoints")
    parser.add_argument("--export-stopped", action="store_true", help="export a stopped run too")
    parser.add_argument("--draw-steps", type=int, default=30, help="sampling steps")
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="validation prompts")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
