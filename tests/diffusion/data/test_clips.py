"""Clips from files and folders: frames, buckets and cache keys."""

from __future__ import annotations

import io
import os
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.declared_pipelines import hunyuan_video, ltx, wan
from tests.support.needs import needs
from tests.support.ranks import ranks
from tests.support.sampling import nightly
from zerotune import DeepSpeedPlan, Trainer
from zerotune.diffusion import encode_dataset, load_pretrained
from zerotune.diffusion.data import (
    AspectBuckets,
    Augmentation,
    BucketStream,
    ClipBuckets,
    ClipFolder,
    PreparedClips,
)
from zerotune.diffusion.data.cache import CacheSettings, TensorCache
from zerotune.diffusion.data.caching import cache_latents
from zerotune.diffusion.data.clip_buckets import ClipItem
from zerotune.diffusion.data.order import Draw
from zerotune.diffusion.data.sources import JoinedSources, RepeatedSource
from zerotune.errors import DataError, InvalidValueError, MissingDependencyError
from zerotune.training.validate import ValidationImages

SMALL = AspectBuckets(area=16 * 16, step=8)


def frame(number, size=(16, 16)):
    """Make a frame with its number in every pixel."""
    return Image.new("RGB", size, (number, number, number))


def numbered(pixels):
    """Read the frame numbers from pixels (3, f, h, w) in [-1, 1]."""
    return ((pixels[0].mean((1, 2)) + 1) * 127.5).round().int().tolist()


def item(frames, rate=24, size=(16, 16), name="clip"):
    return ClipItem(name=name, size=size, frames=frames, rate=Fraction(rate))


def write_frames(folder, count, *, size=(16, 16), first=0):
    folder.mkdir(parents=True)
    for number in range(count):
        # Without leading zeros, numeric and alphabetical order differ.
        frame(first + number, size).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def root(tmp_path):
    """Make two folders of frames, long and short, with captions."""
    place = tmp_path / "clips"
    write_frames(place / "long", 12)
    write_frames(place / "deep" / "take.2", 5, first=100)
    (place / "long.txt").write_text("a long one")
    (place / "deep" / "take.2.txt").write_text("the second take")
    return place


def buckets(**options):
    return ClipBuckets(**{"sizes": SMALL, "frames": (1, 5, 9)} | options)


def test_folders_of_frames_become_clips_in_natural_numeric_order(root):
    (root / "stray.png").write_bytes((root / "long" / "0.png").read_bytes())
    source = ClipFolder(root, frame_rate=12)
    items = [source.item(index) for index in range(len(source))]
    assert [(each.name, each.frames, each.rate, each.caption) for each in items] == [
        ("deep/take.2", 5, 12, "the second take"),
        ("long", 12, 12, "a long one"),
    ]
    assert [image.getpixel((0, 0))[0] for image in source.frames(1, (2, 10, 11, 11))] == [
        2, 10, 11, 11,
    ]  # fmt: skip
    assert [broken.name for broken in source.broken] == ["stray.png"]
    assert {decision.key for decision in source.decisions} == {
        "data.captions", "data.frame_rate", "data.broken",
    }  # fmt: skip
    again = RepeatedSource(JoinedSources([source, source]), times=2)
    assert again.item(7).name == "1/long"
    assert again.frames(7, (3,))[0].getpixel((0, 0))[0] == 3


def test_a_clip_gets_the_longest_length_it_fills_and_uses_its_middle_frames(root):
    dataset = PreparedClips(ClipFolder(root), buckets=buckets())
    short, long = dataset.assignment.placements
    assert str(short.bucket) == "16x16x5"
    assert str(long.bucket) == "16x16x9"
    assert numbered(dataset[0]["images"]) == [100, 101, 102, 103, 104]
    sample = dataset[1]
    assert sample["images"].shape == (3, 9, 16, 16)
    # Of twelve frames, one before and two after are left out.
    assert numbered(sample["images"]) == list(range(1, 10))
    assert sample["captions"] == "a long one"
    assert sample["target_sizes"].tolist() == [16, 16]
    (unused,) = [d for d in dataset.decisions if d.key == "clips.frames"]
    assert (unused.before, unused.after) == (17, 14)
    batch = next(BucketStream(dataset, micro_batch_size=2, shuffle=False))
    assert batch["images"].shape == (2, 3, 5, 16, 16)


