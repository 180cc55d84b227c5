"""Train adapters for SDXL, SD3, FLUX.1, … on tar shards that are read in order, without a copy.

    torchrun examples/recipes/streamed.py --base SDXL --data "https://host/{000..099}.tar" \
        --output runs/streamed --steps 2000

--data names WebDataset shards with .jpg or .png members and .txt captions. Every rank reads the
whole stream, but uses only its share of the micro batches, so all ranks run the same number of
steps. The training process decodes the images, and a resumed run reads the stream from the
beginning. If the images fit on disk, use HuggingFaceImages instead. For a streaming
Hugging Face dataset, pass its rows and a matching read function to StreamedImages.
To resume a stopped run, use the same command.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import zerotune
from zerotune import AspectBuckets
from zerotune.diffusion.data import Augmentation, Preparation
from zerotune.diffusion.data.batches import Batch, stack_samples
from zerotune.diffusion.data.buckets import Placement
from zerotune.diffusion.data.images import decode, image_size, readable_errors, why
from zerotune.diffusion.data.order import Draw
from zerotune.diffusion.data.preparation import micro_conditioning, to_pixels
from zerotune.errors import DataError


def main(arguments: Sequence[str] | None = None) -> list[float]:
    options = parse(arguments)
    plan = zerotune.DeepSpeedPlan.build(
        stage=options.stage, offload="cpu", precision="bf16", micro_batch_size=options.batch,
        optimizer="AdamW", lr=options.lr,
    )  # fmt: skip
    loaded = zerotune.load_pretrained(options.base, plan=plan)
    adapters = zerotune.LoRA(rank=options.rank, targets=loaded.family.lora_targets)
    zerotune.add_lora(loaded.model, adapters)
    data = StreamedImages(
        shards(options.data),
        read=picture_and_caption,
        buckets=AspectBuckets(area=options.area, step=options.bucket_step),
        micro_batch_size=options.batch,
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    checkpoints = options.output / "checkpoints"
    saving = zerotune.SaveEvery(steps=options.every, root=checkpoints, keep=2)
    with zerotune.Trainer(model=loaded, data=data, callbacks=[saving]) as trainer:
        if checkpoint := zerotune.latest_checkpoint(checkpoints):
            trainer.resume(checkpoint)
        report = trainer.fit(steps=options.steps)
        trainer.export(options.output / "lora.safetensors")
    return list(report.losses)


def shards(urls: str) -> Iterable[dict[str, Any]]:
    import webdataset

    # Every rank must read all shards, in the same order in every epoch.
    found: Iterable[dict[str, Any]] = webdataset.WebDataset(
        urls, shardshuffle=False, nodesplitter=lambda source: source
    )
    return found


def picture_and_caption(sample: Mapping[str, bytes]) -> tuple[bytes, str]:
    picture = sample["jpg"] if "jpg" in sample else sample["png"]
    return picture, sample["txt"].decode()


@attrs.frozen(kw_only=True)
class Arrived:
    """A sample that waits for its micro batch."""

    draw: Draw
    encoded: bytes
    caption: str
    placement: Placement


class StreamedImages:
    """Endless stream of micro batches, each from one bucket, from samples that are read in order.

    Images are buffered, even across epochs, until their bucket can fill a micro batch. The order
    does not depend on the number of ranks. Unreadable images are skipped. A resumed run reads
    samples again from the beginning of an epoch, and discards those that it has already used.

    Args:
        samples: A restartable iterable that yields the same samples on all ranks. Its
            ``set_epoch`` method, if it has one, is called before each epoch.
        read: Function that takes a sample and returns its encoded image and its caption.
        buckets: Target sizes of the images.
        micro_batch_size: Number of samples per micro batch on each rank.
        rank: Rank of this process.
        world_size: Number of processes that share the data.
        augmentation: Settings for flips and captions.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        *,
        read: Callable[[Any], tuple[bytes, str]],
        buckets: AspectBuckets,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        augmentation: Augmentation | None = None,
    ) -> None:
        self._samples, self._read, self._buckets = samples, read, buckets
        self._size, self._rank, self._world_size = micro_batch_size, rank, world_size
        self._augmentation = augmentation or Augmentation()
        self._waiting: dict[Any, list[Arrived]] = {}
        self._epoch, self._count, self._last = 0, 0, ""
        self._arrived_in = 0
        self._iterator: Iterator[Any] | None = None

    @property
    def epoch(self) -> int:
        """Current epoch, counted from 0."""
        return self._epoch

    def __iter__(self) -> StreamedImages:
        return self

    def __next__(self) -> Batch:
        # Every rank assembles the micro batches of all ranks, so that all have the same position.
        step = [self._assemble() for _ in range(self._world_size)]
        return stack_samples([self._prepare(arrived) for arrived in step[self._rank]])

    def state_dict(self) -> dict[str, Any]:
        """Return the stream position and the positions of buffered images; equal on all ranks."""
        waiting = [arrived.draw for of in self._waiting.values() for arrived in of]
        return {
            "epoch": self._epoch,
            "count": self._count,
            "last": self._last,
            "waiting": sorted([draw.epoch, draw.index] for draw in waiting),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position: read and discard the consumed samples."""
        waiting = {tuple(each) for each in state["waiting"]}
        self._waiting, self._iterator = {}, None
        self._epoch = min([epoch for epoch, _ in waiting] + [state["epoch"]])
        self._count, self._arrived_in = 0, state["epoch"]
        sample, target = None, (state["epoch"], state["count"])
        while (self._epoch, self._count) < target:
            sample = self._take()
            if (self._epoch, self._count - 1) in waiting:
                self._receive(sample)
        ends_early = (self._epoch, self._count) > target
        if ends_early or (state["last"] and self._digest(sample) != state["last"]):
            raise DataError(
                "yields other samples than in the saved run", key="samples",
                fix="use the same data in the same order, or start a new run",
            )  # fmt: skip
        self._last = state["last"]

    def _assemble(self) -> list[Arrived]:
        while True:
            for of in self._waiting.values():
                if len(of) >= self._size:
                    batch = of[: self._size]
                    del of[: self._size]
                    return batch
            sample = self._take()
            self._last = self._digest(sample)
            self._receive(sample)
            if self._epoch > self._arrived_in + 1:
                raise DataError(
                    f"yielded no readable image in epoch {self._arrived_in + 1}", key="samples",
                    fix="check the return value of the function passed as read=",
                )  # fmt: skip

    def _take(self) -> Any:
        """Return the next sample; start the next epoch if the current one is over."""
        for _ in range(2):
            if self._iterator is None:
                if hasattr(self._samples, "set_epoch"):
                    self._samples.set_epoch(self._epoch)
                self._iterator = iter(self._samples)
            for sample in self._iterator:
                self._count += 1
                return sample
            self._iterator = None
            self._epoch, self._count = self._epoch + 1, 0
        raise DataError(
            "yields no sample", key="samples",
            fix="pass an iterable that can be restarted, such as a list instead of a generator",
        )  # fmt: skip

    def _receive(self, sample: Any) -> None:
        draw = Draw(index=self._count - 1, epoch=self._epoch)
        try:
            encoded, caption = self._read(sample)
            placement = self._buckets.place(image_size(encoded, "whole"))
        except readable_errors() as error:
            if self._rank == 0:
                print(f"sample {draw.index} is skipped: {why(error)}")
            return
        arrived = Arrived(draw=draw, encoded=encoded, caption=caption, placement=placement)
        self._arrived_in = draw.epoch
        self._waiting.setdefault(placement.bucket, []).append(arrived)

    def _prepare(self, arrived: Arrived) -> dict[str, Any]:
        placement, flipped = arrived.placement, self._augmentation.flips(arrived.draw)
        image = decode(arrived.encoded)
        return {
            "images": to_pixels(image, placement, Preparation(), flipped=flipped),
            "captions": self._augmentation.words((arrived.caption,), arrived.draw),
            **micro_conditioning(placement, flipped=flipped),
        }

    def _digest(self, sample: Any) -> str:
        try:
            encoded, caption = self._read(sample)
        except readable_errors():
            return "unreadable"
        return hashlib.sha256(encoded + caption.encode()).hexdigest()[:16]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="folder or hub id of the pipeline")
    parser.add_argument("--data", required=True, help="names of the shards, such as {000..099}.tar")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument("--steps", type=int, default=2000, help="total optimizer steps")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--area", type=int, default=1024 * 1024, help="maximum pixels per image")
    parser.add_argument("--bucket-step", type=int, default=64, help="divisor of image sides")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--batch", type=int, default=1, help="micro batch size per GPU")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
