"""Families read from modular blocks predict as the built-in families of the same models do."""

from __future__ import annotations

import re
import types
from pathlib import Path
from unittest import mock

import diffusers
import pytest
import torch
from diffusers.modular_pipelines.wan import encoders as wan_encoders

from tests.support.declared_pipelines import MAKERS as DECLARED
from tests.support.declared_pipelines import _video_vae, flow, language_model, letters
from tests.support.pipelines import alive, flux, sdxl, t5_tokenizer
from tests.support.sampling import sampled
from zerotune.diffusion import load_pretrained, sample
from zerotune.diffusion.models.declared import Flux, QwenImage, Wan
from zerotune.diffusion.models.family import Drawing
from zerotune.diffusion.models.modular import blocks_pipeline
from zerotune.diffusion.models.stable_diffusion import StableDiffusionXL
from zerotune.errors import InvalidValueError, MissingDependencyError

MAKERS = {"sdxl": sdxl, "flux": flux, **{name: DECLARED[name] for name in ("qwen-image", "wan")}}
PAGE = Path(__file__).parents[3] / "docs" / "blocks.md"
PROMPTS = ["a cat", "the dog ran"]


class XLBlocks(StableDiffusionXL):
    pipeline = blocks_pipeline("StableDiffusionXLAutoBlocks")
    by_class = False


class FluxBlocks(Flux):
    pipeline = blocks_pipeline("FluxAutoBlocks")
    by_class = False
    guided_by = None


class QwenBlocks(QwenImage):
    pipeline = blocks_pipeline("QwenImageAutoBlocks")
    guided_by = "guidance_scale"


class WanBlocks(Wan):
    pipeline = blocks_pipeline("WanBlocks")


BLOCKS = {"sdxl": XLBlocks, "flux": FluxBlocks, "qwen-image": QwenBlocks, "wan": WanBlocks}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    known = {}

    def loaded(name):
        if name not in known:
            folder = MAKERS[name](tmp_path_factory.mktemp(name))
            known[name] = [
                load_pretrained(folder, family=family, frozen_dtype="fp32")
                for family in (None, BLOCKS[name])
            ]
        return known[name]

    with pytest.MonkeyPatch.context() as patch:
        fixer = types.SimpleNamespace(fix_text=lambda text: text)
        patch.setattr(wan_encoders, "ftfy", fixer, raising=False)
        yield loaded


@pytest.mark.parametrize("name", sampled(BLOCKS, ("sdxl", "wan")))
def test_texts_and_predictions_equal_those_of_the_built_in_family(load, name, caplog):
    built_in, blocks = load(name)
    family, model = built_in.family, built_in.model.eval()
    frames = (2,) if family.clips else ()
    noisy = torch.randn(2, family._channels(model.config), *frames, 8, 8)
    batch = {"latents": noisy, "captions": PROMPTS}
    wanted = family.conditioning(batch, torch.Generator())
    known = blocks.family.conditioning(batch, torch.Generator())
    assert list(known) == list(wanted)
    assert all(torch.equal(known[each], wanted[each]) for each in wanted)
    times = torch.tensor([731.0, 12.0])
    caplog.clear()
    ours = blocks.family.predict(blocks.model.eval(), noisy, times, known)
    assert torch.equal(ours, family.predict(model, noisy, times, wanted))
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []
    ours.square().sum().backward()
    assert any(each.grad is not None for each in blocks.model.parameters())
    blocks.model.zero_grad()


