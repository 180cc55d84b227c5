"""Images per second: buckets and caches against a plain loader whose files lie in memory."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.framework import Benchmark, Case, Context, Goal, Measured, alternate

MEMORY, BUCKETS = "DataLoader, files in memory", "BucketStream of an ImageFolder"
TENSORS, CACHED = "DataLoader, tensors in memory", "BucketStream of CachedImages"
PLAIN = (
    "The plain loader decodes from memory and makes squares of the same area, without captions "
    "or sizes. Neither uses other processes."
)


def cases(quick: bool) -> Sequence[Case]:
    size = (
        {"images": 12, "side": 64, "area": 32, "batch": 4, "batches": 2, "rounds": 2}
        if quick
        else {"images": 256, "side": 768, "area": 512, "batch": 8, "batches": 8, "rounds": 9}
    )
    embeddings = {"tokens": 4 if quick else 77, "width": 16 if quick else 2048}
    return (
        Case(name="pixels", settings=size, measure=pixels),
        Case(
            name="cached latents and texts",
            settings={**size, **embeddings, "batches": 2 if quick else 30},
            measure=cached,
        ),
    )


def pixels(settings: Mapping[str, Any], context: Context) -> Measured:
    """Decode, resize, crop, stack; in this process."""
    from zerotune.diffusion.data import BucketStream

    dataset = _prepared(context.scratch, settings)
    stream = BucketStream(dataset, micro_batch_size=settings["batch"])
    plain = _endless(_FilesInMemory(context.scratch, settings["area"]), settings["batch"])
    return Measured(
        samples=_rates({MEMORY: plain, BUCKETS: stream}, settings),
        baseline=MEMORY,
        facts={"buckets": len(dataset.assignment.members)},
        notes=(PLAIN,),
    )


def cached(settings: Mapping[str, Any], context: Context) -> Measured:
    """Read what encoders would have given."""
    from zerotune.diffusion.data import (
        BucketStream,
        CachedImages,
        CacheSettings,
        TensorCache,
        cache_latents,
        cache_texts,
    )

    dataset = _prepared(context.scratch, settings)
    latents, texts = (
        TensorCache(
            context.scratch / name,
            settings=CacheSettings(kind=name, model="stand-in", dtype="float32"),
        )
        for name in ("latents", "texts")
    )
    cache_latents(dataset, cache=latents, encode=_latents)
    captions = [dataset.source.item(index).caption for index in range(len(dataset))]
    shape = settings["tokens"], settings["width"]
    cache_texts(captions, cache=texts, encode=lambda some: _embeddings(some, shape))
    images = CachedImages(dataset, latents=latents, texts=texts)
    stream = BucketStream(images, micro_batch_size=settings["batch"])
    # One size, so that a plain loader can stack them.
    common = max(dataset.assignment.members.values(), key=len)
    kept = _endless([images[index] for index in common], min(settings["batch"], len(common)))
    return Measured(
        samples=_rates({TENSORS: kept, CACHED: stream}, settings),
        baseline=TENSORS,
        facts={"bytes per image": sum(v.nbytes for v in images[0].values())},
        notes=("The cache's files lie in the page cache, the plain loader's tensors in its own.",),
    )


def _rates(
    loaders: Mapping[str, Iterator[Any]], settings: Mapping[str, Any]
) -> dict[str, dict[str, list[float]]]:
    def take(loader: Iterator[Any]) -> dict[str, float]:
        started = time.perf_counter()
        count = sum(
            len(next(iter(batch.values()))) for batch in islice(loader, settings["batches"])
        )
        return {"images_per_second": count / (time.perf_counter() - started)}

    contestants = {name: (lambda loader=loader: take(loader)) for name, loader in loaders.items()}
    return alternate(contestants, rounds=settings["rounds"])


class _FilesInMemory(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """What one writes first: decode, resize the short side, crop the middle."""

    def __init__(self, folder: Path, side: int) -> None:
        self._files = [path.read_bytes() for path in sorted(folder.glob("pictures/*.jpg"))]
        self._side = side

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import numpy as np
        from PIL import Image

        image = Image.open(io.BytesIO(self._files[index])).convert("RGB")
        scale = self._side / min(image.size)
        width, height = (max(self._side, round(side * scale)) for side in image.size)
        resized = image.resize((width, height), Image.Resampling.LANCZOS)
        left, top = (width - self._side) // 2, (height - self._side) // 2
        square = resized.crop((left, top, left + self._side, top + self._side))
        values = torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()
        return {"images": values.float().div_(127.5).sub_(1)}


def _endless(dataset: Any, batch: int) -> Iterator[Any]:
    while True:
        yield from torch.utils.data.DataLoader(
            dataset, batch_size=batch, shuffle=True, drop_last=True
        )


def _prepared(folder: Path, settings: Mapping[str, Any]) -> Any:
    from zerotune.diffusion.data import AspectBuckets, ImageFolder, PreparedImages

    _draw(folder / "pictures", settings["images"], settings["side"])
    side = settings["area"]
    return PreparedImages(
        ImageFolder(folder / "pictures"),
        buckets=AspectBuckets(area=side * side, step=max(8, side // 8)),
        minimum=settings["batch"],
    )


def _draw(folder: Path, count: int, side: int) -> None:
    """Pictures of many shapes, smooth with some grain, so that JPEG has what photographs give."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        aspect = random.choice([1.0, 0.75, 4 / 3, 1.5])
        width, height = round(side * aspect**0.5), round(side / aspect**0.5)
        coarse = Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
        grain = random.normal(0, 6, smooth.shape)
        picture = np.clip(smooth + grain, 0, 255).astype(np.uint8)
        Image.fromarray(picture).save(folder / f"{number:05}.jpg", quality=90)
        (folder / f"{number:05}.txt").write_text(f"picture {number}")


def _latents(images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Shaped as an SDXL VAE's: 4 channels, an eighth of each side."""
    small = torch.nn.functional.avg_pool2d(images, 8)
    return {"latents": torch.cat([small, small[:, :1]], dim=1)}


def _embeddings(captions: Sequence[str], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    return {
        "prompt_embeds": torch.zeros(len(captions), *shape),
        "pooled_embeds": torch.zeros(len(captions), shape[1]),
    }


BENCHMARK = Benchmark(
    name="data",
    title="images per second of buckets and caches against a plain loader from memory",
    cases=cases,
    ours=frozenset({BUCKETS, CACHED}),
    goals=(
        Goal(
            text="buckets of files give at least 0.95 of the images of a plain loader from memory",
            case="pixels",
            contestant=BUCKETS,
            against=MEMORY,
            quantity="images_per_second",
            limit=0.95,
        ),
    ),
)
