"""Train adapters that go on from an image, of Wan or HunyuanVideo: each clip's first frame.

    torchrun examples/recipes/image_to_video.py --base WAN-I2V --data clips --output runs/clips

clips holds cat.mp4 or a folder cat of frames, and the caption cat.txt. The same command goes on
after a stop.
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
    parser = argparse.ArgumentParser(description="Train adapters that go on from an image.")
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--family", help="WanImageToVideo for a pipeline of texts, or an expert")
    parser.add_argument("--data", type=Path, required=True, help="clips with captions")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--area", type=int, default=832 * 480, help="most pixels of a frame")
    parser.add_argument("--bucket-step", type=int, default=16)
    parser.add_argument("--frames", type=int, nargs="+", default=[49, 81])
    parser.add_argument("--fps", type=float, default=16.0)
    parser.add_argument("--draw-steps", type=int, default=30)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
