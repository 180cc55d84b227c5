"""Edits with several reference images against the diffusers pipelines."""

from __future__ import annotations

import sys

import diffusers
import pytest
import torch
from PIL import Image

from tests.support.declared_pipelines import without_videos
from tests.support.sampling import nightly
from zerotune.diffusion import encode_dataset, load_pretrained, sample
from zerotune.diffusion.data import AspectBuckets, Augmentation, ImageFolder, PreparedImages
from zerotune.diffusion.data.order import Draw
from zerotune.diffusion.models.latents import Tokens
from zerotune.errors import DataError

NAMES = ["flux2", *nightly("flux2-klein"), "qwen-image-edit-plus"]
PROMPTS = ["put the hat on the cat", "paint both of them red"]
"""Prompts of equal length, so that the pipeline's inputs for one sample match those of a batch."""
AREA = 32 * 32
INPUTS = ("hidden_states", "encoder_hidden_states", "timestep", "img_ids", "img_shapes")


def loaded_from(folder):
    without_videos()
    small = {"reference_area": AREA} if "qwen" in folder.name else {}
    return load_pretrained(folder, frozen_dtype="fp32", **small)


def plain(folder, model, monkeypatch):
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, transformer=model)
    pipe.set_progress_bar_config(disable=True)
    module = sys.modules[type(pipe).__module__]
    if hasattr(module, "VAE_IMAGE_SIZE"):
        monkeypatch.setattr(module, "VAE_IMAGE_SIZE", AREA)
    return pipe


def images(count, height=64, width=80):
    """Return several references for each of two samples, with 8-bit values, as read from files."""
    drawn = torch.Generator().manual_seed(count)
    return torch.randint(256, (2, count, 3, height, width), generator=drawn) / 127.5 - 1


def pictures(references):
    shades = ((references + 1) * 127.5).round().byte().permute(0, 2, 3, 1)
    return [Image.fromarray(each.numpy()) for each in shades]


def texts(family, name, known, row):
    """Return the prompt for Qwen's pipeline, which encodes it itself; else the cached embedding."""
    if "qwen" in name:
        return {"prompt": PROMPTS[row]}
    return {"prompt_embeds": known["prompt_embeds"][row][None]}


def flat(call, name):
    value = call.get(name)
    return torch.tensor(value) if isinstance(value, list) else value


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_called_like_in_the_pipeline(folders, monkeypatch, name, count):
    loaded = loaded_from(folders[name])
    family, model = loaded.family, loaded.model.eval()
    references = images(count)
    known = family.conditioning(
        {"reference_images": references, "captions": PROMPTS}, torch.Generator()
    )
    assert known["reference_latents"].shape[:2] == (2, count)
    channels = known["reference_latents"].shape[2]
    noise = torch.randn(2, channels, 8, 4, generator=torch.Generator().manual_seed(3))
    calls = []

    def watch(_model, _args, kwargs, output):
        calls.append((kwargs, output[0]))

    handle = model.register_forward_hook(watch, with_kwargs=True)
    pipe = plain(folders[name], model, monkeypatch)
    side = family.parts.scale
    for row in (0, 1):
        packed = Tokens(2).pack(noise) if "qwen" in name else noise
        pipe(
            image=pictures(references[row]), latents=packed[row][None], height=8 * side,
            width=4 * side, num_inference_steps=1, output_type="latent",
            **{family.guided_by or "guidance_scale": 1.0}, **texts(family, name, known, row),
        )  # fmt: skip
    times = pipe.scheduler.timesteps.float().repeat(2)
    with torch.no_grad():
        ours = family.predict(model, noise, times, known)
    handle.remove()
    theirs, given = calls[:2], calls[2:]
    for key in INPUTS:
        if theirs[0][0].get(key) is not None:
            wanted, found = (
                torch.cat([flat(kwargs, key) for kwargs, _ in each]) for each in (theirs, given)
            )
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    tokens = torch.cat([output for _, output in theirs])[:, : 8 * 4 // family._patch**2]
    wanted = family.packing.unpack(tokens, tuple(noise.shape))
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-6)
    if count > 1:
        turned = {**known, "reference_latents": known["reference_latents"].flip(1)}
        with torch.no_grad():
            other = family.predict(model, noise, times, turned)
        assert (ours - other).abs().max() > 1e-5, "the order of the images matters"


