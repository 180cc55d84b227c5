"""Caches of latents and embeddings are complete, never stale, and intact after a kill."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import zlib
from collections import Counter
from unittest.mock import Mock

import attrs
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from tests.support.sampling import nightly
from zerotune.diffusion.data import (
    AspectBuckets,
    Augmentation,
    ImageFolder,
    Preparation,
    PreparedImages,
    TagShuffle,
    TextBeside,
)
from zerotune.diffusion.data.cache import CacheSettings, TensorCache, hash_weights
from zerotune.diffusion.data.caching import CachedImages, cache_latents, cache_texts
from zerotune.diffusion.data.order import Draw
from zerotune.errors import DataError, InvalidValueError

SMALL = AspectBuckets(area=32 * 32, step=8)
LATENTS = CacheSettings(kind="latents", model="averaging", dtype="float32", settings={"factor": 8})
TEXTS = CacheSettings(kind="text", model="letters", dtype="float32", settings={"length": 4})


class Encoder:
    """A fake VAE that averages 8x8 blocks and records its inputs."""

    def __init__(self):
        self.seen = []
        self.batches = []

    def __call__(self, images):
        self.seen += [image.numpy().tobytes() for image in images]
        self.batches.append(len(images))
        return {"latents": torch.nn.functional.avg_pool2d(images, 8)}


def letters(texts):
    codes = [[float(ord(letter)) for letter in (text + "    ")[:4]] for text in texts]
    return {"prompt_embeds": torch.tensor(codes), "pooled": torch.tensor(codes).sum(1)}


def dataset_of(folder, *, flip=0.0, dropout=0.0, **options):
    return PreparedImages(
        ImageFolder(folder),
        buckets=options.pop("buckets", SMALL),
        augmentation=Augmentation(flip=flip, caption_dropout=dropout),
        **options,
    )


def fill(dataset, root, encode, *, settings=LATENTS, **options):
    cache = TensorCache(root, settings=settings)
    cache_latents(dataset, cache=cache, encode=encode, **{"shard_size": 40} | options)
    return cache


def nothing():
    """Do nothing: the barrier of ranks that run one after the other."""


@pytest.fixture
def some(folder):
    """Return a folder of 60 images."""
    for path in folder.rglob("*.*"):
        if path.stem.isdigit() and int(path.stem) >= 60:
            path.unlink()
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_image_is_encoded_once_across_all_ranks(some, tmp_path, ranks):
    dataset = dataset_of(some, flip=0.5)
    encoder = Encoder()
    caches = [
        fill(dataset, tmp_path, encoder, rank=rank, world_size=ranks, barrier=nothing)
        for rank in range(ranks)
    ]
    assert len(caches[-1]) == 120
    assert sum(encoder.batches) == 120
    assert max(encoder.batches) == 4
    again = Encoder()
    assert len(fill(dataset, tmp_path, again)) == 120
    assert again.seen == []
    caches[0].refresh()
    assert len(caches[0]) == 120


def test_cached_samples_equal_those_encoded_from_pixels(some, tmp_path):
    options = {"flip": 0.5, "dropout": 0.3}
    dataset = dataset_of(some, **options)
    latents = fill(dataset, tmp_path, Encoder())
    texts = TensorCache(tmp_path, settings=TEXTS)
    captions = [dataset.source.item(index).caption for index in range(len(dataset))]
    cache_texts(captions, cache=texts, encode=letters, batch_size=7, shard_size=20)
    assert len(texts) == 61
    cached = CachedImages(dataset, latents=latents, texts=texts)
    for index in range(0, 60, 7):
        for epoch in range(3):
            draw = Draw(index=index, epoch=epoch)
            plain, sample = dataset[draw], cached[draw]
            wanted = Encoder()(plain["images"][None])["latents"][0]
            torch.testing.assert_close(sample["latents"], wanted)
            assert torch.equal(
                sample["prompt_embeds"], letters([plain["captions"]])["prompt_embeds"][0]
            )
            assert sample["pooled"].shape == ()
            for name in ("original_sizes", "crop_corners", "target_sizes"):
                assert torch.equal(sample[name], plain[name])
    assert CachedImages(dataset, latents=latents)[3]["captions"] == dataset[3]["captions"]


def test_every_variant_of_a_caption_is_cached(some, tmp_path):
    for path in some.rglob("*.txt"):
        path.write_text(f"{path.stem}, a, b, c\n{path.stem}, d, e, f")
    source = ImageFolder(some, captions=TextBeside(words="lines"))

    def dataset(orders):
        tags = TagShuffle(kept=1, orders=orders)
        return PreparedImages(source, buckets=SMALL, augmentation=Augmentation(tags=tags))

    def encode(texts):
        return {"prompt_embeds": torch.tensor([[float(zlib.crc32(t.encode()))] for t in texts])}

    shuffled = dataset(4)
    latents, texts = fill(shuffled, tmp_path, Encoder()), TensorCache(tmp_path, settings=TEXTS)
    cache_texts(shuffled.texts(), cache=texts, encode=encode)
    cached = CachedImages(shuffled, latents=latents, texts=texts)
    seen = set()
    for epoch in range(20):
        draw = Draw(index=5, epoch=epoch)
        told = shuffled.caption(draw)
        assert torch.equal(cached[draw]["prompt_embeds"], encode([told])["prompt_embeds"][0])
        seen.add(told)
    assert 4 < len(seen) <= 8
    with pytest.raises(InvalidValueError, match=r"cannot be cached.*TagShuffle\(orders=8\)"):
        CachedImages(dataset(None), latents=latents, texts=texts)
    assert "captions" in CachedImages(dataset(None), latents=latents)[3]


def test_masks_and_references_are_cached_with_their_image(tmp_path, photos):
    folder = tmp_path / "edits"
    folder.mkdir()
    for number in range(2):
        photos[number].resize((32, 32)).save(folder / f"{number}.png")
        photos[1 - number].resize((32, 32)).save(folder / f"{number}.reference.png")
    half = Image.new("L", (32, 32))
    half.paste(255, (0, 0, 20, 32))
    half.save(folder / "1.mask.png")
    encoder = Encoder()
    dataset = dataset_of(folder, flip=0.5)
    cached = CachedImages(dataset, latents=fill(dataset, tmp_path, encoder))
    assert len(encoder.seen) == 8, "two images and two references, each mirrored too"
    for draw in (Draw(index=index, epoch=epoch) for index in range(2) for epoch in range(6)):
        plain, sample = dataset[draw], cached[draw]
        for kind in ("", "reference_"):
            wanted = Encoder()(plain[f"{kind or ''}images"][None])["latents"][0]
            torch.testing.assert_close(sample[f"{kind}latents"], wanted)
        assert sample["loss_masks"].shape == (1, 4, 4)
        wanted = torch.nn.functional.avg_pool2d(plain["loss_masks"], 8)
        torch.testing.assert_close(sample["loss_masks"], wanted)
    # 20 of 32 pixel columns are 2.5 of 4 latent columns.
    upright = next(d for d in (Draw(index=1, epoch=e) for e in range(9))
                   if not dataset.augmentation.flips(d))  # fmt: skip
    row = cached[upright]["loss_masks"][0, 0]
    torch.testing.assert_close(row, torch.tensor([1.0, 1.0, 0.5, 0.0]), atol=0.02, rtol=0)

    def again():
        encoder.seen.clear()
        fill(dataset_of(folder, flip=0.5), tmp_path, encoder)
        return len(encoder.seen)

    assert again() == 0
    half.rotate(180).save(folder / "1.mask.png")
    assert again() == 4
    (folder / "1.mask.png").unlink()
    assert again() == 8, "of none of them a mask is kept any more"


@pytest.mark.parametrize(
    "change",
    [
        {"settings": attrs.evolve(LATENTS, model="other")},
        {"settings": attrs.evolve(LATENTS, dtype="float16")},
        {"settings": attrs.evolve(LATENTS, settings={"factor": 4})},
        {"buckets": AspectBuckets(area=40 * 40, step=8)},
        {"preparation": Preparation(alpha="drop")},
        {"preparation": Preparation(resampling="box")},
    ],
    ids=str,
)
def test_after_a_changed_setting_no_earlier_entry_is_read(some, tmp_path, change):
    fill(dataset_of(some), tmp_path, Encoder())
    change = dict(change)
    settings = change.pop("settings", LATENTS)
    dataset = dataset_of(some, **change)
    stale = CachedImages(dataset, latents=TensorCache(tmp_path, settings=settings))
    with pytest.raises(DataError, match="not in the cache"):
        stale[0]
    encoder = Encoder()
    fill(dataset, tmp_path, encoder, settings=settings)
    assert len(encoder.seen) == 60


def test_a_changed_image_is_encoded_again_and_a_renamed_one_is_not(some, tmp_path):
    fill(dataset_of(some), tmp_path, Encoder())
    (some / "part0" / "000.png").rename(some / "zzz.png")
    (some / "part0" / "003.png").write_bytes((some / "part0" / "006.png").read_bytes())
    encoder = Encoder()
    fill(dataset_of(some), tmp_path, encoder)
    assert encoder.seen == []
    other = dataset_of(some).source.image(0).point(lambda value: 255 - value)
    other.save(some / "part0" / "003.png")
    fill(dataset_of(some), tmp_path, encoder)
    assert len(encoder.seen) == 1


KILLED = textwrap.dedent("""
    import os, signal, sys
    import torch
    from zerotune.diffusion.data import *
    from zerotune.diffusion.data.cache import *
    from zerotune.diffusion.data.caching import *
    folder, root, when = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dataset = PreparedImages(ImageFolder(folder), buckets=AspectBuckets(area=32 * 32, step=8))
    settings = CacheSettings(
        kind="latents", model="averaging", dtype="float32", settings={"factor": 8}
    )
    calls = 0
    def encode(images):
        global calls
        calls += 1
        if calls == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"latents": torch.nn.functional.avg_pool2d(images, 8)}
    if when == 0:  # In the middle of a file.
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    cache = TensorCache(root, settings=settings)
    cache_latents(dataset, cache=cache, encode=encode, batch_size=2, shard_size=10)
