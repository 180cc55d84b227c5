"""Each image size is read once, by one rank at the first start; later only for changed files."""

from __future__ import annotations

import io
import os
import shutil

import pytest
from PIL import Image

from tests.diffusion.data import workers
from tests.support.ranks import run_ranks
from zerotune.diffusion.data import ClipFolder, HuggingFaceImages, ImageFolder, images, sources
from zerotune.diffusion.data.images import image_size
from zerotune.errors import DataError


@pytest.fixture
def looked(tmp_path, monkeypatch):
    log = tmp_path / "looked"
    log.touch()
    monkeypatch.setattr(sources, "image_size", sources.image_size)
    workers.count_files(log)

    def count():
        lines = len(log.read_text().splitlines())
        log.write_text("")
        return lines

    return count


@pytest.fixture
def few(tmp_path, cuttings):
    root = tmp_path / "few"
    root.mkdir()
    for number, image in enumerate(cuttings[:6]):
        image.save(root / f"{number}.{('png', 'jpg')[number % 2]}")
    Image.new("L", cuttings[0].size).save(root / "0.mask.png")
    return root


def opened(root):
    return ImageFolder(root)


def sizes(source):
    return {source.item(index).name: source.item(index).size for index in range(len(source))}


def index_file(tmp_path):
    (file,) = (tmp_path / ".user-cache" / "zerotune" / "sizes").glob("*.sqlite")
    return file


def test_a_second_start_opens_no_file_and_records_that(few, looked, tmp_path):
    first = opened(few)
    assert looked() == 7, "six images and a mask"
    assert "data.sizes" not in {decision.key for decision in first.decisions}
    second = opened(few)
    assert looked() == 0
    assert sizes(second) == sizes(first)
    (told,) = (decision for decision in second.decisions if decision.key == "data.sizes")
    assert told.after == "6 from an earlier start"
    assert str(index_file(tmp_path)) in told.reason


def test_only_changed_files_are_opened_again(few, looked):
    opened(few)
    looked()
    turned = Image.open(few / "1.jpg").transpose(Image.Transpose.ROTATE_90)
    turned.save(few / "1.jpg")
    (few / "2.png").unlink()
    shutil.copy(few / "4.png", few / "6.png")
    found = sizes(opened(few))
    assert looked() == 2
    assert found["1.jpg"] == turned.size
    assert found["6.png"] == found["4.png"]
    assert "2.png" not in found
    os.utime(few / "0.mask.png", ns=(1, 1))
    opened(few)
    assert looked() == 2, "an image with the mask that belongs to it"
    (few / "0.mask.png").unlink()
    opened(few)
    assert looked() == 1


def test_broken_files_are_never_cached_as_intact(few, looked):
    opened(few)
    looked()
    whole = (few / "3.jpg").read_bytes()
    (few / "3.jpg").write_bytes(whole[:-60])
    for _ in range(2):
        assert [image.name for image in opened(few).broken] == ["3.jpg"]
        assert looked() == 1
    with pytest.raises(DataError, match=r"3\.jpg"):
        ImageFolder(few, on_broken="error")


def test_an_image_without_a_reference_is_broken_once_others_have_one(few, looked):
    opened(few)
    shutil.copy(few / "1.jpg", few / "1.reference.jpg")
    source = opened(few)
    assert list(sizes(source)) == ["1.jpg"]
    assert len(source.broken) == 5


def test_another_check_does_not_use_the_cached_sizes(few, looked):
    ImageFolder(few, check="header")
    looked()
    opened(few)
    assert looked() == 7


@pytest.mark.parametrize("content", [b"", b"no database" * 100, None])
def test_a_damaged_index_is_rewritten(few, looked, tmp_path, content):
    expected = sizes(opened(few))
    file = index_file(tmp_path)
    whole = file.read_bytes()
    # A page of the table, of which the header knows nothing.
    file.write_bytes(whole[:4096] + b"\xff" * 4096 + whole[8192:] if content is None else content)
    looked()
    assert sizes(opened(few)) == expected
    assert looked() == 7
    opened(few)
    assert looked() == 0


