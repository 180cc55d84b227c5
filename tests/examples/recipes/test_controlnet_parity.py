"""ControlNets: losses of diffusers' scripts, and images of its pipelines."""

from __future__ import annotations

import diffusers
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.training_utils import compute_density_for_timestep_sampling
from examples.recipes.controlnet import controlled
from PIL import Image

from tests.diffusion.families.training import example
from tests.support import declared_pipelines, pipelines
from zerotune.diffusion import sample

pytestmark = pytest.mark.nightly

NAMES = ["sdxl", "sd3", "flux", "qwen-image"]
TIMES = torch.tensor([700.0, 20.0])


def load(folder):
    """Load a ControlNet with its zero layers randomised: a new one has no effect."""
    model, loaded = controlled(folder, base_dtype="fp32", frozen_dtype="fp32")
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.abs().max() == 0:
                parameter.normal_(0, 0.02)
    return model, loaded


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    makers, root = pipelines.MAKERS | declared_pipelines.MAKERS, tmp_path_factory.mktemp("bases")
    return {name: makers[name](root / name) for name in NAMES}


@pytest.fixture(scope="module")
def made(folders):
    known = {}

    def get(name):
        if name not in known:
            known[name] = load(folders[name])
        return known[name]

    return get


def batch(model, loaded):
    data = example(loaded.family, model, 0, 0)
    if loaded.family.base_component == "unet":
        shades = torch.randint(256, data.pop("reference_latents").shape, dtype=torch.uint8)
        data["reference_images"] = shades
    return data


# -- diffusers' training scripts, examples/controlnet/train_controlnet_*.py, written out.


def sdxl_script(controlnet, unet, data, random):
    scheduler = DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
    )
    latents = data["latents"]
    noise = torch.randn(latents.shape, generator=random)
    timesteps = torch.randint(0, 1000, (len(latents),), generator=random)
    noisy = scheduler.add_noise(latents, noise, timesteps)
    sizes = torch.tensor([[16.0, 16.0, 0, 0, 16, 16]]).repeat(len(latents), 1)
    added = {"text_embeds": data["pooled_prompt_embeds"], "time_ids": sizes}
    down, mid = controlnet(
        noisy, timesteps, encoder_hidden_states=data["prompt_embeds"], added_cond_kwargs=added,
        controlnet_cond=data["reference_images"].float() / 255, return_dict=False,
    )  # fmt: skip
    predicted = unet(
        noisy, timesteps, encoder_hidden_states=data["prompt_embeds"], added_cond_kwargs=added,
        down_block_additional_residuals=list(down), mid_block_additional_residual=mid,
        return_dict=False,
    )[0]  # fmt: skip
    return torch.nn.functional.mse_loss(predicted.float(), noise.float(), reduction="mean")


def flow_script(predict):
    def loss(controlnet, transformer, data, random):
        scheduler = FlowMatchEulerDiscreteScheduler()
        latents = data["latents"]
        noise = torch.randn(latents.shape, generator=random)
        u = compute_density_for_timestep_sampling(
            "logit_normal", len(latents), logit_mean=0.0, logit_std=1.0, generator=random
        )
        indices = (u * 1000).long()
        timesteps = scheduler.timesteps[indices]
        sigmas = scheduler.sigmas[indices].view(-1, 1, 1, 1)
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        predicted = predict(controlnet, transformer, noisy, timesteps, data)
        error = (predicted.float() - (noise - latents).float()) ** 2
        return torch.mean(error.reshape(len(latents), -1), 1).mean()

    return loss


def sd3_predict(controlnet, transformer, noisy, timesteps, data):
    common = {
        "hidden_states": noisy, "timestep": timesteps, "return_dict": False,
        "encoder_hidden_states": data["prompt_embeds"],
        "pooled_projections": data["pooled_prompt_embeds"],
    }  # fmt: skip
    samples = controlnet(controlnet_cond=data["reference_latents"], **common)[0]
    return transformer(block_controlnet_hidden_states=list(samples), **common)[0]


SCRIPTS = {
    "sdxl": sdxl_script,
    "sd3": flow_script(sd3_predict),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_and_gradients_equal_those_of_the_diffusers_scripts(made, name):
    model, loaded = made(name)
    flows = loaded.family.flow_matching
    objective = loaded.objective(
        **({"scheduler": FlowMatchEulerDiscreteScheduler()} if flows else {})
    )
    base = loaded.family.base
    assert not any(each.requires_grad for each in base.parameters())
    losses, gradients = [], []
    data = batch(model, loaded)
    for loss in (
        objective(model, data, torch.Generator().manual_seed(7)),
        SCRIPTS[name](model, base, data, torch.Generator().manual_seed(7)),
    ):
        losses.append(float(loss.detach()))
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for ours, theirs in zip(*gradients, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
    assert sum(float(each.abs().sum()) for each in gradients[1] if each is not None) > 0


# -- Sampling.


@pytest.mark.parametrize("name", NAMES)
def test_images_equal_those_of_the_diffusers_pipeline(folders, made, name, monkeypatch):
    """The pipeline samples the condition's latents from the VAE; here it takes their mode."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, *_, **__: self.mode())
    model, loaded = made(name)
    shades = torch.randint(256, (2, 3, 16, 16), generator=torch.Generator().manual_seed(3))
    images = sample(
        model, family=loaded.family, prompts=["a cat", "the dog"], size=(16, 16), steps=3,
        negative_prompt="ugly", guidance_scale=3.0, references=shades.float() / 127.5 - 1,
        generator=torch.Generator().manual_seed(11),
    )  # fmt: skip
    pictures = [Image.fromarray(each.permute(1, 2, 0).byte().numpy()) for each in shades]
    kind = getattr(diffusers, loaded.family.pipeline)
    without = {"text_encoder_3": None, "tokenizer_3": None} if name == "sd3" else {}
    pipe = kind.from_pretrained(folders[name], controlnet=model.eval(), **without)
    pipe.set_progress_bar_config(disable=True)
    seeds = torch.randint(2**63 - 1, (2,), generator=torch.Generator().manual_seed(11)).tolist()
    guided = {"guidance_scale": 3.0}
    if name in ("flux", "qwen-image"):
        guided = {"guidance_scale": 1.0, "true_cfg_scale": 3.0}
    if name == "qwen-image":
        del guided["guidance_scale"]
    wanted = pipe(
        prompt=["a cat", "the dog"], negative_prompt=["ugly"] * 2, num_inference_steps=3,
        height=16, width=16, output_type="pt", **guided, **{loaded.family.reference: pictures},
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
    ).images  # fmt: skip
    torch.testing.assert_close(images.clamp(-1, 1), wanted * 2 - 1, rtol=0, atol=1e-5)
    assert (images[0] - images[1]).abs().max() > 0.1


# -- Loading and conditions.


def test_a_new_controlnet_changes_no_prediction(folders):
    model, loaded = controlled(folders["sd3"], base_dtype="fp32")
    base, data = loaded.family.base, batch(model, loaded)
    known = loaded.family.conditioning(data, torch.Generator())
    with torch.no_grad():
        ours = loaded.family.predict(model, data["latents"], TIMES, known)
        alone = base(
            data["latents"], encoder_hidden_states=data["prompt_embeds"], timestep=TIMES,
            pooled_projections=data["pooled_prompt_embeds"], return_dict=False,
        )[0]  # fmt: skip
    assert torch.equal(ours, alone)
    assert base.config.num_layers == 2, "diffusers' constructor writes into its base"
    again, _ = controlled(folders["sd3"], base_dtype="fp32")
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "equal on every rank"
