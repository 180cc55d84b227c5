"""HunyuanVideo's image-to-video models against the diffusers pipeline."""

from __future__ import annotations

import diffusers
import pytest
import torch
from examples.recipes.image_to_video import FAMILIES
from PIL import Image

from tests.support.declared_pipelines import hunyuan_video_i2v
from zerotune.diffusion import load_pretrained, sample

pytestmark = pytest.mark.nightly

KINDS = ["token_replace", "latent_concat"]
PROMPTS = ["a cat", "the dog ran over a wall"]
INPUTS = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask",
          "pooled_projections", "guidance")  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that loads either kind in fp32; it returns the folder and the model."""
    known = {}

    def get(kind):
        if kind not in known:
            folder = hunyuan_video_i2v(tmp_path_factory.mktemp(kind) / "made", kind)
            known[kind] = (
                folder,
                load_pretrained(folder, family=FAMILIES["hunyuan-video"], frozen_dtype="fp32"),
            )
        return known[kind]

    return get


def clips():
    """Return two clips of 5 frames with 8-bit values, as read from files."""
    shades = torch.randint(256, (2, 3, 5, 32, 16), generator=torch.Generator().manual_seed(2))
    return shades.float() / 127.5 - 1


def picture(image):
    return Image.fromarray(((image + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


def plain(folder, model):
    pipe = diffusers.HunyuanVideoImageToVideoPipeline.from_pretrained(folder, transformer=model)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_called_like_in_the_pipeline(made, kind):
    folder, loaded = made(kind)
    family, model = loaded.family, loaded.model.eval()
    images = clips()
    batch = {"images": images, "captions": PROMPTS}
    conditioning = family.conditioning(batch, torch.Generator())
    noise = torch.randn(family.clean(batch).shape, generator=torch.Generator().manual_seed(3))
    calls = []

    def watch(_model, _args, kwargs, output):
        calls.append((kwargs, output[0]))

    handle = model.register_forward_hook(watch, with_kwargs=True)
    pipe = plain(folder, model)
    for row in (0, 1):
        pipe(
            image=picture(images[row, :, 0]), prompt=PROMPTS[row], latents=noise[row][None],
            height=32, width=16, num_frames=5, num_inference_steps=1, output_type="latent",
        )  # fmt: skip
    # The pipeline starts from noise mixed with the image; training draws its own noise levels.
    mixed = noise * 0.999 + conditioning["reference_latents"] * (1 - torch.tensor([0.999]))
    times = pipe.scheduler.timesteps.float().repeat(2)
    with torch.no_grad():
        ours = family.predict(model, mixed, times, conditioning)
    handle.remove()
    *theirs, (given, _) = calls
    for name in INPUTS:
        if given[name] is not None:
            wanted = torch.cat([kwargs[name] for kwargs, _ in theirs])
            torch.testing.assert_close(given[name], wanted.to(given[name]), rtol=0, atol=1e-6)
    assert (given["guidance"] is None) == (kind == "latent_concat")
    first = 1 if kind == "token_replace" else 0
    wanted = torch.cat([output for _, output in theirs])
    torch.testing.assert_close(ours[:, :, first:], wanted[:, :, first:], rtol=0, atol=1e-6)
    assert ours.std() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_clips_equal_those_of_plain_diffusers(made, kind):
    folder, loaded = made(kind)
    first = clips()[:, :, 0]
    ours = sample(
        loaded.model, family=loaded.family, prompts=PROMPTS, references=first, frames=9, steps=2,
        guidance_scale=3.0, negative_prompt="ugly", generator=torch.Generator().manual_seed(11),
    )  # fmt: skip
    assert ours.shape == (2, 3, 9 if kind == "token_replace" else 5, 32, 16)
    seeds = torch.randint(2**63 - 1, (2,), generator=torch.Generator().manual_seed(11)).tolist()
    pipe = plain(folder, loaded.model.eval())
    for row, seed in enumerate(seeds):
        wanted = pipe(
            image=picture(first[row]), prompt=PROMPTS[row], negative_prompt="ugly", height=32,
            width=16, num_frames=9, num_inference_steps=2, output_type="pt", true_cfg_scale=3.0,
            guidance_scale=1.0, generator=torch.Generator().manual_seed(seed),
        ).frames[0]  # fmt: skip
        wanted = wanted.transpose(0, 1) * 2 - 1
        torch.testing.assert_close(ours[row].clamp(-1, 1), wanted, rtol=0, atol=1e-4)
