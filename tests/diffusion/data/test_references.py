"""Images with several references: files, columns, buckets and batches."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from zerotune.diffusion.data import (
    AspectBuckets,
    Augmentation,
    BucketStream,
    HuggingFaceImages,
    ImageFolder,
    PreparedImages,
)
from zerotune.diffusion.data.sources import JoinedSources
from zerotune.errors import DataError

COUNTS = (1, 2, 2, 3)
SQUARES = AspectBuckets(area=16 * 16, step=16)


def shade(number, place):
    """Return a unique grey value for each reference of each image."""
    return 10 * number + place


def plain(value, size=(16, 16)):
    return Image.fromarray(np.full((size[1], size[0], 3), value, np.uint8))


def edits(folder, counts=COUNTS, size=(16, 16)):
    folder.mkdir(parents=True)
    for number, count in enumerate(counts):
        plain(200 + number, size).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"edit {number}")
        for place in range(1, count + 1):
            ending = f"reference{place if place > 1 else ''}.png"
            plain(shade(number, place)).save(folder / f"{number}.{ending}")
    return folder


def in_folders(folder):
    """Move the references to folders: one for the first of each image, one for the second, …"""
    for place in (1, 2, 3):
        apart = folder.parent / f"place{place}"
        apart.mkdir()
        ending = f".reference{place if place > 1 else ''}.png"
        for path in folder.glob(f"*{ending}"):
            path.rename(apart / (path.name.removesuffix(ending) + ".png"))
    return ImageFolder(
        folder, reference_folder=[folder.parent / f"place{place}" for place in (1, 2, 3)]
    )


def in_columns(counts=COUNTS):
    columns = ("image", "first", "second", "third")
    rows = {name: [] for name in (*columns, "text")}
    for number, count in enumerate(counts):
        rows["text"].append(f"edit {number}")
        rows["image"].append(plain(200 + number))
        for place, name in enumerate(columns[1:], start=1):
            rows[name].append(plain(shade(number, place)) if place <= count else None)
    kinds = dict.fromkeys(columns, datasets.Image()) | {"text": datasets.Value("string")}
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    return HuggingFaceImages(made, reference=columns[1:])


@pytest.mark.parametrize("made", ["folder", "folders", "columns", "joined"])
def test_samples_contain_all_references_in_order(tmp_path, made):
    folder = edits(tmp_path / "edits")
    source = {
        "folder": lambda: ImageFolder(folder),
        "folders": lambda: in_folders(folder),
        "columns": in_columns,
        "joined": lambda: JoinedSources([ImageFolder(edits(tmp_path / "one", (1,))), in_columns()]),
    }[made]()
    offset = 1 if made == "joined" else 0
    images = PreparedImages(source, buckets=SQUARES)
    for number, count in enumerate(COUNTS):
        assert source.item(number + offset).references == count
        references = images[number + offset]["reference_images"]
        assert references.shape == (count, 3, 16, 16)
        seen = ((references.mean(dim=(1, 2, 3)) + 1) * 127.5).round().int().tolist()
        assert seen == [shade(number, place) for place in range(1, count + 1)]
    if offset:
        assert images[0]["reference_images"].shape == (1, 3, 16, 16)
    kinds = {"reference", "reference2", "reference3"}
    assert source.companions == kinds


def test_all_samples_of_a_batch_have_equally_many_references(tmp_path):
    folder = edits(tmp_path / "edits", (1, 2, 1, 2, 2, 3, 1))
    images = PreparedImages(ImageFolder(folder), buckets=SQUARES)
    assert sorted(bucket.references for bucket in images.assignment.members) == [1, 2, 3]
    assert "16x16 of 2" in images.assignment.table()
    stream = BucketStream(images, micro_batch_size=2)
    seen = {}
    for _ in range(12):
        batch = next(stream)
        count = batch["reference_images"].shape[1]
        seen[count] = seen.get(count, 0) + 1
        numbers = [int(words.split()[1]) for words in batch["captions"]]
        for number, references in zip(numbers, batch["reference_images"], strict=True):
            first = (references[0].mean() + 1) * 127.5
            assert round(float(first)) == shade(number, 1)
    assert set(seen) == {1, 2, 3}


def test_small_buckets_merge_only_with_equally_many_references(tmp_path):
    folder = edits(tmp_path / "edits", (1, 1, 2, 2))
    plain(9, (32, 16)).save(folder / "1.png")
    plain(9, (32, 16)).save(folder / "3.png")
    images = PreparedImages(
        ImageFolder(folder), buckets=AspectBuckets(area=32 * 16, step=16), minimum=2
    )
    members = {(b.references, b.width, b.height): m for b, m in images.assignment.members.items()}
    assert sorted(map(sorted, members.values())) == [[0, 1], [2, 3]]
    assert all(key[0] == (1 if 0 in of else 2) for key, of in members.items())


def test_folders_with_single_references_use_plain_buckets_and_unstacked_references(tmp_path):
    images = PreparedImages(ImageFolder(edits(tmp_path / "edits", (1, 1))), buckets=SQUARES)
    assert images[0]["reference_images"].shape == (3, 16, 16)
    assert type(images.assignment.placements[0].bucket).__name__ == "Bucket"
    assert images.companions == {"reference"}


def test_references_are_flipped_with_their_image_and_are_part_of_its_key(tmp_path):
    folder = edits(tmp_path / "edits", (2, 1))
    half = Image.new("RGB", (16, 16))
    half.paste((255, 255, 255), (0, 0, 8, 16))
    half.save(folder / "0.reference2.png")
    before = ImageFolder(folder)
    images = PreparedImages(before, buckets=SQUARES, augmentation=Augmentation(flip=1.0))
    second = images[0]["reference_images"][1]
    assert torch.equal(second[:, :, 8:], torch.ones(3, 16, 8))
    assert torch.equal(second[:, :, :8], -torch.ones(3, 16, 8))
    contents = before.content(0)
    plain(77).save(folder / "0.reference2.png")
    assert ImageFolder(folder).content(0) != contents


def test_an_image_without_its_first_reference_is_broken(tmp_path):
    folder = edits(tmp_path / "edits", (2, 2))
    (folder / "0.reference.png").unlink()
    assert [each.name for each in ImageFolder(folder).broken] == ["0.png"]
    (folder / "1.reference.png").unlink()
    with pytest.raises(DataError, match="no readable image"):
        ImageFolder(folder)
    (tmp_path / "place").mkdir()
    with pytest.raises(DataError, match="at most 10 references"):
        ImageFolder(folder, reference_folder=[tmp_path / "place"] * 11)
