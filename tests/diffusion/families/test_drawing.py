"""Sampled images, compared with plain diffusers with the same weights, generators and steps."""

from __future__ import annotations

import json
import logging
import shutil

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
)

from tests.support.sampling import nightly
from zerotune.diffusion import (
    ClassConditional,
    DenoisingObjective,
    Unconditional,
    load_pretrained,
    sample,
)
from zerotune.diffusion.models.pipeline_family import PipelineFamily
from zerotune.diffusion.noise_schedule import drawing_scheduler
from zerotune.errors import DataError, InvalidValueError

NAMES = ["sd15", "sdxl", "sd3", "flux"]
PROMPTS = ["a cat", "the dog ran", "a"]
SIZE = (16, 24)
# The pipeline encodes and decodes a whole batch, zerotune one sample at a time: rounding differs.
CLOSE = {"rtol": 0, "atol": 3e-6}


@pytest.fixture(scope="module")
def loaded(folders):
    """Load each pipeline in full precision."""
    return {name: load_pretrained(folders[name], frozen_dtype="fp32") for name in NAMES}


def plain_images(folder, name, *, negative, guidance, size=SIZE, steps=3):
    """Sample with the diffusers pipeline, without zerotune."""
    without = {"image_encoder": None, "feature_extractor": None}
    without |= {"text_encoder_3": None, "tokenizer_3": None}
    nothing = without if name == "sd3" else {}
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, **nothing)
    pipe.set_progress_bar_config(disable=True)
    told = {"guidance_scale": guidance}
    if negative:
        told["negative_prompt"] = [negative] * len(PROMPTS)
    if name == "flux" and negative:
        told = told | {"guidance_scale": 1.0, "true_cfg_scale": guidance}
    drawn = torch.Generator().manual_seed(11)
    seeds = torch.randint(2**63 - 1, (len(PROMPTS),), generator=drawn).tolist()
    if size:
        told |= {"height": size[0], "width": size[1]}
    images = pipe(
        prompt=PROMPTS,
        num_inference_steps=steps,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="pt",
        **told,
    ).images
    return images * 2 - 1


def ours(loaded, **options):
    settings = {"size": SIZE, "steps": 3} | options
    return sample(
        loaded.model, family=loaded.family, prompts=PROMPTS,
        generator=torch.Generator().manual_seed(11), **settings,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("negative", "guidance"),
    [("ugly", 3.0), *nightly(("", 1.0), ("", 2.5))],
)
def test_images_equal_those_of_plain_diffusers(folders, loaded, name, negative, guidance):
    images = ours(loaded[name], negative_prompt=negative, guidance_scale=guidance)
    wanted = plain_images(folders[name], name, negative=negative, guidance=guidance)
    assert images.shape == wanted.shape == (3, 3, *SIZE)
    torch.testing.assert_close(images.clamp(-1, 1), wanted, **CLOSE)
    assert (images[0] - images[1]).abs().max() > 0.1
    assert loaded[name].model.training


@pytest.mark.parametrize("kind", [EDMEulerScheduler, EDMDPMSolverMultistepScheduler])
def test_an_edm_base_is_sampled_with_its_own_scheduler(folders, tmp_path, kind):
    folder = shutil.copytree(folders["sdxl"], tmp_path / "edm")
    kind(sigma_max=20.0).save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", kind.__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    loaded = load_pretrained(folder, frozen_dtype="fp32")
    images = ours(loaded, guidance_scale=3.0, trained_with=loaded.scheduler)
    wanted = plain_images(folder, "sdxl", negative="", guidance=3.0)
    # The initial noise has 20 times the scale of other schedulers (sigma_max=20).
    torch.testing.assert_close(images.clamp(-1, 1), wanted, rtol=0, atol=2e-5)
    assert (
        images - ours(loaded, guidance_scale=3.0, scheduler=EulerDiscreteScheduler())
    ).abs().max() > 0.1


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3"])
def test_the_default_size_is_that_of_the_models_configuration(folders, loaded, name):
    images = ours(loaded[name], size=None)
    wanted = plain_images(folders[name], name, negative="", guidance=1.0, size=None)
    assert images.shape == (3, 3, 16, 16)
    torch.testing.assert_close(images.clamp(-1, 1), wanted, **CLOSE)


