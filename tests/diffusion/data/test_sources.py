"""Every source gives the same images, upright and intact, and reports those it left out."""

from __future__ import annotations

import json
import logging
import os
import sys

import numpy as np
import pytest
from PIL import Image

from tests.support.sampling import nightly
from zerotune.decisions import _announced
from zerotune.diffusion.data import (
    DatasetImages,
    HuggingFaceImages,
    ImageFolder,
    MetadataFile,
    Preparation,
    TextBeside,
)
from zerotune.diffusion.data.sources import JoinedSources, RepeatedSource
from zerotune.errors import DataError, InvalidValueError, MissingDependencyError


def pixels(image):
    return np.asarray(image.convert("RGB")).astype(int)


def test_a_folder_yields_all_its_images_and_lists_the_broken_ones(folder, broken_names, caplog):
    _announced.clear()
    with caplog.at_level(logging.WARNING, logger="zerotune"):
        source = ImageFolder(folder)
    assert len(source) == 300
    names = [source.item(index).name for index in range(300)]
    assert names == sorted(names)
    item = source.item(names.index("part1/004.JPG"))
    assert item.caption == "cutting 4"
    assert item.size == source.image(names.index("part1/004.JPG")).size
    assert tuple(image.name for image in source.broken) == broken_names
    assert all("cannot be read" in image.reason for image in source.broken)
    choice, broken = source.decisions
    assert (choice.key, choice.after) == ("data.captions", ".txt")
    assert (broken.before, broken.after) == (304, 300)
    assert "4 images are skipped: cut.jpg" in caplog.text


def test_broken_files_stop_the_run_when_asked_and_are_never_used_unnoticed(folder, tmp_path):
    with pytest.raises(DataError, match=r'cut.jpg.*on_broken="skip"'):
        ImageFolder(folder, on_broken="error")
    # Only the end of this file is missing, which its header does not show.
    quick = ImageFolder(folder, check="header")
    assert "cut.jpg" not in [image.name for image in quick.broken]
    assert len(quick) == 301
    with pytest.raises(DataError, match=r'cut.jpg.*check="whole"'):
        quick.image(0)
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "text.png":
            path.unlink()
    with pytest.raises(DataError, match="no readable image"):
        ImageFolder(folder)
    with pytest.raises(DataError, match="not a folder"):
        ImageFolder(tmp_path / "nowhere")


def test_captions_come_from_whichever_metadata_files_exist(tmp_path, photos):
    small = photos[0].resize((32, 24))
    for name in ("a.png", "b.png"):
        small.save(tmp_path / name)
    (tmp_path / "b.txt").write_text("from beside")
    (tmp_path / "metadata.csv").write_text('file_name,text\na.png,"one, two"\ngone.png,x\n')
    by_csv = ImageFolder(tmp_path)
    assert [by_csv.item(index).caption for index in range(2)] == ["one, two", ""]
    assert [image.name for image in by_csv.broken] == ["gone.png"]
    assert "does not exist" in by_csv.broken[0].reason
    assert by_csv.decisions[-1].reason.startswith("1 of 2 images have no caption (b.png")
    with pytest.raises(DataError, match=r"gone.png"):
        ImageFolder(tmp_path, on_broken="error")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "lines"}\n')
    assert ImageFolder(tmp_path).item(0).caption == "lines"
    (tmp_path / "own.csv").write_text("path,words\n.\\b.png,mine\n")
    own = MetadataFile(name="own.csv", file="path", caption="words")
    assert ImageFolder(tmp_path, captions=own).item(1).caption == "mine"
    with pytest.raises(DataError, match=r"other\.jsonl"):
        ImageFolder(tmp_path, captions=MetadataFile(name="other.jsonl"))
    (tmp_path / "metadata.jsonl").unlink()
    (tmp_path / "metadata.csv").unlink()
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"b.txt.*UTF-8"):
        ImageFolder(tmp_path)


