"""Train adapters for SDXL, SD3, FLUX.1, … on several folders, whose names contain repeats.

    torchrun examples/recipes/mixture.py --base SDXL --data photos --output runs/zoe --steps 2000

photos contains one folder per set, named as for kohya's scripts: images in 10_zoe are used ten
times per epoch, images in 1_people once. --trigger adds words before the captions of a set. To
resume a stopped run, use the same command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

import zerotune
from zerotune import AspectBuckets, ImageFolder, PreparedImages
from zerotune.diffusion.data import Augmentation
from zerotune.diffusion.data.sources import ImageItem, JoinedSources, RepeatedSource


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = zerotune.DeepSpeedPlan.build(
        stage=options.stage, offload="cpu", precision="bf16", micro_batch_size=options.batch,
        optimizer="AdamW", lr=options.lr,
    )  # fmt: skip
    loaded = zerotune.load_pretrained(options.base, plan=plan)
    zerotune.add_lora(loaded.model, zerotune.LoRA(rank=16, targets=loaded.family.lora_targets))
    # Latents and embeddings are computed once per image, not per repeat.
    cache = options.output / "cache"
    data = zerotune.encode_dataset(mixture(options), family=loaded.family, folder=cache)
    checkpoints = options.output / "checkpoints"
    saving = zerotune.SaveEvery(steps=options.every, root=checkpoints, keep=2)
    with zerotune.Trainer(model=loaded, data=data, callbacks=[saving]) as trainer:
        if checkpoint := zerotune.latest_checkpoint(checkpoints):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        trainer.export(options.output / "lora.safetensors")
    return list(report.losses)


def mixture(options: argparse.Namespace) -> PreparedImages:
    """Join the sets; the sample order is exact, and every use of an image has its own flip."""
    triggers = dict(each.split("=", 1) for each in options.trigger)
    sets: list[Any] = []
    for folder in sorted(path for path in options.data.iterdir() if path.is_dir()):
        often, _, name = folder.name.partition("_")
        source = Triggered(ImageFolder(folder), words=triggers.get(name, ""))
        sets.append(RepeatedSource(source, times=int(often)))
    return PreparedImages(
        JoinedSources(sets),
        buckets=AspectBuckets(area=options.area, step=options.bucket_step),
        augmentation=Augmentation(caption_dropout=0.1),
    )


class Triggered:
    """An image source with words before all captions."""

    def __init__(self, source: ImageFolder, *, words: str) -> None:
        self._source, self._words = source, words

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def item(self, index: int) -> ImageItem:
        """Return the name, size and captions of an image."""
        item = self._source.item(index)
        further = tuple(self._words + text for text in item.further)
        return attrs.evolve(item, caption=self._words + item.caption, further=further)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder per set")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=2000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--trigger", nargs="*", default=[], metavar="SET=WORDS")
    parser.add_argument("--area", type=int, default=1024 * 1024, help="maximum pixels per image")
    parser.add_argument("--bucket-step", type=int, default=64, help="divisor of image sides")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--batch", type=int, default=2, help="micro batch size per GPU")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
