"""Encoding a folder of images to caches, after which the encoders leave the device."""

from __future__ import annotations

import importlib.util
import time

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLProcessor

from tests.support import pipelines
from tests.support.declared_pipelines import (
    WITH_VIDEOS,
    flux_kontext,
    qwen_image_edit,
)
from tests.support.ranks import run_ranks
from zerotune.backend.distributed import ProcessGroup
from zerotune.diffusion import encode_dataset, load_pretrained
from zerotune.diffusion.data import (
    AspectBuckets,
    BucketStream,
    ImageFolder,
    PreparedImages,
    TextBeside,
)
from zerotune.errors import CollectiveError, DataError, MissingDependencyError


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    colors = np.random.default_rng(0)
    for number, name in enumerate(("a cat", "the dog", "a cat")):
        pixels = colors.integers(0, 255, (20, 16 + 4 * number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(name)
    return PreparedImages(ImageFolder(folder), buckets=AspectBuckets(area=16 * 16, step=8))


@pytest.fixture
def sdxl(tmp_path):
    return pipelines.sdxl(tmp_path / "sdxl")


def watched(parts, monkeypatch):
    """Record where parts are moved, in order."""
    moved = []
    usual = parts.to

    def to(device, names=None):
        moved.append((str(device), None if names is None else tuple(names)))
        return usual(device, names)

    monkeypatch.setattr(parts, "to", to)
    return moved


def test_caches_hold_the_encoders_outputs_and_the_encoders_leave_the_device(
    images, sdxl, tmp_path, monkeypatch
):
    family = load_pretrained(sdxl, frozen_dtype="fp32").family
    moved = watched(family.parts, monkeypatch)
    cached = encode_dataset(images, family=family, folder=tmp_path / "cache", progress=False)
    # Only the part that computes is on the device, and none of them afterwards.
    encoders = ("text_encoder", "text_encoder_2")
    assert {names for _, names in moved} == {("vae",), encoders, None}
    kinds = [names for _, names in moved]
    assert kinds.index(None) == kinds.count(("vae",)), "the VAE leaves before texts are encoded"
    assert moved[-1] == ("cpu", None)
    for index in range(3):
        sample, whole = cached[index], images[index]
        latents = family.clean({"images": whole["images"][None]})[0]
        texts = family.encode_texts([whole["captions"]])
        torch.testing.assert_close(sample["latents"], latents, rtol=0, atol=1e-5)
        for name in family.text_tensors:
            torch.testing.assert_close(sample[name], texts[name][0], rtol=0, atol=1e-5)
        assert torch.equal(sample["original_sizes"], whole["original_sizes"])


def test_nothing_is_encoded_twice_and_no_stale_entry_is_read(images, sdxl, tmp_path, monkeypatch):
    family = load_pretrained(sdxl, frozen_dtype="fp32").family
    first = encode_dataset(images, family=family, folder=tmp_path / "cache", progress=False)

    def refuse(*_, **__):
        raise AssertionError("encoded again")

    with monkeypatch.context() as patch:
        patch.setattr(type(family.parts), "encode_images", refuse)
        patch.setattr(type(family), "embed", refuse)
        again = encode_dataset(images, family=family, folder=tmp_path / "cache", progress=False)
        assert torch.equal(again[1]["latents"], first[1]["latents"])
        with torch.no_grad():
            family.parts.vae.decoder.conv_in.weight.add_(1.0)
        with pytest.raises(AssertionError, match="encoded again"):
            encode_dataset(images, family=family, folder=tmp_path / "cache", progress=False)


def test_encoding_without_loaded_parts_is_refused(images, sdxl, tmp_path):
    family = load_pretrained(sdxl, parts=False).family
    with pytest.raises(DataError, match="neither a VAE nor text encoders"):
        encode_dataset(images, family=family, folder=tmp_path / "cache", progress=False)


def encode_slowly(folder, images, target, timeout_s):
    """Let one rank encode for longer than the group's collective timeout."""
    # A generous timeout for the start, which is slow on a busy machine.
    first = ProcessGroup(backend="gloo", timeout_s=60.0)
    family = load_pretrained(folder, frozen_dtype="fp32").family
    first.barrier("begin together")
    group = ProcessGroup(backend="gloo", timeout_s=1.0)
    if group.rank == 1:
        parts, usual = family.parts, family.parts.encode_images

        def slowly(pixels):
            time.sleep(2.0)
            return usual(pixels)

        parts.encode_images = slowly
    options = {} if timeout_s is None else {"timeout_s": timeout_s}
    try:
        cached = encode_dataset(
            images, family=family, folder=target, ranks=group, progress=False, **options
        )
        return len(cached)
    except CollectiveError as error:
        return str(error)
    finally:
        group.close()
        first.close()


def test_ranks_wait_longer_for_slow_encoding_than_for_a_collective(images, sdxl, tmp_path):
    found = run_ranks(encode_slowly, str(sdxl), images, str(tmp_path / "cache"), None, world_size=2)
    assert found == [3, 3]
    late = run_ranks(encode_slowly, str(sdxl), images, str(tmp_path / "other"), 0.5, world_size=2)
    assert "use cached latents" in str(late[0])


@pytest.mark.gpu
def test_encoders_free_their_memory(images, sdxl, tmp_path):
    family = load_pretrained(sdxl).family
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    encode_dataset(images, family=family, folder=tmp_path / "cache", progress=False)
    weights = sum(p.nbytes for m in family.parts.modules.values() for p in m.parameters())
    assert torch.cuda.max_memory_allocated() - before > weights / 4, "it was used"
    assert torch.cuda.memory_allocated() - before < weights / 100
    assert {p.device.type for m in family.parts.modules.values() for p in m.parameters()} == {"cpu"}


@pytest.fixture
def edits(tmp_path):
    """Write two images with their reference images, one with a mask."""
    folder = tmp_path / "edits"
    folder.mkdir()
    colors = np.random.default_rng(1)
    for number in range(2):
        for name in (f"{number}.png", f"{number}.reference.png"):
            pixels = colors.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name)
        (folder / f"{number}.txt").write_text("make it blue\nturn it blue")
    half = np.zeros((16, 16), np.uint8)
    half[:, :8] = 255
    Image.fromarray(half).save(folder / "1.mask.png")
    return folder


def loss_and_gradient(loaded, batch):
    loaded.model.zero_grad()
    loss = loaded.objective()(loaded.model, batch, torch.Generator().manual_seed(4))
    loss.backward()
    return float(loss.detach()), loaded.model.proj_out.weight.grad.clone()


def test_an_edit_model_trains_on_references_and_masks_from_a_folder_and_from_a_cache(
    edits, tmp_path
):
    loaded = load_pretrained(flux_kontext(tmp_path / "kontext"), frozen_dtype="fp32")
    images = PreparedImages(
        ImageFolder(edits, captions=TextBeside(words="lines")),
        buckets=AspectBuckets(area=16 * 16, step=16),
    )
    cached = encode_dataset(images, family=loaded.family, folder=tmp_path / "c", progress=False)
    pixels, latents = (next(BucketStream(d, micro_batch_size=2)) for d in (images, cached))
    assert set(latents) >= {"latents", "reference_latents", "loss_masks"}
    assert "images" not in latents
    loss, gradient = loss_and_gradient(loaded, latents)
    seen, other = loss_and_gradient(loaded, pixels)
    assert seen == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(other, gradient)
    for name in ("reference_latents", "loss_masks"):
        changed, _ = loss_and_gradient(loaded, {**latents, name: latents[name].flip(0)})
        assert changed != pytest.approx(loss, rel=1e-6), name
    del latents["reference_latents"]
    with pytest.raises(DataError, match="needs reference images"):
        loss_and_gradient(loaded, latents)


def edited(edits, **settings):
    return PreparedImages(
        ImageFolder(edits, captions=TextBeside(words="lines")),
        buckets=AspectBuckets(area=16 * 16, step=16), **settings,
    )  # fmt: skip


def test_the_size_at_which_a_reference_is_shown_is_part_of_the_cache_settings(tmp_path):
    folder = qwen_image_edit(tmp_path / "edit")
    large, small = (
        load_pretrained(folder, frozen_dtype="fp32", **settings).family
        for settings in ({}, {"reference_area": 32 * 32})
    )
    assert large.text_settings() != small.text_settings()
    assert large.latent_settings() != small.latent_settings()
    assert large.text_settings().kind == "edits"


def test_encoding_edit_texts_without_their_image_is_refused(edits, tmp_path):
    loaded = load_pretrained(qwen_image_edit(tmp_path / "edit"), reference_area=32 * 32)
    family = loaded.family
    for path in edits.glob("*.reference.png"):
        path.unlink()
    with pytest.raises(DataError, match="no image has a reference"):
        encode_dataset(edited(edits), family=family, folder=tmp_path / "c", progress=False)
    assert not (tmp_path / "c").exists()
    with pytest.raises(DataError, match="needs a reference image"):
        family.encode_texts(["make it blue"])
    batch = {
        "latents": torch.zeros(1, 4, 8, 8), "reference_latents": torch.zeros(1, 4, 8, 8),
        "prompt_embeds": torch.zeros(1, 5, 32), "prompt_embeds_mask": torch.ones(1, 5),
    }  # fmt: skip
    dropping = type(family)(parts=family.parts, dropout=0.5, reference_area=32 * 32)
    with pytest.raises(DataError, match="caption_dropout"):
        dropping.conditioning(batch, torch.Generator())
    always = type(family)(parts=family.parts, dropout=1.0, reference_area=32 * 32)
    pictures = torch.zeros(1, 3, 16, 16)
    dropped = always.conditioning({**batch, "reference_images": pictures}, torch.Generator())
    empty = family.encode_texts([""], references=pictures)
    torch.testing.assert_close(dropped["prompt_embeds"], empty["prompt_embeds"].float())


def test_a_missing_torchvision_is_named(tmp_path, monkeypatch):
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    folder = qwen_image_edit(tmp_path / "edit")
    monkeypatch.setattr(Qwen2VLProcessor, "get_attributes", WITH_VIDEOS)
    with pytest.raises(MissingDependencyError, match="torchvision"):
        load_pretrained(folder)
    assert load_pretrained(folder, parts=False).family.reads_references