def test_an_image_may_have_several_captions(tmp_path, photos):
    small = photos[0].resize((32, 24))
    for name in ("a.png", "b.png", "c.png"):
        small.save(tmp_path / name)
    (tmp_path / "a.txt").write_text("a temple\n\n  seen from afar \n")
    (tmp_path / "b.txt").write_text("one\nstory")

    def told(source):
        return [source.item(index).captions for index in range(len(source))]

    assert told(ImageFolder(tmp_path)) == [("a temple\n\n  seen from afar",), ("one\nstory",), ()]
    lines = ImageFolder(tmp_path, captions=TextBeside(words="lines"))
    assert told(lines) == [("a temple", "seen from afar"), ("one", "story"), ()]
    several = [d for d in lines.decisions if d.before == "several"]
    assert several[0].reason.startswith("2 of 3 images have several captions")
    joined = RepeatedSource(JoinedSources([lines, lines]), times=2)
    assert joined.item(9).captions == ("a temple", "seen from afar")
    rows = [{"file_name": "a.png", "text": ["one", "", "two"]}, {"file_name": "b.png", "text": "b"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert told(ImageFolder(tmp_path)) == [("one", "two"), ("b",), ()]
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": ["one", 2]}')
    with pytest.raises(DataError, match=r"line 1 has no text in column 'text'"):
        ImageFolder(tmp_path)
    data = [{"image": small, "words": ["p", "q"]}]
    assert told(DatasetImages(data, image="image", caption="words")) == [("p", "q")]


def beside(folder, photos, *, masks=(0, 1), references=(0, 1)):
    """Write two images, with masks and references beside them."""
    folder.mkdir(exist_ok=True)
    for number in range(2):
        photos[number].resize((40, 32)).save(folder / f"{number}.jpg")
        (folder / f"{number}.txt").write_text(f"picture {number}")
        if number in masks:
            half = Image.new("L", (20, 16))
            half.paste(255, (0, 0, 10, 16))
            half.save(folder / f"{number}.mask.png")
        if number in references:
            photos[1 - number].resize((64, 64)).save(folder / f"{number}.reference.webp")
    return folder


def test_masks_and_references_are_found_beside_images(tmp_path, photos):
    whole = beside(tmp_path / "whole", photos, masks=(1,))
    source = ImageFolder(whole)
    assert [source.item(index).caption for index in range(2)] == ["picture 0", "picture 1"]
    assert source.companions == {"mask", "reference"}
    assert source.companion(0, "mask") is None
    assert source.companion(1, "mask").size == (20, 16)
    assert source.companion(0, "reference").size == (64, 64)
    found = {decision.key: decision.after for decision in source.decisions}
    assert (found["data.masks"], found["data.references"]) == (1, 2)
    bare = beside(tmp_path / "bare", photos, masks=(), references=())
    plain = ImageFolder(bare)
    assert plain.companions == frozenset()
    assert plain.content(0) != ImageFolder(whole).content(0), "a reference is part of an image"
    ignored = ImageFolder(whole, masks=None, references=None)
    assert len(ignored) == 5
    other_names = beside(tmp_path / "own", photos)
    (other_names / "0.mask.png").rename(other_names / "0.where.png")
    assert [image.name for image in ImageFolder(other_names).broken] == ["0.where.png"]
    assert ImageFolder(other_names, masks="where").companions == {"mask", "reference"}
    joined = RepeatedSource(JoinedSources([ImageFolder(whole), ImageFolder(whole)]), times=2)
    assert joined.companions == {"mask", "reference"}
    assert joined.companion(7, "mask").size == (20, 16)
    with pytest.raises(DataError, match="no references"):
        JoinedSources([ImageFolder(whole), plain])
    without = JoinedSources([ImageFolder(whole, references=None), plain])
    assert without.companions == {"mask"}
    assert without.companion(len(without) - 1, "mask") is None


def test_an_image_with_a_broken_mask_or_reference_is_broken(tmp_path, photos):
    folder = beside(tmp_path / "one", photos, references=(0,))
    assert "has no reference" in ImageFolder(folder).broken[0].reason
    folder = beside(tmp_path / "two", photos)
    photos[0].resize((16, 20)).save(folder / "1.mask.png")
    (folder / "0.reference.webp").write_bytes(b"no")
    with pytest.raises(DataError, match="no readable image"):
        ImageFolder(folder)
    (folder / "0.reference.webp").write_bytes((folder / "1.reference.webp").read_bytes())
    source_broken = {image.name: image.reason for image in ImageFolder(folder).broken}
    assert "the mask (16x20) and the image (40x32) differ in aspect ratio" in source_broken["1.jpg"]
    with pytest.raises(DataError, match=r"1\.jpg"):
        ImageFolder(folder, on_broken="error")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_named_pipe_among_the_images_does_not_block(tmp_path, photos):
    folder = beside(tmp_path / "one", photos)
    os.mkfifo(folder / "2.png")
    assert [broken.name for broken in ImageFolder(folder).broken] == ["2.png"]
    source = ImageFolder(folder)
    path = folder / source.item(0).name
    path.unlink()
    os.mkfifo(path)
    for read in (source.image, source.content):
        with pytest.raises(DataError, match="not a regular file"):
            read(0)


def test_files_deleted_after_the_start_are_named(tmp_path, photos):
    folder = beside(tmp_path / "one", photos)
    source = ImageFolder(folder)
    (folder / "0.reference.webp").unlink()
    with pytest.raises(DataError, match=r"0\.reference\.webp: .*cannot be read \(No such file"):
        source.content(0)


def test_a_caption_with_an_unpaired_surrogate_is_refused_by_name(tmp_path, photos):
    photos[0].resize((32, 24)).save(tmp_path / "a.png")
    line = '{"file_name": "a.png", "text": ["whole", "half \\ud800"]}\n'
    (tmp_path / "metadata.jsonl").write_text(line)
    with pytest.raises(InvalidValueError, match=r"caption of a\.png.*unpaired surrogate"):
        ImageFolder(tmp_path)


# Operations that turn stored pixels upright, by orientation (EXIF 2.3, 4.6.4.A, tag 274).
ORIENTATIONS = {
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.transpose(1, 0, 2),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: p.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda p: np.rot90(p, 1),
}


@pytest.mark.parametrize("orientation", [1, 2, 6, *nightly(3, 4, 5, 7, 8)])
@pytest.mark.parametrize("check", ["whole", "header"])
def test_photographs_are_turned_upright(orientation, check, tmp_path, photos):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = photos[0].resize((160, 107))
    stored.save(tmp_path / "photo.jpg", exif=exif, quality=95)
    stored.save(tmp_path / "photo.png", exif=exif)
    source = ImageFolder(tmp_path, check=check)
    wanted = ORIENTATIONS[orientation](pixels(stored))
    for index in range(2):
        assert source.item(index).size == (wanted.shape[1], wanted.shape[0])
        assert source.image(index).size == source.item(index).size
        assert np.abs(pixels(source.image(index)) - wanted).mean() < 4
    assert np.array_equal(pixels(source.image(1)), wanted)


@pytest.mark.parametrize("check", ["complete", "whole"])
def test_photographs_of_few_pixels_are_read(check, tmp_path):
    stored = Image.new("RGB", (7, 1), "red")
    stored.save(tmp_path / "photo.jpg")
    # Bytes after the end of a file make even the quick check decode it.
    with (tmp_path / "photo.jpg").open("ab") as file:
        file.write(b"more")
    assert ImageFolder(tmp_path, check=check).item(0).size == (7, 1)


def test_images_of_every_mode_keep_their_brightness(tmp_path, photos):
    small = photos[1].resize((20, 10))
    gray = small.convert("L")
    small.convert("CMYK").save(tmp_path / "cmyk.tif")
    gray.save(tmp_path / "gray.png")
    small.quantize(32).save(tmp_path / "palette.png")
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    deep.save(tmp_path / "sixteen.png")
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "float.tif")
    Image.fromarray(np.asarray(gray).astype(np.int32)).save(tmp_path / "thirty-two.tif")
    source = ImageFolder(tmp_path)
    assert [image.name for image in source.broken] == ["float.tif", "thirty-two.tif"]
    assert "floating-point" in source.broken[0].reason
    assert "32 bits" in source.broken[1].reason
    images = {source.item(i).name: source.image(i) for i in range(len(source))}
    assert {image.mode for image in images.values()} == {"RGB"}
    assert np.array_equal(pixels(images["sixteen.png"]), pixels(gray))
    assert np.array_equal(pixels(images["gray.png"]), pixels(gray))
    assert np.abs(pixels(images["cmyk.tif"]) - pixels(small)).mean() < 4
    assert np.abs(pixels(images["palette.png"]) - pixels(small)).mean() < 20


def test_missing_packages_are_named_with_their_extra(monkeypatch, tmp_path, photos):
    photos[0].resize((8, 8)).save(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"datasets: .*zerotune\[data\]"):
        HuggingFaceImages([])
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingDependencyError, match="pillow: "):
        ImageFolder(tmp_path)