@pytest.mark.parametrize(
    ("rate", "fps", "frames", "wanted"),
    [
        (24, None, 5, [0, 1, 2, 3, 4]),
        (24, 12, 9, [0, 2, 4, 6, 8]),
        (24, 16, 7, [0, 2, 3, 5, 6]),
        (Fraction(30000, 1001), 15, 9, [0, 2, 4, 6, 8]),
        (8, 16, 3, [0, 1, 1, 2, 2]),
        (24, 12, 12, [1, 3, 5, 7, 9]),
    ],
)
def test_the_frames_nearest_in_time_are_chosen(rate, fps, frames, wanted):
    (placement,) = buckets(fps=fps, frames=(5,)).assign([item(frames, rate)]).placements
    assert list(placement.numbers) == wanted
    assert placement.fps == (fps or rate)


def test_repeated_frames_give_a_warning():
    found = buckets(fps=48, frames=(5,)).assign([item(5), item(9, rate=60)])
    (slow,) = [decision for decision in found.decisions if decision.key == "clips.fps"]
    assert slow.severity == "warning"
    assert slow.reason.startswith("1 of 2 clips")


def test_only_clip_lengths_that_the_vae_accepts_are_valid():
    with pytest.raises(InvalidValueError, match=r"more than a multiple of 4.*write 13 or 17"):
        buckets(frames=(16,))
    assert buckets(frames=[17, 9, 9], compression=8).frames == (9, 17)
    for wrong in ({"frames": ()}, {"frames": (0,)}, {"fps": 0}, {"compression": 0}):
        with pytest.raises(InvalidValueError):
            buckets(**wrong)
    with pytest.raises(DataError, match=r"1 of 2 clips are too short.*b \(4\)"):
        buckets(frames=(5, 9)).assign([item(12, name="a"), item(4, name="b")])


def test_rare_shapes_join_a_fuller_bucket_of_the_same_length():
    items = [item(9)] * 3 + [item(9, size=(64, 32))] + [item(5, size=(64, 32))] * 2
    found = buckets(sizes=AspectBuckets(area=32 * 32, step=8)).assign(items, minimum=2)
    assert [str(placement.bucket) for placement in found.placements] == [
        *["32x32x9"] * 4, *["40x24x5"] * 2,
    ]  # fmt: skip
    assert found.placements[3].resized == (64, 32)


def test_all_frames_are_cropped_and_flipped_alike(tmp_path):
    place = tmp_path / "clips" / "moving"
    place.mkdir(parents=True)
    colors = np.random.default_rng(0)
    for number in range(5):
        # The detail moves to the right; all frames keep their middle.
        pixels = np.zeros((16, 64, 3), np.uint8)
        pixels[:, 12 * number : 12 * number + 12] = colors.integers(0, 255, (16, 12, 3))
        Image.fromarray(pixels).save(place / f"{number}.png")
    options = {
        "buckets": buckets(sizes=AspectBuckets(area=256, step=8, max_aspect=1), frames=(5,)),
    }
    plain = PreparedClips(ClipFolder(tmp_path / "clips"), **options)[0]
    mirrored = PreparedClips(
        ClipFolder(tmp_path / "clips"), augmentation=Augmentation(flip=1.0), **options
    )[0]
    assert plain["crop_corners"].tolist() == [0, 24]
    assert plain["images"][:, 2].std() > 0.1
    assert plain["images"][:, 4].unique().tolist() == [-1.0], "cut where the others are"
    assert torch.equal(mirrored["images"], plain["images"].flip(-1))


