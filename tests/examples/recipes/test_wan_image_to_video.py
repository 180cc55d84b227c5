"""Image-to-video models against the diffusers pipelines."""

from __future__ import annotations

import diffusers
import pytest
import torch
from examples.recipes.image_to_video import FAMILIES
from PIL import Image

from tests.support import declared_pipelines
from zerotune.diffusion import load_pretrained, sample

pytestmark = pytest.mark.nightly

NAMES = ["wan_i2v", "wan22_i2v", "wan22_ti2v"]
GIVEN = ["wan22_ti2v"]
"""Models in which the image replaces the first latent frame."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that loads a pipeline in fp32; it returns the folder and the model."""
    known = {}

    def get(name):
        if name not in known:
            folder = getattr(declared_pipelines, name)(tmp_path_factory.mktemp(name) / "made")
            loaded = load_pretrained(folder, family=FAMILIES["wan"], frozen_dtype="fp32")
            known[name] = (folder, loaded)
        return known[name]

    return get


def clips():
    """Return two clips of 5 frames with 8-bit values, as read from files."""
    shades = torch.randint(256, (2, 3, 5, 16, 16), generator=torch.Generator().manual_seed(2))
    return shades.float() / 127.5 - 1


def picture(image):
    return Image.fromarray(((image + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


def plain(folder, model):
    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(folder, transformer=model)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("name", NAMES)
def test_predictions_equal_those_of_the_pipelines_own_call(made, name):
    folder, loaded = made(name)
    family, model = loaded.family, loaded.model.eval()
    images = clips()
    known = {**family.encode_images(images), **family.encode_texts(["a cat", "the dog"])}
    noise = torch.randn(known["latents"].shape, generator=torch.Generator().manual_seed(3))
    conditioning = family.conditioning(known, torch.Generator())
    pipe = plain(folder, model)
    seen = []

    def watch(_model, args, kwargs, output):
        seen.append((kwargs, output[0]))

    handle = model.register_forward_hook(watch, with_kwargs=True)
    for row in (0, 1):
        pipe(
            image=picture(images[row, :, 0]), prompt_embeds=known["prompt_embeds"][row][None],
            latents=noise[row][None], height=16, width=16, num_frames=5, num_inference_steps=1,
            guidance_scale=1.0, output_type="latent",
        )  # fmt: skip
    times = pipe.scheduler.timesteps.float().repeat(2)
    with torch.no_grad():
        ours = family.predict(model, noise, times, conditioning)
    handle.remove()
    first = 1 if name in GIVEN else 0
    theirs = torch.cat([output for _, output in seen[:2]])
    torch.testing.assert_close(ours[:, :, first:], theirs[:, :, first:], rtol=0, atol=2e-6)
    inputs = [torch.cat([kwargs["hidden_states"] for kwargs, _ in calls]) for calls in
              (seen[:2], seen[2:])]  # fmt: skip
    torch.testing.assert_close(*inputs, rtol=0, atol=2e-6)
    assert ours.std() > 0.01
    assert ("image_embeds" in known) == (name == "wan_i2v")


def test_a_given_first_frame_does_not_contribute_to_the_loss(made):
    _, loaded = made("wan22_ti2v")
    images = clips()
    known = {**loaded.family.encode_images(images), **loaded.family.encode_texts(["a", "b"])}
    seen = {}

    def predict(model, noisy, timesteps, conditioning):
        seen["prediction"] = usual(model, noisy, timesteps, conditioning)
        return seen["prediction"]

    usual = type(loaded.family).predict.__get__(loaded.family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(loaded.family), "predict", lambda _family, *arguments: predict(*arguments)
        )
        loaded.objective()(loaded.model, known, torch.Generator().manual_seed(5))
    noise = torch.randn(known["latents"].shape, generator=torch.Generator().manual_seed(5))
    target = noise - known["latents"]
    torch.testing.assert_close(seen["prediction"][:, :, :1], target[:, :, :1], rtol=0, atol=1e-4)
    assert (seen["prediction"] - target)[:, :, 1:].abs().max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_clips_equal_those_of_plain_diffusers(made, name):
    folder, loaded = made(name)
    first = clips()[:, :, 0]
    ours = sample(
        loaded.model, family=loaded.family, prompts=["a cat", "the dog"], references=first,
        frames=5, steps=2, guidance_scale=3.0, generator=torch.Generator().manual_seed(11),
    )  # fmt: skip
    assert ours.shape == (2, 3, 5, 16, 16)
    texts = loaded.family.encode_texts(["a cat", "the dog"])["prompt_embeds"]
    empty = loaded.family.unconditional(device=torch.device("cpu"))["prompt_embeds"]
    seeds = torch.randint(2**63 - 1, (2,), generator=torch.Generator().manual_seed(11)).tolist()
    pipe = plain(folder, loaded.model.eval())
    for row, seed in enumerate(seeds):
        wanted = pipe(
            image=picture(first[row]), prompt_embeds=texts[row][None], height=16, width=16,
            negative_prompt_embeds=empty, num_frames=5, num_inference_steps=2, output_type="pt",
            guidance_scale=3.0, generator=torch.Generator().manual_seed(seed),
        ).frames[0]  # fmt: skip
        wanted = wanted.transpose(0, 1) * 2 - 1
        torch.testing.assert_close(ours[row].clamp(-1, 1), wanted, rtol=0, atol=1e-4)
    loaded.model.train()
