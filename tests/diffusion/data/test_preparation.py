"""Images in their buckets: sizes, crops and flips are what is recorded, and vary by the seed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from zerotune.diffusion.data import (
    AlphaOnColor,
    AspectBuckets,
    Augmentation,
    BucketStream,
    CenterCrop,
    DatasetImages,
    DetailCrop,
    Draw,
    DropAlpha,
    ImageFolder,
    Preparation,
    PreparedImages,
)
from zerotune.errors import InvalidValueError

SMALL = AspectBuckets(area=32 * 32, step=8)


def source_of(*images):
    return DatasetImages(list(images), image=lambda image: image, caption=lambda _: "words")


def prepared(*images, buckets=SMALL, **options):
    return PreparedImages(source_of(*images), buckets=buckets, **options)


def test_a_photograph_comes_into_its_bucket_as_recorded(photos):
    dataset = prepared(photos[0], buckets=AspectBuckets(area=256 * 256))
    sample = dataset[0]
    placement = dataset.assignment.placements[0]
    assert sample["images"].shape == (3, 192, 320)
    assert sample["original_sizes"].tolist() == [427, 640]
    assert sample["target_sizes"].tolist() == [192, 320]
    assert placement.resized == (320, 214)
    assert sample["crop_corners"].tolist() == [11, 0]
    resized = np.asarray(photos[0].resize((320, 214), Image.Resampling.LANCZOS))
    wanted = torch.from_numpy(resized[11:203].copy()).permute(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(sample["images"], wanted)
    assert sample["captions"] == "words"


def test_flips_mirror_the_image_and_the_recorded_corner(photos):
    wide = photos[1].crop((0, 0, 640, 150))
    options = {
        "buckets": AspectBuckets(area=64 * 64, step=8),
        "preparation": Preparation(crop=DetailCrop()),
    }
    plain = prepared(wide, **options)[0]
    flipped = prepared(wide, augmentation=Augmentation(flip=1.0), **options)[0]
    torch.testing.assert_close(flipped["images"], plain["images"].flip(-1))
    excess = prepared(wide, **options).assignment.placements[0].excess[0]
    assert excess > 20
    assert flipped["crop_corners"][1] == excess - plain["crop_corners"][1]


def test_the_detail_crop_keeps_what_is_not_plain():
    pixels = np.full((20, 60, 3), 128, np.uint8)
    pixels[:, 45:55] = np.random.default_rng(0).integers(0, 255, (20, 10, 3))
    for image, corner in (
        (Image.fromarray(pixels), lambda found: found[0]),
        (Image.fromarray(pixels.transpose(1, 0, 2).copy()), lambda found: found[1]),
    ):
        excess = (40, 0) if image.width > image.height else (0, 40)
        assert 35 <= corner(DetailCrop().corner(image, excess)) <= 40
        plain = Image.new("RGB", image.size, "gray")
        assert DetailCrop().corner(plain, excess) == CenterCrop().corner(plain, excess)
        assert DetailCrop().corner(plain, (0, 0)) == (0, 0)


def test_transparency_is_treated_as_asked():
    image = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 16, 32))
    colors = {
        "white": AlphaOnColor(),
        "green": AlphaOnColor(color=(0, 255, 0)),
        "hidden": DropAlpha(),
    }
    right = {}
    for name, policy in colors.items():
        sample = prepared(image, preparation=Preparation(alpha=policy))[0]["images"]
        assert sample[:, 5, 5].tolist() == [-1, -1, 1]
        right[name] = sample[:, 5, 28].tolist()
    assert right == {"white": [1, 1, 1], "green": [-1, 1, -1], "hidden": [1, -1, -1]}


def test_pixel_art_stays_crisp():
    art = Image.fromarray(np.kron(np.eye(8, dtype=np.uint8) * 255, np.ones((2, 2), np.uint8)))
    crisp = prepared(
        art, buckets=AspectBuckets.pixel_art(), preparation=Preparation(resampling="nearest")
    )[0]["images"]
    assert crisp.shape == (3, 128, 128)
    assert set(crisp.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(
        crisp[0], torch.eye(8).repeat_interleave(16, 0).repeat_interleave(16, 1) * 2 - 1
    )


def test_flips_and_dropped_captions_depend_on_seed_image_and_epoch_alone(cuttings):
    chosen = Augmentation(flip=0.5, caption_dropout=0.1, seed=1)
    dataset = prepared(*cuttings[:20], augmentation=chosen)
    draws = [Draw(index=index, epoch=epoch) for index in range(20) for epoch in range(50)]
    flips = [chosen.flips(draw) for draw in draws]
    drops = [dataset.caption(draw) == "" for draw in draws]
    assert 0.45 < np.mean(flips) < 0.55
    assert 0.07 < np.mean(drops) < 0.13
    assert abs(np.corrcoef(flips, drops)[0, 1]) < 0.1
    again = Augmentation(flip=0.5, caption_dropout=0.1, seed=1)
    assert [again.flips(draw) for draw in draws] == flips
    assert [Augmentation(flip=0.5).flips(draw) for draw in draws] != flips
    assert len({tuple(flips[n * 50 : n * 50 + 50]) for n in range(20)}) == 20
    with pytest.raises(InvalidValueError, match="flip = 2"):
        Augmentation(flip=2)
    with pytest.raises(InvalidValueError, match="resampling = 'best'"):
        Preparation(resampling="best")


def test_real_files_stream_once_per_epoch_and_resume_with_their_flips(folder):
    def stream(rank, ranks, seed=4):
        dataset = PreparedImages(
            ImageFolder(folder),
            buckets=SMALL,
            minimum=4,
            augmentation=Augmentation(flip=0.5, caption_dropout=0.2),
        )
        return BucketStream(dataset, micro_batch_size=4, rank=rank, world_size=ranks, seed=seed)

    alone = stream(0, 1)
    batches = [next(alone) for _ in range(90)]
    named = [caption for batch in batches for caption in batch["captions"] if caption]
    assert max(Counter(named).values()) <= 2
    assert {batch["images"].shape[0] for batch in batches} == {4}
    assert len({batch["images"].shape for batch in batches}) == 3
    for batch in batches:
        assert batch["images"].shape[2:] == tuple(batch["target_sizes"][0].tolist())
    first = [stream(rank, 2) for rank in range(2)]
    for step in range(20):
        for rank in range(2):
            same(next(first[rank]), batches[2 * step + rank])
    for rank in range(3):
        resumed = stream(rank, 3, seed=0)
        resumed.load_state_dict(first[0].state_dict())
        same(next(resumed), batches[40 + rank])


def same(batch, other):
    assert batch["captions"] == other["captions"]
    torch.testing.assert_close(batch["images"], other["images"], rtol=0, atol=0)