def test_frames_and_rate_are_part_of_the_cache_key(root, tmp_path):
    settings = CacheSettings(kind="latents", model="middle", dtype="float32")
    seen = []

    def encode(clips):
        seen.extend(numbered(clip) for clip in clips)
        return {"latents": clips[:, :1, ::4, ::8, ::8]}

    def fill(**options):
        seen.clear()
        source = ClipFolder(root, frame_rate=options.pop("frame_rate", 24))
        dataset = PreparedClips(source, buckets=buckets(**options))
        cache_latents(dataset, cache=TensorCache(tmp_path, settings=settings), encode=encode)
        return len(seen)

    assert fill() == 2
    assert fill() == 0
    assert fill(frames=(1, 5)) == 1, "only the long one became another"
    assert fill(fps=12) == 2
    assert fill(fps=12, frame_rate=12) == 2
    assert fill(fps=12) == 0
    (root / "long" / "3.png").write_bytes((root / "long" / "4.png").read_bytes())
    assert fill() == 1


def test_broken_clips_are_skipped_or_refused(root):
    (root / "long" / "7.png").write_bytes(b"no image")
    write_frames(root / "mixed", 2)
    frame(0, (8, 8)).save(root / "mixed" / "1.png")
    source = ClipFolder(root)
    assert [source.item(index).name for index in range(len(source))] == ["deep/take.2"]
    reasons = {broken.name: broken.reason for broken in source.broken}
    assert "format is unknown" in reasons["long"]
    assert "different sizes: 8x8, 16x16" in reasons["mixed"]
    with pytest.raises(DataError, match=r"different sizes|format is unknown"):
        ClipFolder(root, on_broken="error")
    fast = ClipFolder(root, check="first")
    assert len(fast) == 3
    with pytest.raises(DataError, match=r'^long.*check="whole"'):
        fast.frames(1, range(12))
    with pytest.raises(DataError, match="is not a folder"):
        ClipFolder(root / "long.txt")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_named_pipe_among_the_frames_does_not_block(root):
    source = ClipFolder(root)
    (last,) = (n for n in range(len(source)) if source.item(n).name == "long")
    (root / "long" / "7.png").unlink()
    with pytest.raises(DataError, match="No such file"):
        source.content(last)
    os.mkfifo(root / "long" / "7.png")
    for read in (source.content, lambda clip: source.frames(clip, [7])):
        with pytest.raises(DataError, match="not a regular file"):
            read(last)
    assert [broken.name for broken in ClipFolder(root).broken] == ["long"]


def test_a_missing_pyav_names_the_extra(root, monkeypatch):
    (root / "film.mp4").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MissingDependencyError, match=r"zerotune\[video\]"):
        ClipFolder(root)


def film(frames, *, fps):
    """Return an MPEG-4 file with the given frames."""
    content = io.BytesIO()
    with needs("av").open(content, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps, options={"qscale": "1"})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for picture in frames:
            container.mux(stream.encode(needs("av").VideoFrame.from_image(picture)))
        container.mux(stream.encode(None))
    return content.getvalue()


def test_videos_are_read_frame_by_frame(tmp_path):
    needs("av")
    films = tmp_path / "films"
    films.mkdir()
    (films / "steps.mp4").write_bytes(film([frame(20 * n) for n in range(11)], fps=12))
    (films / "steps.txt").write_text("brighter and brighter")
    (films / "thumb.png").write_bytes(b"")
    (films / "cut.mp4").write_bytes((films / "steps.mp4").read_bytes()[:400])
    for check in ("whole", "first"):
        source = ClipFolder(films, check=check)
        assert [broken.name for broken in source.broken] == ["thumb.png", "cut.mp4"]
        found = source.item(0)
        assert (found.frames, found.rate, found.size) == (11, 12, (16, 16))
    dataset = PreparedClips(source, buckets=buckets(fps=6, frames=(5,)))
    assert dataset[0]["captions"] == "brighter and brighter"
    got = numbered(dataset[0]["images"])
    assert all(abs(a - b) <= 4 for a, b in zip(got, [20, 60, 100, 140, 180], strict=True))
    with pytest.raises(DataError, match="ends after 11 frames"):
        source.frames(0, (2, 30))
    twice = dataset.contents
    assert twice == PreparedClips(source, buckets=buckets()).contents


