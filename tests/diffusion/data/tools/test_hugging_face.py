"""Datasets of other libraries give the stored bytes as upright, intact images."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from zerotune.diffusion.data import DatasetImages, HuggingFaceImages
from zerotune.errors import DataError


def pixels(image):
    return np.asarray(image.convert("RGB")).astype(int)


def test_hugging_face_datasets_yield_the_stored_bytes(cuttings, tmp_path, encode):
    datasets = pytest.importorskip("datasets")
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = [encode(image) for image in cuttings[:8]]
    stored[2] = stored[2][:60]
    stored[3] = encode(cuttings[3], "PNG", exif=exif)
    (tmp_path / "last.png").write_bytes(stored[7])
    rows = [{"bytes": data, "path": None} for data in stored[:7]]
    rows.append({"bytes": None, "path": str(tmp_path / "last.png")})
    dataset = datasets.Dataset.from_dict(
        {"image": rows, "text": [f"cutting {n}" for n in range(8)]},
        features=datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")}),
    )
    source = HuggingFaceImages(dataset)
    assert [image.name for image in source.broken] == ["2"]
    assert [source.item(i).caption for i in range(7)] == [
        f"cutting {n}" for n in (0, 1, 3, 4, 5, 6, 7)
    ]
    assert source.item(2).size == cuttings[3].size[::-1]
    assert np.array_equal(pixels(source.image(6)), pixels(cuttings[7]))
    assert len(HuggingFaceImages(dataset, caption=None)) == 7
    with pytest.raises(DataError, match=r"'words'.*image, text"):
        HuggingFaceImages(dataset, caption="words")


def test_local_webdataset_shards_are_read_by_the_datasets_library(cuttings, tmp_path, encode):
    datasets = pytest.importorskip("datasets")
    members = {}
    for number, image in enumerate(cuttings[:5]):
        members[f"set/{number:04}.png"] = encode(image)
        members[f"set/{number:04}.txt"] = f"cutting {number}".encode()
    shard = tmp_path / "0.tar"
    with tarfile.open(shard, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    rows = datasets.load_dataset(
        "webdataset", data_files=str(shard), split="train", cache_dir=str(tmp_path / "cache")
    )
    source = HuggingFaceImages(rows, image="png", caption="txt")
    assert [source.item(n).caption for n in range(5)] == [f"cutting {n}" for n in range(5)]
    assert source.encoded(3) == members["set/0003.png"]


def test_any_dataset_of_images_can_be_a_source(cuttings):
    pairs = [(image, number) for number, image in enumerate(cuttings[:6])]
    source = DatasetImages(pairs, image=lambda s: s[0], caption=lambda s: f"class {s[1]}")
    assert [source.item(index).caption for index in range(6)] == [f"class {n}" for n in range(6)]
    assert np.array_equal(pixels(source.image(4)), pixels(cuttings[4]))
    assert len({source.content(index) for index in range(6)}) == 6


def test_columns_and_folders_can_be_named(cuttings):
    image = cuttings[0]
    for samples, place, words in (
        ([{"picture": image, "text": "a cat"}], "picture", "text"),
        ([(image, "a cat")], 0, 1),
    ):
        source = DatasetImages(samples, image=place, caption=words)
        assert [source.item(n).caption for n in range(len(source))] == ["a cat"]


def test_a_missing_column_is_named(cuttings):
    samples = [{"picture": cuttings[0], "text": "a cat"}]
    with pytest.raises(DataError, match=r"image = 'image'.*'picture', 'text'"):
        DatasetImages(samples, image="image", caption="text")
    with pytest.raises(DataError, match="caption=lambda sample"):
        DatasetImages([cuttings[0]], image=lambda s: s, caption="text")
