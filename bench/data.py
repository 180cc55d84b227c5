"""Images per second: aspect-ratio buckets over files, against a plain loader of files in memory."""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.runner import Benchmark, Case, Goal, Measured, alternate

MEMORY, BUCKETS = "DataLoader, files in memory", "BucketStream of an ImageFolder"
PLAIN = (
    "The plain loader decodes files held in memory, and returns square images of the same area, "
    "without captions or sizes. Neither loader uses worker processes."
)


def cases(quick: bool) -> Sequence[Case]:
    size = (
        {"images": 12, "side": 64, "area": 32, "batch": 4, "batches": 2, "rounds": 2}
        if quick
        else {"images": 256, "side": 768, "area": 512, "batch": 8, "batches": 8, "rounds": 9}
    )
    return (Case("pixels", pixels, size),)


def pixels(settings: Mapping[str, Any], scratch: Path) -> Measured:
    """Time decoding, resizing, cropping and stacking in this process."""
    from zerotune.diffusion.data import AspectBuckets, BucketStream, ImageFolder, PreparedImages

    folder = scratch / "images"
    _draw(folder, settings["images"], settings["side"])
    side, batch = settings["area"], settings["batch"]
    buckets = AspectBuckets(area=side * side, step=max(8, side // 8))
    dataset = PreparedImages(ImageFolder(folder), buckets=buckets, minimum=batch)
    loaders: dict[str, Iterator[Any]] = {
        MEMORY: _endless(_FilesInMemory(folder, side), batch),
        BUCKETS: BucketStream(dataset, micro_batch_size=batch),
    }

    def take(loader: Iterator[Any]) -> dict[str, float]:
        began = time.perf_counter()
        count = sum(
            len(next(iter(batch.values()))) for batch in islice(loader, settings["batches"])
        )
        return {"images_per_second": count / (time.perf_counter() - began)}

    samples = alternate(
        {name: functools.partial(take, loader) for name, loader in loaders.items()},
        rounds=settings["rounds"],
    )
    facts = {"buckets": len(dataset.assignment.members)}
    return Measured(samples=samples, baseline=MEMORY, facts=facts, notes=(PLAIN,))


class _FilesInMemory(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A minimal dataset: decode, resize the shorter side, crop the centre."""

    def __init__(self, folder: Path, side: int) -> None:
        self._files = [path.read_bytes() for path in sorted(folder.glob("*.jpg"))]
        self._side = side

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = Image.open(io.BytesIO(self._files[index])).convert("RGB")
        scale = self._side / min(image.size)
        width, height = (max(self._side, round(side * scale)) for side in image.size)
        resized = image.resize((width, height), Image.Resampling.LANCZOS)
        left, top = (width - self._side) // 2, (height - self._side) // 2
        square = resized.crop((left, top, left + self._side, top + self._side))
        values = torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()
        return {"images": values.float().div_(127.5).sub_(1)}


def _endless(dataset: Any, batch: int) -> Iterator[Any]:
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True)
    while True:
        yield from loader


def _draw(folder: Path, count: int, side: int) -> None:
    """Write smooth images with grain, in several shapes, so that JPEG sees photo-like content."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        aspect = random.choice([1.0, 0.75, 4 / 3, 1.5])
        width, height = round(side * aspect**0.5), round(side / aspect**0.5)
        coarse = Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
        image = np.clip(smooth + random.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
        Image.fromarray(image).save(folder / f"{number:05}.jpg", quality=90)
        (folder / f"{number:05}.txt").write_text(f"image {number}")


BENCHMARK = Benchmark(
    name="data",
    title="images per second with aspect-ratio buckets, compared with a plain loader",
    cases=cases,
    ours=(BUCKETS,),
    goals=(
        Goal("buckets deliver at least 95 % of a plain loader's images per second",
             "pixels", BUCKETS, "images_per_second", 0.95, MEMORY),
    ),
)  # fmt: skip