def test_an_unwritable_cache_folder_does_not_fail_the_run(few, looked, tmp_path, monkeypatch):
    place = tmp_path / "a file"
    place.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    for _ in range(2):
        source = opened(few)
        assert looked() == 7
        (told,) = (decision for decision in source.decisions if decision.key == "data.sizes")
        assert "cannot be written (Not a directory)" in told.reason


def test_ranks_share_the_reading_of_sizes(few, looked, tmp_path):
    place = {"XDG_CACHE_HOME": str(tmp_path / ".user-cache")}
    found = run_ranks(
        workers.open_counted, str(few), str(tmp_path / "looked"), world_size=3, env=place
    )
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 6
    assert looked() == 7, "one rank looked at each file"


def test_sizes_of_rows_are_cached_too(few, looked):
    datasets = pytest.importorskip("datasets")
    (few / "0.mask.png").unlink()
    rows = datasets.Dataset.from_dict(
        {"image": [{"bytes": path.read_bytes(), "path": None} for path in sorted(few.iterdir())]}
    )
    for expected in (6, 0):
        HuggingFaceImages(rows, caption=None)
        assert looked() == expected


def test_clips_are_decoded_only_once(tmp_path, cuttings, monkeypatch):
    frames = tmp_path / "clips" / "take"
    frames.mkdir(parents=True)
    for number in range(3):
        cuttings[0].save(frames / f"{number}.png")
    first = ClipFolder(tmp_path / "clips").item(0)
    decoded = []
    monkeypatch.setattr("zerotune.diffusion.data.videos.decode", decoded.append)
    assert ClipFolder(tmp_path / "clips").item(0) == first
    assert decoded == []


PLAIN = [{}, {"progressive": True}, {"quality": 20, "comment": b"c"}, {"restart_marker_rows": 1}]


def jpeg(mode="RGB", **how):
    file = io.BytesIO()
    Image.effect_noise((48, 32), 90).convert(mode).save(file, "JPEG", **how)
    return file.getvalue()


@pytest.mark.parametrize("how", [*PLAIN, {"mode": "L"}, {"mode": "CMYK"}], ids=str)
def test_the_size_of_a_plain_jpeg_file_is_read_without_pillow(how, tmp_path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(jpeg(**how))
    with monkeypatch.context() as patched:
        patched.setattr(images, "_open", None)
        assert image_size(jpeg(**how), "header") == (48, 32)
        assert image_size(tmp_path / "a.jpg", "header") == (48, 32)


@pytest.mark.parametrize("exif", [False, True])
def test_a_file_that_is_not_complete_is_broken(tmp_path, exif):
    tags = Image.Exif()
    tags[0x0112] = 6
    whole = jpeg(exif=tags) if exif else jpeg()
    size = (32, 48) if exif else (48, 32)
    png = io.BytesIO()
    Image.new("RGB", (48, 32)).save(png, "PNG")
    file = tmp_path / "image"
    for content in (whole, whole + bytes(5000)):
        file.write_bytes(content)
        assert image_size(content, "complete") == image_size(file, "complete") == size
    for content in (whole[:-9], png.getvalue()[:-20]):
        file.write_bytes(content)
        for given in (file, content):
            with pytest.raises(images.readable_errors()):
                image_size(given, "complete")


def test_a_jpeg_file_with_a_damaged_header_is_judged_as_pillow_judges_it(monkeypatch):
    content = jpeg()
    start, frame = content.index(b"\xff\xda"), content.index(b"\xff\xc0")
    changed = [
        *(content[:length] for length in range(0, start, 7)),
        *(content[: frame + at] + b"\0" + content[frame + at + 1 :] for at in range(10)),
        content.replace(b"\xff\xdb", b"\xff\xb0"),
        b"\xff\xd8" + content[start:],
        content,
    ]

    def judged():
        for each in changed:
            try:
                yield image_size(each, "header")
            except images.readable_errors():
                yield None

    ours = list(judged())
    monkeypatch.setattr(images, "_size_of_jpeg", lambda *_: None)
    assert ours == list(judged())
    assert ours.count(None) > 50
    assert ours[-1] == (48, 32)