def test_sources_can_be_concatenated_and_repeated(folder, cuttings):
    whole = ImageFolder(folder)
    first = DatasetImages([cuttings[0]], image=lambda s: s, caption=lambda _: "class")
    both = JoinedSources([RepeatedSource(first, times=5), whole])
    assert len(both) == 305
    assert both.item(4).name == "0/0"
    assert both.item(5).name == "1/part0/000.png"
    assert both.content(5) == whole.content(0)
    assert np.array_equal(pixels(both.image(3)), pixels(cuttings[0]))
    assert both.broken == whole.broken
    assert both.decisions == (*first.decisions, *whole.decisions)
    with pytest.raises(IndexError):
        both.item(305)
    with pytest.raises(InvalidValueError, match="times = 0"):
        RepeatedSource(first, times=0)
    with pytest.raises(DataError, match="at least one"):
        JoinedSources([])


def test_policies_can_be_given_by_name(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.jpg")
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:-500])
    lines = ImageFolder(tmp_path, captions=TextBeside(words="lines"), check="whole")
    assert lines.item(0).captions == ("one", "two")
    assert [image.name for image in lines.broken] == ["b.jpg"]
    assert len(ImageFolder(tmp_path, check="header")) == 2
    for call, words in (
        (lambda: ImageFolder(tmp_path, on_broken="ignore"), r"on_broken = .*'skip', 'error'"),
        (lambda: ImageFolder(tmp_path, on_broken=3), r"on_broken = .*'skip', 'error'"),
        (lambda: ImageFolder(tmp_path, check="quick"), r"= 'quick': .*'whole', 'header'"),
        (lambda: TextBeside(words="line"), r"words = 'line': .*'whole', 'lines'"),
        (lambda: Preparation(alpha="green"), r"alpha = 'green': .*'white', 'black', 'drop'"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            call()


def test_a_dataset_column_can_be_a_reference(photos):
    datasets = pytest.importorskip("datasets")
    rows = {"image": photos[:2], "text": ["a", "b"], "edges": [photos[1], photos[0]]}
    features = {"image": datasets.Image(), "text": datasets.Value("string")}
    features["edges"] = datasets.Image()
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    source = HuggingFaceImages(table, reference="edges")
    assert source.companions == {"reference"}
    assert source.companion(0, "reference").tobytes() == source.image(1).tobytes()
    assert source.content(0) != HuggingFaceImages(table).content(0)
    with pytest.raises(DataError, match="reference"):
        HuggingFaceImages(table, reference="depth")
