"""The EDM recipe's losses are those of diffusers' script and of NVlabs/edm."""

from __future__ import annotations

import pytest
import torch
from diffusers import EDMDPMSolverMultistepScheduler, EDMEulerScheduler
from examples.recipes.edm import EDMObjective

pytestmark = pytest.mark.nightly

PLAYGROUND = {"sigma_data": 0.5, "sigma_max": 80.0, "sigma_min": 0.002}


def generator(seed=7):
    return torch.Generator().manual_seed(seed)


class Model(torch.nn.Module):
    """Predict some function of the input and its time, with gradients."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.convolution = torch.nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, noisy, timesteps):
        self.timesteps = timesteps
        return (self.convolution(noisy) + timesteps.view(-1, 1, 1, 1),)


def latents(count=8):
    return torch.randn(count, 4, 8, 8, generator=generator(1))


def script_loss(scheduler, model, model_input, noise, indices):
    """Compute the loss of train_dreambooth_lora_sdxl.py with ``--do_edm_style_training``."""
    timesteps = scheduler.timesteps[indices]
    step_indices = [(scheduler.timesteps == t).nonzero().item() for t in timesteps]
    sigmas = scheduler.sigmas[step_indices].flatten().view(-1, 1, 1, 1)
    noisy_model_input = scheduler.add_noise(model_input, noise, timesteps)
    inp_noisy_latents = scheduler.precondition_inputs(noisy_model_input, sigmas)
    model_pred = model(inp_noisy_latents, timesteps)[0]
    model_pred = scheduler.precondition_outputs(noisy_model_input, model_pred, sigmas)
    return ((model_pred.float() - model_input.float()) ** 2).mean()


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("kind", [EDMEulerScheduler, EDMDPMSolverMultistepScheduler])
def test_the_loss_equals_that_of_the_diffusers_script(kind, prediction):
    scheduler = kind(**PLAYGROUND, prediction_type=prediction)
    model, random = Model(), generator()
    noise = torch.randn(latents().shape, generator=random)
    indices = torch.randint(0, 1000, (8,), generator=random)
    theirs = script_loss(scheduler, model, latents(), noise, indices)
    ours = EDMObjective(scheduler=scheduler)(model, {"images": latents()}, generator())
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    mine, wanted = (
        torch.autograd.grad(loss, model.convolution.weight)[0] for loss in (ours, theirs)
    )
    torch.testing.assert_close(mine / wanted.abs().max(), wanted / wanted.abs().max())


def test_the_loss_of_the_paper_equals_nvlabs():
    objective = EDMObjective(density="log_normal", weighting="edm", log_mean=-1.0, log_std=1.1)
    model, random = Model(), generator()
    noise = torch.randn(latents().shape, generator=random)

    # training/loss.py, EDMLoss, with the preconditioning of training/networks.py, EDMPrecond.
    rnd_normal = torch.randn(8, generator=random).view(-1, 1, 1, 1)
    sigma = (rnd_normal * 1.1 - 1.0).exp()
    sigma_data = 0.5
    weight = (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2
    x = latents() + noise * sigma
    c_skip = sigma_data**2 / (sigma**2 + sigma_data**2)
    c_out = sigma * sigma_data / (sigma**2 + sigma_data**2).sqrt()
    c_in = 1 / (sigma_data**2 + sigma**2).sqrt()
    c_noise = sigma.log() / 4
    denoised = c_skip * x + c_out * model(c_in * x, c_noise.flatten())[0]
    theirs = (weight * (denoised - latents()) ** 2).mean()

    ours = objective(model, {"images": latents()}, generator())
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