@pytest.mark.parametrize("name", NAMES)
def test_edited_images_equal_those_of_plain_diffusers(folders, monkeypatch, name):
    loaded = loaded_from(folders[name])
    family, references = loaded.family, images(2)
    side = 8 * family.parts.scale
    drawn = sample(
        loaded.model, family=family, prompts=PROMPTS, negative_prompt="ugly", steps=2,
        guidance_scale=3.0, size=(side, side), references=references,
        generator=torch.Generator().manual_seed(11),
    )  # fmt: skip
    seeds = torch.randint(2**63 - 1, (2,), generator=torch.Generator().manual_seed(11)).tolist()
    pipe = plain(folders[name], loaded.model.eval(), monkeypatch)
    guided = {"guidance_scale": 1.0}  # Flux.2 dev has no negative prompts.
    known = {} if "qwen" in name else family.encode_texts(PROMPTS)
    if name == "qwen-image-edit-plus":
        guided = {"true_cfg_scale": 3.0, "negative_prompt": "ugly"}
    elif name == "flux2-klein":
        negative = family.remembered_negative(["ugly"], device=torch.device("cpu"))
        guided = {"guidance_scale": 3.0, "negative_prompt_embeds": negative["prompt_embeds"]}
    for row, seed in enumerate(seeds):
        wanted = pipe(
            image=pictures(references[row]), height=side, width=side, num_inference_steps=2,
            output_type="pt", generator=torch.Generator().manual_seed(seed), **guided,
            **texts(family, name, known, row),
        ).images[0]  # fmt: skip
        torch.testing.assert_close(drawn[row].clamp(-1, 1), wanted * 2 - 1, rtol=0, atol=5e-5)


def folder_of_edits(folder, counts):
    """Write a folder of edits, with ``counts`` reference images each."""
    folder.mkdir()
    shades = torch.randint(256, (40, 16, 16, 3), generator=torch.Generator().manual_seed(4))
    each = iter(shades.byte().numpy())
    for number, count in enumerate(counts):
        Image.fromarray(next(each)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("put it there")
        for place in range(1, count + 1):
            name = f"{number}.reference{place if place > 1 else ''}.png"
            Image.fromarray(next(each)).save(folder / name)
    return folder


@pytest.mark.parametrize("name", ["flux2", "qwen-image-edit-plus"])
def test_caches_hold_all_images_of_an_edit(folders, tmp_path, name):
    loaded = loaded_from(folders[name])
    prepared = PreparedImages(
        ImageFolder(folder_of_edits(tmp_path / "edits", (1, 2, 2))),
        buckets=AspectBuckets(area=256, step=16),
        augmentation=Augmentation(flip=0.5),
    )
    cached = encode_dataset(
        prepared, family=loaded.family, folder=tmp_path / "cache", progress=False
    )
    for index, count in enumerate((1, 2, 2)):
        for epoch in (0, 1, 2):
            found = []
            for data in (cached, prepared):
                drawn = data[Draw(index=index, epoch=epoch)]
                one = {n: v[None] for n, v in drawn.items() if isinstance(v, torch.Tensor)}
                one |= {n: [v] for n, v in drawn.items() if isinstance(v, str)}
                found.append(loaded.family.conditioning(one, torch.Generator()))
            assert found[0]["reference_latents"].shape[:2] == (1, count)
            for key, value in found[0].items():
                torch.testing.assert_close(value.float(), found[1][key].float())


@pytest.mark.parametrize("name", ["flux-kontext", "qwen-image-edit"])
def test_a_family_with_one_reference_refuses_several(folders, tmp_path, name):
    loaded = loaded_from(folders[name])
    prepared = PreparedImages(
        ImageFolder(folder_of_edits(tmp_path / "edits", (1, 2))),
        buckets=AspectBuckets(area=256, step=16),
    )
    with pytest.raises(DataError, match="supports only one reference image"):
        encode_dataset(prepared, family=loaded.family, folder=tmp_path / "cache", progress=False)
    assert not (tmp_path / "cache").exists()
    for index in (0, 1):
        images = prepared[index]["reference_images"][None]
        batch = {"reference_images": images, "captions": ["put it there"]}
        if index:
            with pytest.raises(DataError, match="supports only one reference image"):
                loaded.family.conditioning(batch, torch.Generator())
        else:
            single = loaded.family.conditioning(batch, torch.Generator())
            assert single["reference_latents"].ndim == 4


def test_flux2_trains_without_references_too(folders):
    loaded = loaded_from(folders["flux2"])
    known = loaded.family.conditioning({"captions": PROMPTS}, torch.Generator())
    assert "reference_latents" not in known
    noise = torch.randn(2, 16, 8, 4, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = loaded.family.predict(loaded.model, noise, torch.tensor([500.0, 20.0]), known)
    assert found.shape == noise.shape
    assert found.std() > 0.01


def test_large_images_are_resized_like_in_the_pipeline(folders):
    family = loaded_from(folders["flux2"]).family
    large = images(1, 1100, 1302)[0]
    pipe = family.parts.pipeline
    picture = pipe.image_processor._resize_to_target_area(pictures(large)[0], 1024 * 1024)
    multiple = pipe.vae_scale_factor * 2
    width, height = (side // multiple * multiple for side in picture.size)
    wanted = pipe.image_processor.preprocess(
        picture, height=height, width=width, resize_mode="crop"
    )
    assert torch.equal(family.at_shown_size(large), wanted)
    assert width * height <= 1024 * 1024 < 1100 * 1302
