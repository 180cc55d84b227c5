"""Train image-to-video adapters for Wan or HunyuanVideo; a clip's first frame is its condition.

    torchrun examples/recipes/image_to_video.py --base WAN-I2V --data clips --output runs/clips

clips contains, for each clip, a video cat.mp4 or a folder cat of frames, and a caption cat.txt. To
resume a stopped run, use the same command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zerotune import DeepSpeedPlan, LoRA, Trainer, add_lora, latest_checkpoint
from zerotune.diffusion import encode_dataset, load_pretrained
from zerotune.diffusion.data import AspectBuckets, ClipBuckets, ClipFolder, PreparedClips
from zerotune.training import SaveEvery, ValidationImages


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = DeepSpeedPlan.build(stage=options.stage, offload="cpu", lr=options.lr)
    loaded = load_pretrained(options.base, family=options.family, plan=plan)
    add_lora(loaded.model, LoRA(rank=options.rank, targets=loaded.family.lora_targets))
    clips = PreparedClips(
        ClipFolder(options.data),
        buckets=ClipBuckets(
            sizes=AspectBuckets(area=options.area, step=options.bucket_step),
            frames=options.frames,
            compression=loaded.family.parts.latents.frames,
            fps=options.fps,
        ),
    )
    data = encode_dataset(
        clips, family=loaded.family, folder=options.output / "cache", batch_size=1
    )
    shown = clips[0]
    drawing = ValidationImages(
        every=options.every,
        prompts=[shown["captions"]],
        references=shown["images"][None, :, 0],
        frames=shown["images"].shape[1],
        steps=options.draw_steps,
        folder=options.output / "validation",
    )
    saving = SaveEvery(steps=options.every, root=options.output / "checkpoints", keep=2)
    with Trainer(model=loaded, data=data, callbacks=[saving, drawing]) as trainer:
        if checkpoint := latest_checkpoint(options.output / "checkpoints"):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        trainer.export(options.output / "adapters")
    return list(report.losses)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train image-to-video adapters.")
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--family", help="family, if --base does not imply it")
    parser.add_argument("--data", type=Path, required=True, help="clips with captions")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=2000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--area", type=int, default=832 * 480, help="maximum pixels per frame")
    parser.add_argument("--bucket-step", type=int, default=16, help="divisor of frame sides")
    parser.add_argument("--frames", type=int, nargs="+", default=[49, 81], help="clip lengths")
    parser.add_argument("--fps", type=float, default=16.0, help="frames per second")
    parser.add_argument("--draw-steps", type=int, default=30, help="sampling steps")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
