"""Recorded sizes, crops and flips of prepared images are right and vary with the seed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from zerotune.diffusion.data import (
    AspectBuckets,
    Augmentation,
    BucketStream,
    DatasetImages,
    ImageFolder,
    Preparation,
    PreparedImages,
    TagShuffle,
    TextBeside,
)
from zerotune.diffusion.data.order import Draw
from zerotune.errors import InvalidValueError

SMALL = AspectBuckets(area=32 * 32, step=8)


def source_of(*images):
    return DatasetImages(list(images), image=lambda image: image, caption=lambda _: "words")


def prepared(*images, buckets=SMALL, **options):
    return PreparedImages(source_of(*images), buckets=buckets, **options)


def test_a_photograph_is_cropped_into_its_bucket_as_recorded(photos):
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


def test_a_flip_mirrors_the_image_and_the_recorded_corner(photos):
    wide = photos[1].crop((0, 0, 640, 150))
    options = {"buckets": AspectBuckets(area=64 * 64, step=8)}
    plain = prepared(wide, **options)[0]
    flipped = prepared(wide, augmentation=Augmentation(flip=1.0), **options)[0]
    torch.testing.assert_close(flipped["images"], plain["images"].flip(-1))
    excess = prepared(wide, **options).assignment.placements[0].excess[0]
    assert excess > 20
    assert flipped["crop_corners"][1] == excess - plain["crop_corners"][1]


def test_transparency_follows_the_given_policy():
    image = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 16, 32))
    right = {}
    for alpha in ("white", "black", "drop"):
        sample = prepared(image, preparation=Preparation(alpha=alpha))[0]["images"]
        assert sample[:, 5, 5].tolist() == [-1, -1, 1]
        right[alpha] = sample[:, 5, 28].tolist()
    assert right == {"white": [1, 1, 1], "black": [-1, -1, -1], "drop": [1, -1, -1]}


def test_pixel_art_is_scaled_without_smoothing():
    art = Image.fromarray(np.kron(np.eye(8, dtype=np.uint8) * 255, np.ones((2, 2), np.uint8)))
    crisp = prepared(
        art,
        buckets=AspectBuckets(area=128 * 128, step=8),
        preparation=Preparation(resampling="nearest"),
    )[0]["images"]
    assert crisp.shape == (3, 128, 128)
    assert set(crisp.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(
        crisp[0], torch.eye(8).repeat_interleave(16, 0).repeat_interleave(16, 1) * 2 - 1
    )


def test_flips_and_dropped_captions_depend_only_on_seed_image_and_epoch(cuttings):
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


def test_each_caption_is_used_once_before_any_is_repeated():
    chosen, words = Augmentation(seed=3), ("a", "b", "c")
    for index in range(30):
        told = [chosen.words(words, Draw(index=index, epoch=epoch)) for epoch in range(12)]
        assert all(sorted(told[turn : turn + 3]) == ["a", "b", "c"] for turn in range(0, 12, 3))
    first = [chosen.words(words, Draw(index=index, epoch=0)) for index in range(300)]
    assert {word: 80 < count < 120 for word, count in Counter(first).items()} == dict.fromkeys(
        "abc", True
    )
    assert first != [Augmentation(seed=4).words(words, Draw(index=i, epoch=0)) for i in range(300)]
    assert chosen.words((), Draw(index=0, epoch=0)) == ""
    assert Augmentation(caption_dropout=1.0).words(words, Draw(index=0, epoch=0)) == ""


TAGS = "zoe, smiling,  red hat ,, blue, tall, a b"


def test_tags_are_shuffled_after_the_kept_ones():
    tags = ["zoe", "smiling", "red hat", "blue", "tall", "a b"]
    chosen = Augmentation(tags=TagShuffle(kept=2), seed=1)
    told = [chosen.words([TAGS], Draw(index=0, epoch=epoch)) for epoch in range(40)]
    assert all(text.startswith("zoe, smiling, ") for text in told)
    assert all(sorted(text.split(", ")) == sorted(tags) for text in told)
    assert len(set(told)) > 15
    assert told == [chosen.words([TAGS], Draw(index=0, epoch=epoch)) for epoch in range(40)]
    assert told != [chosen.words([TAGS], Draw(index=1, epoch=epoch)) for epoch in range(40)]
    fewer = Augmentation(tags=TagShuffle(kept=1, dropout=0.4))
    counts = Counter(
        tag
        for epoch in range(400)
        for tag in fewer.words([TAGS], Draw(index=0, epoch=epoch)).split(", ")
    )
    assert counts["zoe"] == 400
    assert all(200 < counts[tag] < 280 for tag in tags[1:])
    lines = TagShuffle(separator=" | ", kept=9)
    assert lines.shuffled("a |b | c", seed=0) == "a |b | c"
    for wrong in ({"kept": -1}, {"dropout": 2}, {"separator": ""}, {"orders": 0}):
        with pytest.raises(InvalidValueError, match=next(iter(wrong))):
            TagShuffle(**wrong)


def test_exactly_the_counted_tag_orders_are_used():
    chosen = Augmentation(tags=TagShuffle(orders=3), seed=2)
    words = ("a, b, c, d, e", "v, w, x, y, z")
    dataset = PreparedImages(
        DatasetImages([Image.new("RGB", (8, 8))] * 2, image=lambda i: i, caption=lambda _: words),
        buckets=SMALL,
        augmentation=chosen,
    )
    for index in range(2):
        told = [dataset.caption(Draw(index=index, epoch=epoch)) for epoch in range(12)]
        assert told[:6] != told[2:8]
        assert set(told) == set(chosen.all_words(words, index))
        assert Counter(told) == dict.fromkeys(set(told), 2)
    assert set(dataset.texts()) == {"", *chosen.all_words(words, 0), *chosen.all_words(words, 1)}
    assert len(dataset.texts()) > 10
    endless = PreparedImages(
        dataset.source, buckets=SMALL, augmentation=Augmentation(tags=TagShuffle())
    )
    with pytest.raises(InvalidValueError, match=r"cannot be cached.*orders=8"):
        endless.texts()


def test_shuffled_captions_resume_exactly(folder):
    for number, path in enumerate(sorted(folder.rglob("*.txt"))):
        path.write_text(f"n{number}, a, b, c, d\nn{number}, e, f, g, h\n")

    def stream(**options):
        dataset = PreparedImages(
            ImageFolder(folder, captions=TextBeside(words="lines")),
            buckets=SMALL,
            minimum=4,
            augmentation=Augmentation(tags=TagShuffle(kept=1, dropout=0.2), caption_dropout=0.1),
        )
        return BucketStream(dataset, micro_batch_size=4, seed=4, **options)

    alone = stream()
    batches = [next(alone)["captions"] for _ in range(156)]
    before = stream()
    for _ in range(150):
        next(before)
    resumed = [stream(rank=rank, world_size=2) for rank in range(2)]
    workers = stream(num_workers=1)
    for one in (*resumed, workers):
        one.load_state_dict(before.state_dict())
    assert [next(workers)["captions"] for _ in range(3)] == batches[150:153]
    told = [next(one)["captions"] for _ in range(3) for one in resumed]
    assert told == batches[150:156]
    both = [text for batch in batches for text in batch if text.startswith("n7, ")]
    assert len({text[4] for text in both}) > 1, "another caption or another order in the next epoch"


def test_masks_and_references_are_cropped_with_their_image(tmp_path, photos):
    picture = photos[0].resize((60, 40))
    picture.save(tmp_path / "a.png")
    picture.resize((120, 80)).save(tmp_path / "a.reference.png")
    left = Image.new("L", (60, 40))
    left.paste(255, (0, 0, 30, 40))
    left.save(tmp_path / "a.mask.png")
    photos[1].resize((32, 32)).save(tmp_path / "b.png")
    photos[0].resize((32, 64)).save(tmp_path / "b.reference.png")
    square = AspectBuckets(area=32 * 32, step=32, max_aspect=1)

    def dataset(**options):
        return PreparedImages(ImageFolder(tmp_path), buckets=square, **options)

    plain = dataset()
    sample = plain[0]
    assert sample["images"].shape == sample["reference_images"].shape == (3, 32, 32)
    assert sample["loss_masks"].shape == (1, 32, 32)
    # The reference is the image at twice the size, so the crops are equal up to resampling.
    assert (sample["images"] - sample["reference_images"]).abs().mean() < 0.05
    shown = 24 - sample["crop_corners"][1].item()  # End of the white half.
    assert sample["loss_masks"][0, 0, : shown - 3].min() > 0.95
    assert sample["loss_masks"][0, 0, shown + 3 :].max() < 0.05
    mirrored = dataset(augmentation=Augmentation(flip=1.0))[0]
    for name in ("images", "loss_masks", "reference_images"):
        assert torch.equal(mirrored[name], sample[name].flip(-1)), name
    other = plain[1]
    assert torch.equal(other["loss_masks"], torch.ones(1, 32, 32)), "without a mask all counts"
    # A reference with another aspect ratio is cropped to the bucket on its own.
    alone = PreparedImages(source_of(photos[0].resize((32, 64))), buckets=square)
    assert torch.equal(other["reference_images"], alone[0]["images"])
    batch = next(BucketStream(plain, micro_batch_size=2))
    assert batch["reference_images"].shape == (2, 3, 32, 32)
