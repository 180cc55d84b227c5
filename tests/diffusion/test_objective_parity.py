"""Losses and gradients against diffusers' training scripts, whose formulas are written out here.

The models are tiny, have the real architectures, and are called as in the scripts.
"""

from __future__ import annotations

import pytest
import torch
from diffusers import (
    DDPMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)

from zerotune.diffusion import (
    DenoisingObjective,
    FlowMatchingObjective,
    InputPerturbation,
    OffsetNoise,
)
from zerotune.diffusion.models.declared import Flux
from zerotune.diffusion.models.stable_diffusion import StableDiffusion3, StableDiffusionXL

STEPS = 4
SDXL = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        norm_num_groups=4,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=6 * 4 + 12,
        cross_attention_dim=16,
    )


@pytest.fixture(scope="module")
def transformer():
    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        pos_embed_max_size=16,
    )


@pytest.fixture(scope="module")
def flux():
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=12,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )


def batch(step, size=(8, 8), count=3):
    random = torch.Generator().manual_seed(100 + step)
    return {
        "latents": torch.randn(count, 4, *size, generator=random),
        "prompt_embeds": torch.randn(count, 5, 16, generator=random),
        "pooled_prompt_embeds": torch.randn(count, 12, generator=random),
        "original_sizes": torch.tensor([[1024, 768]] * count),
        "crop_corners": torch.tensor([[0, 4]] * count),
        "target_sizes": torch.tensor([[8 * size[0], 8 * size[1]]] * count),
    }


def losses(objective, model, size=(8, 8), count=3):
    """Return the losses of a few steps, and the gradients of the last."""
    random = torch.Generator().manual_seed(7)
    found = []
    for step in range(STEPS):
        loss = objective(model, batch(step, size, count), random)
        found.append(loss.detach())
    return torch.stack(found), _gradients(model, loss)


def script_losses(script, model, size=(8, 8), count=3):
    random = torch.Generator().manual_seed(7)
    found = []
    for step in range(STEPS):
        loss = script(model, batch(step, size, count), random)
        found.append(loss.detach())
    return torch.stack(found), _gradients(model, loss)


def _gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_same(ours, theirs, *, exactly):
    (mine, gradients), (wanted, wanted_gradients) = ours, theirs
    assert torch.isfinite(wanted).all()
    assert wanted_gradients.abs().max() > 0
    if exactly:
        assert torch.equal(mine, wanted)
        assert torch.equal(gradients, wanted_gradients)
    else:
        # zerotune weights means and the script squares, so the last digits of fp32 differ.
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=0)
        scale = wanted_gradients.abs().max()
        torch.testing.assert_close(gradients / scale, wanted_gradients / scale, rtol=0, atol=1e-5)


