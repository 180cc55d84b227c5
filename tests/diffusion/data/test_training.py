"""The trainer on a folder of images: each rank gets its share, and other ranks resume exactly."""

from __future__ import annotations

import pytest

from tests.diffusion.data import workers
from tests.diffusion.data.workers import color_unet, pictures
from tests.support.ranks import ranks, run_ranks
from zerotune import DeepSpeedPlan, FlowMatchingObjective, Trainer, Unconditional
from zerotune.diffusion.data import (
    AspectBuckets,
    BucketStream,
    DataStream,
    ImageFolder,
    PreparedImages,
)
from zerotune.diffusion.data.cache import CacheSettings, TensorCache
from zerotune.diffusion.data.caching import CachedImages, cache_latents
from zerotune.errors import DataError
from zerotune.training.validate import ValidationLoss


def in_order(ranks):
    """Return the micro batches of all ranks in global order."""
    return [batch for step in zip(*ranks, strict=True) for batch in step]


def test_a_folder_trains_on_two_ranks_and_resumes_on_one(folder, tmp_path):
    checkpoint = str(tmp_path / "checkpoint")
    before = in_order(run_ranks(workers.train, str(folder), checkpoint, False, 5, world_size=2))
    after = in_order(run_ranks(workers.train, str(folder), checkpoint, True, 10, world_size=1))
    stream = BucketStream(workers.pictures(str(folder)), micro_batch_size=2, seed=3)
    batches = [next(stream) for _ in range(20)]
    whole = [(tuple(batch["captions"]), tuple(batch["images"].shape[2:])) for batch in batches]
    assert before + after == whole
    captions = [caption for batch, _ in whole for caption in batch]
    assert len(captions) == len(set(captions)) == 40
    assert len({size for _, size in whole}) == 3


def test_a_stream_without_buckets_refuses_buckets(folder):
    images = PreparedImages(ImageFolder(folder), buckets=AspectBuckets(area=128 * 128, step=8))
    with pytest.raises(DataError, match="pass the dataset to BucketStream"):
        DataStream(images, micro_batch_size=1)


@ranks(1)
def test_the_validation_loss_accepts_the_datasets_of_training(folder, tmp_path):
    cache = tmp_path / "cache"
    images = pictures(folder)
    settings = CacheSettings(kind="latents", model="pixels", dtype="float32")
    stored = TensorCache(cache, settings=settings)
    cache_latents(images, cache=stored, encode=lambda pixels: {"images": pixels})
    datasets = {"images": images, "cached": CachedImages(images, latents=stored)}
    plan = DeepSpeedPlan.build(stage=0, precision="fp32", micro_batch_size=4)
    held = {name: ValidationLoss(every=1, data=data, batches=3) for name, data in datasets.items()}
    with Trainer(
        model=color_unet(),
        plan=plan,
        data=images,
        objective=FlowMatchingObjective(family=Unconditional()),
        callbacks=[*held.values()],
        deepspeed=False,
    ) as trainer:
        trainer.fit(steps=1)
    found = {name: each.history for name, each in held.items()}
    assert [step for step, _ in found["images"]] == [0, 1]
    assert found["images"] == found["cached"], "a cache of pixels holds the pixels"