class ByHand(PipelineFamily):
    """SD 1.5 that does not run its pipeline's ``__call__``."""

    pipeline, component, text_tensors = "StableDiffusionPipeline", "unet", ("prompt_embeds",)
    flow_matching = False

    def embed(self, parts, captions, device):
        embeds, _ = parts.pipeline.encode_prompt(captions, device, 1, False)
        return {"prompt_embeds": embeds}

    def predict(self, model, noisy, timesteps, conditioning):
        return model(noisy, timesteps, conditioning["prompt_embeds"]).sample


def test_a_hand_written_family_trains_and_samples_like_the_declared_one(folders, loaded):
    by_hand = load_pretrained(folders["sd15"], frozen_dtype="fp32", family=ByHand)
    assert isinstance(by_hand.objective(), DenoisingObjective)
    for options in ({"guidance_scale": 3.0, "negative_prompt": "ugly"}, {"size": None}):
        assert torch.equal(ours(by_hand, **options), ours(loaded["sd15"], **options))
    batch = {"latents": torch.ones(2, 4, 8, 8), "captions": PROMPTS[:2]}
    losses = [
        each.objective()(each.model, batch, generator=torch.Generator().manual_seed(1))
        for each in (by_hand, loaded["sd15"])
    ]
    assert torch.equal(*losses)


def test_sampling_uses_the_prediction_type_of_training(loaded):
    sdxl = loaded["sdxl"]
    velocity = DDPMScheduler.from_config(sdxl.scheduler.config, prediction_type="v_prediction")
    drawn = ours(sdxl, trained_with=velocity)
    own = sdxl.family.parts.pipeline.scheduler
    told = EulerDiscreteScheduler.from_config(own.config, prediction_type="v_prediction")
    torch.testing.assert_close(drawn, ours(sdxl, scheduler=told), rtol=0, atol=0)
    assert (drawn - ours(sdxl)).abs().max() > 0.01
    assert own.config.prediction_type == "epsilon"


def test_a_model_trained_with_zero_terminal_snr_is_sampled_from_pure_noise(loaded, caplog):
    trained = DDPMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction")
    euler = drawing_scheduler(loaded["sdxl"].family.parts.pipeline.scheduler, trained)
    euler.set_timesteps(4)
    assert isinstance(euler, EulerDiscreteScheduler)
    assert euler.timesteps[0] == 999
    assert euler.config.rescale_betas_zero_snr
    assert euler.config.prediction_type == "v_prediction"
    with caplog.at_level(logging.WARNING):
        ddim = drawing_scheduler(loaded["sd15"].family.parts.pipeline.scheduler, trained)
    assert "PNDMScheduler" in caplog.text
    assert isinstance(ddim, DDIMScheduler)
    ddim.set_timesteps(4)
    assert ddim.timesteps[0] == 999
    assert ddim.alphas_cumprod[-1] == 0
    assert not ddim.config.clip_sample
    assert torch.isfinite(ours(loaded["sd15"], trained_with=trained)).all()


def test_flow_matching_samples_with_the_shift_of_training(loaded):
    sd3 = loaded["sd3"]
    own = sd3.family.parts.pipeline.scheduler
    trained = type(own).from_config(own.config, shift=1.0)
    assert own.config.shift == 3.0
    drawn = drawing_scheduler(own, trained)
    assert drawn.config.shift == 1.0
    assert (ours(sd3, trained_with=trained) - ours(sd3)).abs().max() > 1e-3


def test_a_scheduler_passed_in_is_not_changed(loaded):
    mine = DDIMScheduler(steps_offset=1, clip_sample=False)
    ours(loaded["sd15"], scheduler=mine)
    assert mine.num_inference_steps is None


def test_conflicting_arguments_are_refused(loaded, folders):
    sdxl = loaded["sdxl"]
    with pytest.raises(InvalidValueError, match="requires prompts"):
        sample(sdxl.model, family=sdxl.family, count=2, scheduler=DDIMScheduler())
    with pytest.raises(InvalidValueError, match="Unconditional does not accept prompts"):
        sample(sdxl.model, family=Unconditional(), prompts=["a"])
    with pytest.raises(InvalidValueError, match=r"size = .*is only valid with prompts"):
        sample(sdxl.model, family=ClassConditional(), count=1, size=(8, 8))
    with pytest.raises(InvalidValueError, match=r"shape = .*is only valid with labels or count"):
        ours(sdxl, shape=(3, 8, 8))
    bare = load_pretrained(folders["sdxl"], parts=False)
    with pytest.raises(DataError, match="prompts cannot be encoded"):
        ours(bare)
