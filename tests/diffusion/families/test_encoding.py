"""Latents, embeddings and conditions against the pipelines' own."""

from __future__ import annotations

import json
import shutil

import diffusers
import pytest
import torch

from tests.support.sampling import nightly
from zerotune.diffusion import load_pretrained
from zerotune.diffusion.models.declared import Flux
from zerotune.diffusion.models.stable_diffusion import StableDiffusionXL
from zerotune.errors import DataError

TEXTS = ["a cat", "the dog ran", ""]
NAMES = ["sd15", "sdxl", "sd3", "flux"]


@pytest.fixture(scope="module")
def loaded(folders):
    """Load each pipeline in fp32."""
    return {name: load_pretrained(folders[name], frozen_dtype="fp32") for name in NAMES}


@pytest.fixture(scope="module")
def plain(folders):
    """Load each pipeline with plain diffusers."""
    t5 = {"text_encoder_3": None, "tokenizer_3": None}
    found = {}
    for name in NAMES:
        kind = diffusers.DiffusionPipeline
        nothing = {"image_encoder": None, "feature_extractor": None} | t5 if name == "sd3" else {}
        found[name] = kind.from_pretrained(folders[name], **nothing)
    return found


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_the_pipeline_decodes_the_latents(loaded, plain, name):
    family, vae = loaded[name].family, plain[name].vae
    images = random(2, 3, 16, 16).tanh()
    latents = family.clean({"images": images})
    assert latents.shape == (2, 4, 8, 8)
    assert latents.dtype == torch.float32
    with torch.no_grad():
        mean = vae.encode(images).latent_dist.mean
        shift = vae.config.shift_factor or 0.0
        torch.testing.assert_close(latents, (mean - shift) * vae.config.scaling_factor)
        # One at a time: convolutions may round differently in a batch.
        decoded = torch.cat([vae.decode(one[None]).sample for one in mean])
    torch.testing.assert_close(family.parts.decode_latents(latents), decoded, rtol=0, atol=1e-5)
    assert torch.equal(family.clean({"latents": latents, "images": images}), latents)


def test_latents_are_normalised_by_the_vaes_channel_means_and_deviations(folders):
    family = load_pretrained(folders["sdxl"], frozen_dtype="fp32").family
    images = random(1, 3, 16, 16).tanh()
    usual = family.clean({"images": images}) / 0.13025
    before = family.latent_settings()
    mean, deviation = [0.1, -0.2, 0.3, 0.0], [1.0, 2.0, 0.5, 4.0]
    family.parts.vae.register_to_config(latents_mean=mean, latents_std=deviation)
    latents = family.clean({"images": images})
    m, d = (torch.tensor(values).view(1, 4, 1, 1) for values in (mean, deviation))
    # diffusers' train_text_to_image and dreambooth scripts of SDXL.
    torch.testing.assert_close(latents, (usual - m) * 0.13025 / d)
    back = family.parts.decode_latents(latents)
    with torch.no_grad():
        wanted = family.parts.vae.decode(usual).sample
    torch.testing.assert_close(back, wanted, rtol=0, atol=1e-5)
    assert family.latent_settings() != before


def test_cache_settings_depend_on_weights_precision_and_length(folders, loaded):
    family = loaded["flux"].family
    short = load_pretrained(folders["flux"], frozen_dtype="fp32", max_sequence_length=8).family
    half = load_pretrained(folders["flux"], frozen_dtype="bf16").family
    settings = [f.text_settings().digest() for f in (family, short, half)]
    assert len(set(settings)) == 3
    assert family.latent_settings() == short.latent_settings()
    before = short.text_settings()
    with torch.no_grad():
        short.parts.text_encoders["text_encoder"].get_input_embeddings().weight[3, 3] += 1
    assert short.text_settings() != before


def _edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _shorten(folder):
    _edit(folder / "tokenizer" / "tokenizer_config.json", model_max_length=9)


def _activate_differently(folder):
    _edit(folder / "text_encoder" / "config.json", hidden_act="relu")