@pytest.mark.parametrize("name", sampled(BLOCKS, ("sdxl", "wan")))
@pytest.mark.parametrize("guidance", [pytest.param(1.0, marks=pytest.mark.nightly), 3.0])
def test_samples_equal_those_of_the_built_in_family(load, name, guidance):
    clip = {"frames": 5} if name == "wan" else {}
    ours, wanted = (
        sample(
            each.model.eval(), family=each.family, prompts=PROMPTS, steps=2, size=(32, 32),
            guidance_scale=guidance, generator=torch.Generator().manual_seed(1), **clip,
        )
        for each in load(name)
    )  # fmt: skip
    torch.testing.assert_close(ours, wanted, rtol=0, atol=5e-6)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Run the page's declaration, and its lines that write the folder, with Anima's parts."""
    torch.manual_seed(4)
    parts = {
        "text_encoder": language_model(),
        "tokenizer": letters(),
        "t5_tokenizer": t5_tokenizer(),
        "text_conditioner": alive(
            diffusers.AnimaTextConditioner(
                source_dim=32, target_dim=32, model_dim=32, num_layers=1, num_attention_heads=2,
                target_vocab_size=32, min_sequence_length=16,
            )
        ),
        "transformer": alive(
            diffusers.CosmosTransformer3DModel(
                in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
                num_layers=2, mlp_ratio=2.0, text_embed_dim=32, adaln_lora_dim=4,
                max_size=(4, 32, 32), concat_padding_mask=False, extra_pos_embed_type=None,
            )
        ),
        "scheduler": flow(shift=3.0),
        "vae": _video_vae(diffusers.AutoencoderKLQwenImage),
    }  # fmt: skip
    blocks = diffusers.AnimaAutoBlocks().get_workflow("text2image").init_pipeline()
    for name, part in parts.items():
        setattr(blocks, name, part)
    scope = {"__name__": "blocks_page"}
    folder = tmp_path_factory.mktemp("anima")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(diffusers.ModularPipeline, "from_pretrained", lambda *_: blocks)
        patch.setattr(type(blocks), "load_components", lambda _: None)
        for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
            exec(compile(code, str(PAGE), "exec"), scope)
        scope["loaded"] = load_pretrained("anima", family=scope["Anima"], frozen_dtype="fp32")
    return scope


def test_a_model_that_exists_only_as_blocks_predicts_as_its_modular_pipeline(page):
    loaded, blocks, steps = page["loaded"], page["blocks"], []
    step = type(blocks.scheduler).step

    def record(scheduler, prediction, time, latents, **others):
        steps.append((prediction, time, latents))
        return step(scheduler, prediction, time, latents, **others)

    blocks.guider = blocks.guider.new(enabled=False)
    with mock.patch.object(type(blocks.scheduler), "step", record):
        wanted = blocks(
            prompt="a cat", num_inference_steps=2, height=16, width=16, output="images",
            generator=torch.Generator().manual_seed(7), output_type="pt",
        )  # fmt: skip
    known = loaded.family.conditioning({"captions": ["a cat"]}, torch.Generator())
    assert len(steps) == 2
    for prediction, time, latents in steps:
        ours = loaded.family.predict(loaded.model.eval(), latents[:, :, 0], time[None], known)
        assert torch.equal(ours, prediction[:, :, 0])
        assert ours.std() > 0.01
    drawn = loaded.family.draw(
        loaded.model, Drawing(prompts=("a cat",), seeds=(7,), steps=2, size=(16, 16))
    )
    torch.testing.assert_close((drawn / 2 + 0.5).clamp(0, 1), wanted, rtol=0, atol=5e-6)


def test_unusable_blocks_are_refused_with_the_reason():
    with pytest.raises(InvalidValueError, match="did you mean FluxAutoBlocks"):
        blocks_pipeline("FluxAutoBlock")
    with pytest.raises(InvalidValueError, match=r"name = 3: .*has no blocks of this name"):
        blocks_pipeline(3)
    with pytest.raises(InvalidValueError, match="one of text2image, image2image"):
        blocks_pipeline("FluxAutoBlocks", "text2video")
    with pytest.raises(InvalidValueError, match="no block named 'text_encoder'"):
        blocks_pipeline("MiniMaxMusic3Blocks")


def test_a_missing_package_of_a_block_is_named(load, monkeypatch):
    _, blocks = load("wan")
    monkeypatch.delattr(wan_encoders, "ftfy")
    with pytest.raises(MissingDependencyError, match=r"WanTextEncoderStep needs .*'ftfy'"):
        blocks.family.encode_texts(["a"])