def sdxl_script(
    *, prediction="epsilon", snr_gamma=None, noise_offset=0.0, input_perturbation=0.0, **betas
):
    """Compute the loss of train_text_to_image_sdxl.py, optionally with input perturbation."""
    scheduler = DDPMScheduler(**SDXL, prediction_type=prediction, **betas)

    def loss_of(unet, data, random):
        model_input = data["latents"]
        noise = torch.randn(model_input.shape, generator=random)
        if noise_offset:
            noise += noise_offset * torch.randn((*model_input.shape[:2], 1, 1), generator=random)
        new_noise = noise
        if input_perturbation:
            new_noise = noise + input_perturbation * torch.randn(noise.shape, generator=random)
        timesteps = torch.randint(0, 1000, (len(model_input),), generator=random)
        noisy_model_input = scheduler.add_noise(model_input, new_noise, timesteps)
        add_time_ids = torch.cat(
            [data["original_sizes"], data["crop_corners"], data["target_sizes"]], dim=1
        )
        model_pred = unet(
            noisy_model_input,
            timesteps,
            data["prompt_embeds"],
            added_cond_kwargs={
                "time_ids": add_time_ids,
                "text_embeds": data["pooled_prompt_embeds"],
            },
            return_dict=False,
        )[0]
        target = noise
        if prediction == "v_prediction":
            target = scheduler.get_velocity(model_input, noise, timesteps)
        if snr_gamma is None:
            return torch.nn.functional.mse_loss(model_pred.float(), target.float())
        snr = compute_snr(scheduler, timesteps)
        weights = torch.stack([snr, snr_gamma * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
        weights = weights / (snr if prediction == "epsilon" else snr + 1)
        loss = torch.nn.functional.mse_loss(model_pred.float(), target.float(), reduction="none")
        return (loss.mean(dim=list(range(1, len(loss.shape)))) * weights).mean()

    return loss_of


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("snr_gamma", [None, 5.0])
def test_sdxl_losses_equal_those_of_the_script(unet, prediction, snr_gamma):
    objective = DenoisingObjective(
        scheduler=DDPMScheduler(**SDXL, prediction_type=prediction),
        family=StableDiffusionXL(),
        snr_gamma=snr_gamma,
    )
    theirs = script_losses(sdxl_script(prediction=prediction, snr_gamma=snr_gamma), unet)
    assert_same(losses(objective, unet), theirs, exactly=snr_gamma is None)


def test_sdxl_losses_equal_with_the_scheduler_of_the_model_folder(unet):
    sampling = EulerDiscreteScheduler(**SDXL, timestep_spacing="leading", steps_offset=1)
    objective = DenoisingObjective(scheduler=sampling, family=StableDiffusionXL())
    assert_same(losses(objective, unet), script_losses(sdxl_script(), unet), exactly=True)
    (decision,) = objective.decisions
    assert (decision.before, decision.after) == ("EulerDiscreteScheduler", "DDPMScheduler")
    assert isinstance(objective.scheduler, EulerDiscreteScheduler)


def test_sdxl_losses_equal_with_offset_noise_and_input_perturbation(unet):
    objective = DenoisingObjective(
        scheduler=DDPMScheduler(**SDXL),
        family=StableDiffusionXL(),
        noise=InputPerturbation(strength=0.2, noise=OffsetNoise(strength=0.05)),
    )
    theirs = script_losses(sdxl_script(noise_offset=0.05, input_perturbation=0.2), unet)
    assert_same(losses(objective, unet), theirs, exactly=True)


def test_sdxl_losses_equal_with_zero_terminal_snr(unet):
    betas = {"rescale_betas_zero_snr": True}
    objective = DenoisingObjective(
        scheduler=DDPMScheduler(**SDXL, prediction_type="v_prediction", **betas),
        family=StableDiffusionXL(),
        snr_gamma=5.0,
    )
    theirs = script_losses(sdxl_script(prediction="v_prediction", snr_gamma=5.0, **betas), unet)
    assert_same(losses(objective, unet), theirs, exactly=False)


def flow_script(scheduler, predict, *, weighting_scheme="none", precondition_outputs=False):
    """Compute the loss of train_dreambooth_sd3.py or train_dreambooth_flux.py, by ``predict``."""

    def get_sigmas(timesteps, n_dim):
        indices = [(scheduler.timesteps == t).nonzero().item() for t in timesteps]
        sigma = scheduler.sigmas[indices].flatten()
        while len(sigma.shape) < n_dim:
            sigma = sigma.unsqueeze(-1)
        return sigma

    def loss_of(model, data, random):
        model_input = data["latents"]
        noise = torch.randn(model_input.shape, generator=random)
        u = compute_density_for_timestep_sampling(
            weighting_scheme=weighting_scheme,
            batch_size=len(model_input),
            logit_mean=0.0,
            logit_std=1.0,
            mode_scale=1.29,
            generator=random,
        )
        timesteps = scheduler.timesteps[(u * 1000).long()]
        sigmas = get_sigmas(timesteps, model_input.ndim)
        noisy_model_input = (1.0 - sigmas) * model_input + sigmas * noise
        model_pred = predict(model, noisy_model_input, timesteps, data)
        if precondition_outputs:
            model_pred = model_pred * (-sigmas) + noisy_model_input
        weighting = compute_loss_weighting_for_sd3(weighting_scheme, sigmas=sigmas)
        target = model_input if precondition_outputs else noise - model_input
        loss = torch.mean(
            (weighting.float() * (model_pred.float() - target.float()) ** 2).reshape(
                target.shape[0], -1
            ),
            1,
        )
        return loss.mean()

    return loss_of


def sd3_predict(model, noisy, timesteps, data):
    return model(
        hidden_states=noisy,
        timestep=timesteps,
        encoder_hidden_states=data["prompt_embeds"],
        pooled_projections=data["pooled_prompt_embeds"],
        return_dict=False,
    )[0]


def flux_predict(model, noisy, timesteps, data):
    count, channels, height, width = noisy.shape
    model_pred = model(
        hidden_states=FluxPipeline._pack_latents(noisy, count, channels, height, width),
        timestep=timesteps / 1000,
        guidance=torch.tensor([1.0]).expand(count),
        pooled_projections=data["pooled_prompt_embeds"],
        encoder_hidden_states=data["prompt_embeds"],
        txt_ids=torch.zeros(5, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(
            count, height // 2, width // 2, "cpu", torch.float32
        ),
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(
        model_pred, height=height * 8, width=width * 8, vae_scale_factor=8
    )


@pytest.mark.parametrize("precondition_outputs", [False, True])
@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "logit_normal", "mode", "cosmap"])
def test_sd3_losses_equal_with_every_weighting_scheme(transformer, scheme, precondition_outputs):
    density = scheme if scheme in ("logit_normal", "mode") else "uniform"
    objective = FlowMatchingObjective(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        family=StableDiffusion3(),
        density=density,
        weighting=scheme if scheme in ("sigma_sqrt", "cosmap") else "none",
        precondition_outputs=precondition_outputs,
    )
    script = flow_script(
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        sd3_predict,
        weighting_scheme=scheme,
        precondition_outputs=precondition_outputs,
    )
    theirs = script_losses(script, transformer)
    assert_same(losses(objective, transformer), theirs, exactly=False)


def test_flux_losses_equal_with_the_unshifted_steps_of_its_script(flux):
    objective = FlowMatchingObjective(
        scheduler=FlowMatchEulerDiscreteScheduler(), family=Flux(), density="logit_normal"
    )
    script = flow_script(
        FlowMatchEulerDiscreteScheduler(), flux_predict, weighting_scheme="logit_normal"
    )
    assert_same(losses(objective, flux), script_losses(script, flux), exactly=False)


@pytest.mark.parametrize("size", [(8, 8), (6, 12)])
def test_flux_losses_equal_with_the_shifted_steps_of_its_pipeline(flux, size):
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    # 12 to 24 tokens, between which the shift varies much with these settings.
    options = {"base_image_seq_len": 4, "max_image_seq_len": 32, "use_dynamic_shifting": True}
    objective = FlowMatchingObjective(
        scheduler=FlowMatchEulerDiscreteScheduler(**options), family=Flux()
    )
    sampling = FlowMatchEulerDiscreteScheduler(**options)
    tokens = FluxPipeline._pack_latents(torch.zeros(1, 4, *size), 1, 4, *size).shape[1]
    mu = calculate_shift(tokens, 4, 32, 0.5, 1.15)
    sampling.set_timesteps(1000, mu=mu)
    script = flow_script(sampling, flux_predict)
    assert_same(losses(objective, flux, size), script_losses(script, flux, size), exactly=False)
