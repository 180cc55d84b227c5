"""Models whose families docs/families.md declares predict and sample as their pipelines do."""

from __future__ import annotations

import re
import sys
import types
from unittest import mock

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from tests.diffusion.families.own_family import PAGE
from tests.support.new_pipelines import MAKERS
from tests.support.runs import PLAIN, start
from tests.support.sampling import sampled
from zerotune.diffusion import load_pretrained, sample

KINDS = {
    "ernie-image": "ErnieImage",
    "longcat-image": "LongCatImage",
    "lumina": "Lumina",
    "mochi": "Mochi",
    "hunyuan-video-1.5": "HunyuanVideo15",
    "ltx-2": "LTX2",
}
PROMPTS = ["a cat", "the dog ran on a mat"]
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi's, in fp32


@pytest.fixture(scope="module")
def page():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(block for block in blocks if "(PipelineFamily):" in block)
    module = types.ModuleType("further_models")
    sys.modules[module.__name__] = module
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def load(page, tmp_path_factory):
    known = {}

    def loaded(name):
        if name not in known:
            folder = MAKERS[name](tmp_path_factory.mktemp(name))
            kind = getattr(page, KINDS[name])
            known[name] = load_pretrained(folder, family=kind, frozen_dtype="fp32")
        return known[name]

    return loaded


TOLERANCES = {
    "mochi": 2e-5,  # 1000 - (1000 - time) rounds the time.
    "ltx-2": 2e-5,  # The pipeline converts predictions to clean latents and back.
}


def isolated(_model, args, kwargs):
    return args, {**kwargs, "isolate_modalities": True}


def plain(loaded, prompts, **options):
    """Run diffusers' pipeline; return what it passed to its scheduler, and its images."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(loaded.folder)
    pipe.set_progress_bar_config(disable=True)
    if "guider" in pipe.components:
        pipe.vae.enable_slicing()  # It decodes only one clip at a time.
        scale = options.pop("guidance_scale")
        pipe.guider = diffusers.ClassifierFreeGuidance(guidance_scale=scale, enabled=scale != 1)
    if "audio_vae" in pipe.components:
        pipe.transformer.register_forward_pre_hook(isolated, with_kwargs=True)
    steps, step = [], type(pipe.scheduler).step

    def record(scheduler, prediction, time, latents, **others):
        if scheduler is pipe.scheduler:  # LTX-2's pipeline copies it for audio.
            steps.append((prediction, time, latents))
        return step(scheduler, prediction, time, latents, **others)

    seeds = torch.randint(2**63 - 1, (len(prompts),), generator=torch.Generator().manual_seed(1))
    frames = {"num_frames": 7} if loaded.family.clips else {}
    with mock.patch.object(type(pipe.scheduler), "step", record):
        images = pipe(
            prompt=list(prompts), num_inference_steps=2, height=32, width=32, output_type="pt",
            generator=[torch.Generator().manual_seed(seed) for seed in seeds.tolist()],
            return_dict=False, **loaded.family.arguments, **frames, **options,
        )[0]  # fmt: skip
    return steps, images


@pytest.mark.parametrize("name", sampled(KINDS, ("lumina", "ltx-2")))
def test_predictions_equal_those_of_the_pipeline(load, name):
    loaded = load(name)
    model, family = loaded.model.eval(), loaded.family
    steps, _ = plain(loaded, PROMPTS[:1], guidance_scale=1.0)
    assert len(steps) == 2
    known = family.conditioning({"captions": PROMPTS[:1]}, torch.Generator())
    frames = (family.latent_space().latent_frames(7),) if family.clips else ()
    scale, channels = family.latent_space().scale, family._channels(model.config)
    shape = (1, channels, *frames, 32 // scale, 32 // scale)
    for prediction, time, latents in steps:
        noisy = family.packing.unpack(latents.detach(), shape)
        wanted, times = family.packing.unpack(prediction.detach(), shape), time[None]
        if name == "mochi":
            wanted, times = -wanted, 1000 - times
        ours = family.predict(model, noisy, times, known)
        torch.testing.assert_close(ours, wanted, rtol=0, atol=TOLERANCES.get(name, 0))
        assert ours.std() > 0.01
        ours.sum().backward()


@pytest.mark.parametrize("name", sampled(KINDS, ("lumina", "ltx-2")))
def test_images_equal_those_of_plain_diffusers(load, name):
    loaded = load(name)
    # Lumina's pipeline accepts embeddings only if prompts and negative prompts are equally long.
    guidance = 1.0 if name == "lumina" else 3.0
    _, images = plain(loaded, PROMPTS, guidance_scale=guidance)
    ours = sample(
        loaded.model.eval(), family=loaded.family, prompts=PROMPTS, steps=2, size=(32, 32),
        guidance_scale=guidance, generator=torch.Generator().manual_seed(1),
        **({"frames": 7} if loaded.family.clips else {}),
    )  # fmt: skip
    if loaded.family.clips:
        images = images.transpose(1, 2)
    torch.testing.assert_close((ours / 2 + 0.5).clamp(0, 1), images, rtol=0, atol=5e-5)


def test_training_uses_the_attention_backend_that_is_set_on_the_model(load, monkeypatch):
    loaded = load("longcat-image")
    used, real = [], _AttentionBackendRegistry._backends[AttentionBackendName._NATIVE_MATH]

    def count(*args, **named):
        used.append(1)
        return real(*args, **named)

    monkeypatch.setitem(
        _AttentionBackendRegistry._backends, AttentionBackendName._NATIVE_MATH, count
    )
    loaded.model.set_attention_backend("_native_math")
    engine = start(PLAIN, loaded.model)
    batch = {"latents": torch.randn(1, 16, 8, 8), "captions": PROMPTS[:1]}
    engine.backward(loaded.objective()(engine, batch, torch.Generator()))
    engine.step()
    engine.close()
    loaded.model.reset_attention_backend()
    assert used