def _rename_tokens(folder):
    path = folder / "tokenizer" / "tokenizer.json"
    if not path.exists():
        path = folder / "tokenizer" / "vocab.json"
    written = json.loads(path.read_text())
    words = written["model"]["vocab"] if path.name == "tokenizer.json" else written
    first, second = sorted(words, key=words.get)[2:4]
    words[first], words[second] = words[second], words[first]
    path.write_text(json.dumps(written))


@pytest.mark.parametrize("change", [_rename_tokens, *nightly(_shorten, _activate_differently)])
def test_cache_settings_depend_on_tokenizers_and_configurations(folders, loaded, tmp_path, change):
    copy = tmp_path / "sd15"
    shutil.copytree(folders["sd15"], copy)
    same = load_pretrained(copy, frozen_dtype="fp32").family
    same.encode_texts(["a cat"])
    assert same.text_settings() == loaded["sd15"].family.text_settings()
    change(copy)
    other = load_pretrained(copy, frozen_dtype="fp32").family
    assert other.text_settings() != same.text_settings()
    assert other.latent_settings() == same.latent_settings()


def test_without_recorded_sizes_sdxl_uses_the_size_of_the_image(loaded):
    texts = {"prompt_embeds": torch.zeros(1, 5, 64), "pooled_prompt_embeds": torch.zeros(1, 32)}
    batch = {"latents": torch.zeros(1, 4, 8, 16)} | texts
    assert StableDiffusionXL().conditioning(batch, torch.Generator())["time_ids"].tolist() == [
        [64, 128, 0, 0, 64, 128]
    ]
    known = loaded["sdxl"].family.conditioning(batch, torch.Generator())["time_ids"]
    assert known.tolist() == [[16, 32, 0, 0, 16, 32]]
    images = {"images": torch.zeros(1, 3, 24, 40)} | texts
    ids = StableDiffusionXL().conditioning(images, torch.Generator())["time_ids"]
    assert ids.tolist() == [[24, 40, 0, 0, 24, 40]]


def test_the_empty_text_is_zeros_where_the_pipeline_samples_with_zeros(folders, loaded):
    family = loaded["sdxl"].family
    for tensor in family.encode_texts(TEXTS).values():
        assert tensor[2].abs().max() == 0
        assert tensor[:2].abs().amax(dim=tuple(range(1, tensor.ndim))).min() > 0
    told = load_pretrained(folders["sdxl"], frozen_dtype="fp32").family
    told.parts.pipeline.register_to_config(force_zeros_for_empty_prompt=False)
    assert told.encode_texts([""])["prompt_embeds"].abs().max() > 0
    assert told.text_settings() != family.text_settings()


@pytest.mark.parametrize("name", NAMES)
def test_dropped_texts_become_the_empty_text(loaded, name):
    whole = loaded[name].family
    family = type(whole)(parts=whole.parts, dropout=0.5)
    batch = {"captions": ["a cat"] * 40, "latents": torch.zeros(40, 4, 8, 8)}
    given = family.conditioning(batch, torch.Generator().manual_seed(3))
    again = family.conditioning(batch, torch.Generator().manual_seed(3))
    full, empty = whole.encode_texts(["a cat"]), whole.encode_texts([""])
    dropped = torch.rand(40, generator=torch.Generator().manual_seed(3)) < 0.5
    assert 10 < dropped.sum() < 30
    for key in family.text_tensors:
        assert torch.equal(given[key], again[key])
        for row, gone in enumerate(dropped):
            torch.testing.assert_close(given[key][row], (empty if gone else full)[key][0])


def test_dropout_of_cached_texts_requires_the_encoders():
    batch = {"prompt_embeds": torch.zeros(2, 5, 32), "pooled_prompt_embeds": torch.zeros(2, 32)}
    with pytest.raises(DataError, match="caption_dropout"):
        Flux(dropout=0.1).conditioning(batch, torch.Generator())
    with pytest.raises(DataError, match="'pooled_prompt_embeds'"):
        Flux().conditioning({"prompt_embeds": batch["prompt_embeds"]}, torch.Generator())
    with pytest.raises(DataError, match="'images'"):
        Flux().clean({})