""")


@pytest.mark.parametrize("when", [*nightly(0), 17])
def test_a_kill_loses_at_most_one_file(some, tmp_path, when):
    root = tmp_path / "cache"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(some), str(root), str(when)],
        check=False,
        capture_output=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    dataset = dataset_of(some)
    before = TensorCache(root, settings=LATENTS)
    assert before.decisions == ()
    # Buckets end with a smaller batch, so files differ in their number of images.
    assert len(before) == 0 if when == 0 else 20 <= len(before) <= 34
    encoder, steps = Encoder(), []
    cache = fill(dataset, root, encoder, progress=lambda done, total: steps.append((done, total)))
    assert len(encoder.seen) == 60 - len(before)
    assert steps[0] == (0, 60 - len(before))
    assert steps[-1] == (60 - len(before),) * 2
    cached = CachedImages(dataset, latents=cache)
    for index in range(60):
        wanted = Encoder()(dataset[index]["images"][None])["latents"][0]
        torch.testing.assert_close(cached[index]["latents"], wanted)


def test_damaged_and_foreign_files_are_named_and_replaced(some, tmp_path):
    dataset = dataset_of(some)
    cache = fill(dataset, tmp_path, Encoder())
    first, _ = sorted(cache.folder.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:100])
    other = CacheSettings(kind="latents", model="other", dtype="float32")
    foreign = fill(dataset, tmp_path, Encoder(), settings=other)
    next(foreign.folder.glob("*.safetensors")).replace(cache.folder / "foreign.safetensors")
    again = TensorCache(tmp_path, settings=LATENTS)
    reasons = {decision.before: decision.reason for decision in again.decisions}
    assert set(reasons) == {first.name, "foreign.safetensors"}
    assert "damaged" in reasons[first.name]
    assert "different settings" in reasons["foreign.safetensors"]
    encoder = Encoder()
    fill(dataset, tmp_path, encoder)
    assert 0 < len(encoder.seen) == 60 - len(again) < 60


@pytest.mark.parametrize("made", ["pipe", "folder", "link", "deep"])
def test_a_foreign_file_in_a_cache_neither_blocks_nor_ends_a_run(made, tmp_path):
    entry = {"0" * 40: {"latents": torch.ones(2)}}
    cache = TensorCache(tmp_path, settings=LATENTS)
    cache.write(entry)
    odd = cache.folder / "odd.safetensors"
    if made == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("this system has no pipes in folders")
        os.mkfifo(odd)
    elif made == "folder":
        odd.mkdir()
    elif made == "link":
        odd.symlink_to(odd)
    else:
        metadata = {"settings": LATENTS.digest(), "checksums": "[" * 100_000}
        odd.write_bytes(save(entry["0" * 40], metadata=metadata))
    again = TensorCache(tmp_path, settings=LATENTS)
    (decision,) = again.decisions
    assert decision.before == odd.name
    assert "damaged" in decision.reason
    assert list(again.read("0" * 40)) == ["latents"]


def flip(path, *, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("part", ["header", "data"])
def test_a_flipped_bit_never_yields_wrong_data(some, tmp_path, part):
    dataset = dataset_of(some)
    cache = fill(dataset, tmp_path, Encoder(), shard_size=100)
    (path,) = cache.folder.glob("*.safetensors")
    whole = path.read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    keys = [CachedImages(dataset, latents=cache).latent_key(i, flipped=False) for i in range(60)]
    before = {key: cache.read(key) for key in keys}
    begin, end = (0, data) if part == "header" else (data, len(whole))
    for bit in range(8 * begin, 8 * end, 8 * (end - begin) // 30 + 1):
        path.write_bytes(whole)
        flip(path, bit=bit)
        again, errors = TensorCache(tmp_path, settings=LATENTS), {}
        for key in keys[:: 1 if len(again) else 60]:
            try:
                read = again.read(key)
            except DataError as error:
                errors[key] = str(error)
            else:
                assert all(torch.equal(read[name], before[key][name]) for name in read)
        if part == "data":
            ((key, said),) = errors.items()
            for words in (key, str(path), "delete the file and fill the cache again"):
                assert words in said


def test_an_unwritable_or_unreadable_cache_names_the_file(some, tmp_path, monkeypatch):
    dataset = dataset_of(some)
    cache = fill(dataset, tmp_path, Encoder(), shard_size=100)
    (path,) = cache.folder.glob("*.safetensors")
    again = TensorCache(tmp_path, settings=LATENTS)
    path.unlink()
    with pytest.raises(DataError, match=rf"{path.name}.*cannot be read.*Fix"):
        CachedImages(dataset, latents=again)[0]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("zerotune.diffusion.data.cache.write_atomically", Mock(side_effect=full))
    with pytest.raises(DataError, match=r"cannot be written .No space left on device.*Fix"):
        fill(dataset, tmp_path, Encoder())


def test_encoders_leave_the_device_and_invalid_ones_are_refused(some, tmp_path):
    dataset = dataset_of(some)
    vae = torch.nn.Linear(2, 2, device="cpu")
    released = []
    for _ in range(2):
        fill(dataset, tmp_path, Encoder(), release=lambda: released.append(vae.to("meta")))
    assert len(released) == 2
    for encode, words in (
        (lambda images: {"latents": images[:1]}, "received 4 inputs and returned 1"),
        (lambda images: {"latents": images / 0}, "non-finite"),
    ):
        with pytest.raises(DataError, match=words):
            fill(dataset, tmp_path / "other", encode)
    for options, words in (
        ({"world_size": 2}, "barrier"),
        ({"rank": 2, "world_size": 2, "barrier": nothing}, "rank = 2"),
        ({"batch_size": 0}, "batch_size"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            fill(dataset, tmp_path / "other", Encoder(), **options)
    for change, words in (
        ({"settings": {"dtype": torch.float16}}, "JSON"),
        ({"kind": "../x"}, "kind"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            attrs.evolve(LATENTS, **change)
    written = json.loads(
        (TensorCache(tmp_path, settings=LATENTS).folder / "settings.json").read_text()
    )
    assert written["model"] == "averaging"


def test_hashes_of_weights_depend_on_value_type_and_name():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    hashes = [hash_weights(layer), hash_weights(torch.nn.Sequential(layer))]
    hashes.append(hash_weights(torch.nn.Linear(3, 2).to(torch.bfloat16)))
    assert hash_weights(layer) == hashes[0]
    with torch.no_grad():
        layer.bias[1] += 1e-6
    hashes.append(hash_weights(layer))
    assert max(Counter(hashes).values()) == 1