def test_rotated_videos_are_turned_upright(tmp_path):
    needs("av")
    lying = Image.new("RGB", (32, 16))
    lying.paste((255, 255, 255), (0, 0, 8, 8))
    content = bytearray(film([lying] * 2, fps=8))
    # The track's rotation matrix, as a phone held upright writes it.
    matrix = content.find(b"tkhd") + 44
    content[matrix : matrix + 36] = struct.pack(
        ">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 16 << 16, 0, 1 << 30
    )
    (tmp_path / "turned.mp4").write_bytes(content)
    source = ClipFolder(tmp_path)
    assert source.item(0).size == (16, 32)
    (upright,) = source.frames(0, (1,))
    corners = [upright.getpixel(place)[0] > 150 for place in ((1, 1), (14, 1), (1, 30), (14, 30))]
    assert corners == [False, True, False, False]


@pytest.mark.parametrize("make", [wan, *nightly(ltx, hunyuan_video)])
def test_caches_hold_latents_with_a_frame_axis(make, root, tmp_path):
    family = load_pretrained(make(tmp_path / "model"), frozen_dtype="fp32").family
    space = family.parts.latents
    lengths = (1, 1 + 2 * space.frames)
    with pytest.raises(DataError, match="must be 1 more than a multiple"):
        family.encode_images(torch.zeros(1, 3, 2 + space.frames, 16, 16))
    dataset = PreparedClips(
        ClipFolder(root),
        buckets=ClipBuckets(
            sizes=AspectBuckets(area=32 * 32, step=32, max_aspect=1),
            frames=lengths,
            compression=space.frames,
        ),
    )
    cached = encode_dataset(dataset, family=family, folder=tmp_path / "cache", progress=False)
    for index in range(2):
        use = Draw(index=index, epoch=0)
        latents = cached[use]["latents"]
        frames = space.latent_frames(dataset.assignment.placements[index].bucket.frames)
        side = 32 // space.scale
        assert latents.shape == (space.channels, frames, side, side)
        plain = family.clean({"images": dataset[use]["images"][None]})[0]
        torch.testing.assert_close(latents, plain)


@pytest.mark.deepspeed
@ranks(1)
def test_wan_trains_on_a_folder_of_frames_and_saves_validation_clips(root, tmp_path):
    model = wan(tmp_path / "wan")
    loaded = load_pretrained(model, frozen_dtype="fp32")
    before = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    buckets = ClipBuckets(
        sizes=AspectBuckets(area=16 * 16, step=8),
        frames=(5,),
        compression=loaded.family.parts.latents.frames,
    )
    cached = encode_dataset(
        PreparedClips(ClipFolder(root), buckets=buckets),
        family=loaded.family,
        folder=f"{tmp_path}/cache",
        progress=False,
    )
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="fp32", micro_batch_size=1, optimizer="AdamW", lr=1e-3
    )
    previews = ValidationImages(
        every=2, folder=f"{tmp_path}/previews", prompts=["a long one"], frames=3, size=(16, 16),
        steps=1,
    )  # fmt: skip
    with Trainer(model=loaded, plan=plan, data=cached, callbacks=[previews]) as trainer:
        assert np.isfinite(trainer.fit(steps=2).losses).all()
        trained = dict(trainer.engine.master_weights.gather())
        assert any(not torch.equal(trained[n].cpu(), before[n]) for n in before)
        assert cached[0]["latents"].shape == (4, 3, 8, 8)
        with Image.open(tmp_path / "previews" / "step-00000002.png") as preview:
            assert preview.n_frames == 3
            assert preview.info["duration"] == pytest.approx(1000 / 16)
        assert len(list((tmp_path / "previews").iterdir())) == 2
