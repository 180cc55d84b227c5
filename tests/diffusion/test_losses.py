"""Losses, weightings and noise of kohya-ss/sd-scripts, whose formulas are written out here."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from examples.recipes.losses import Debiased, Huber, SmoothL1

from zerotune.diffusion import DenoisingObjective, FlowMatchingObjective, InputPerturbation
from zerotune.diffusion.noise import GaussianNoise
from zerotune.errors import InvalidValueError

SDXL = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SCHEDULES = ("constant", "exponential", "snr")
KINDS = {"huber": Huber, "smooth_l1": SmoothL1}


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
        return (self.convolution(noisy) + timesteps.view(-1, 1, 1, 1) / 1000,)


def batch(count=6):
    return {
        "images": torch.randn(count, 4, 8, 8, generator=generator(1)),
        "loss_weights": torch.rand(count, generator=generator(2)) + 0.5,
        "loss_masks": torch.rand(count, 1, 8, 8, generator=generator(3)),
    }


# -- library/train_util.py and library/custom_train_functions.py of kohya-ss/sd-scripts.


def get_huber_threshold(timesteps, scheduler, *, huber_schedule, huber_c, huber_scale):
    if huber_schedule == "exponential":
        alpha = -math.log(huber_c) / scheduler.config.num_train_timesteps
        return torch.exp(-alpha * timesteps) * huber_scale
    if huber_schedule == "snr":
        alphas_cumprod = torch.index_select(scheduler.alphas_cumprod, 0, timesteps)
        sigmas = ((1.0 - alphas_cumprod) / alphas_cumprod) ** 0.5
        return (1 - huber_c) / (1 + sigmas) ** 2 + huber_c
    return torch.full((len(timesteps),), huber_c * huber_scale)


def conditional_loss(model_pred, target, loss_type, huber_c):
    if loss_type == "l2":
        return torch.nn.functional.mse_loss(model_pred, target, reduction="none")
    huber_c = huber_c.view(-1, 1, 1, 1)
    rooted = torch.sqrt((model_pred - target) ** 2 + huber_c**2) - huber_c
    return 2 * huber_c * rooted if loss_type == "huber" else 2 * rooted


def all_snr(scheduler):
    alpha = torch.sqrt(scheduler.alphas_cumprod)
    sigma = torch.sqrt(1.0 - scheduler.alphas_cumprod)
    return (alpha / sigma) ** 2


def post_process_loss(loss, scheduler, timesteps, *, min_snr_gamma, debiased, v_prediction):
    if min_snr_gamma:
        snr = torch.stack([all_snr(scheduler)[t] for t in timesteps])
        least = torch.minimum(snr, torch.full_like(snr, min_snr_gamma))
        loss = loss * torch.div(least, snr + 1 if v_prediction else snr)
    if debiased:
        snr_t = torch.stack([all_snr(scheduler)[t] for t in timesteps])
        snr_t = torch.minimum(snr_t, torch.ones_like(snr_t) * 1000)
        loss = loss * (1 / (snr_t + 1) if v_prediction else 1 / torch.sqrt(snr_t))
    return loss


def kohya_loss(
    model, data, *, prediction, loss_type="l2", huber=None, min_snr_gamma=None, debiased=False
):
    """Compute the loss of ``process_batch`` in train_network.py, with its weights and masks."""
    random = generator()
    scheduler = DDPMScheduler(**SDXL, prediction_type=prediction)
    latents = data["images"]
    noise = torch.randn(latents.shape, generator=random)
    timesteps = torch.randint(0, 1000, (len(latents),), generator=random)
    noise_pred = model(scheduler.add_noise(latents, noise, timesteps), timesteps)[0]
    v_prediction = prediction == "v_prediction"
    target = scheduler.get_velocity(latents, noise, timesteps) if v_prediction else noise
    huber_c = None if huber is None else get_huber_threshold(timesteps, scheduler, **huber)
    loss = conditional_loss(noise_pred.float(), target.float(), loss_type, huber_c)
    loss = loss * data["loss_masks"]
    loss = loss.mean(dim=[1, 2, 3])
    loss = loss * data["loss_weights"]
    return post_process_loss(
        loss,
        scheduler,
        timesteps,
        min_snr_gamma=min_snr_gamma,
        debiased=debiased,
        v_prediction=v_prediction,
    ).mean()


def assert_same(ours, theirs, model):
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    (mine, wanted) = (
        torch.autograd.grad(loss, model.convolution.weight)[0] for loss in (ours, theirs)
    )
    torch.testing.assert_close(mine / wanted.abs().max(), wanted / wanted.abs().max())


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_huber_with_masks_weights_and_min_snr_equals_kohyas(kind, schedule, prediction):
    scale = 1.0 if schedule == "snr" else 1.5
    objective = DenoisingObjective(
        scheduler=DDPMScheduler(**SDXL, prediction_type=prediction),
        loss=KINDS[kind](threshold=0.2, schedule=schedule, scale=scale),
        snr_gamma=5.0,
    )
    model, data = Model(), batch()
    huber = {"huber_schedule": schedule, "huber_c": 0.2, "huber_scale": scale}
    theirs = kohya_loss(
        model, data, prediction=prediction, loss_type=kind, huber=huber, min_snr_gamma=5.0
    )
    assert_same(objective(model, data, generator()), theirs, model)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("snr_gamma", [None, 5.0])
def test_debiased_estimation_equals_kohyas_with_and_without_min_snr(prediction, snr_gamma):
    objective = DenoisingObjective(
        scheduler=DDPMScheduler(**SDXL, prediction_type=prediction),
        loss=Debiased(velocity=prediction == "v_prediction"),
        snr_gamma=snr_gamma,
    )
    model, data = Model(), batch()
    theirs = kohya_loss(model, data, prediction=prediction, min_snr_gamma=snr_gamma, debiased=True)
    assert_same(objective(model, data, generator()), theirs, model)


@pytest.mark.parametrize("precondition_outputs", [False, True])
@pytest.mark.parametrize("schedule", ["constant", "exponential"])
@pytest.mark.parametrize("kind", KINDS)
def test_huber_in_flow_matching_equals_kohyas_for_flux_and_sd3(
    kind, schedule, precondition_outputs
):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    objective = FlowMatchingObjective(
        scheduler=scheduler,
        loss=KINDS[kind](threshold=0.3, schedule=schedule, scale=1.5),
        precondition_outputs=precondition_outputs,
        weighting="cosmap",
    )
    model, data = Model(), batch()

    # flux_train.py with model_prediction_type "raw" or "sigma_scaled" (which leaves the target
    # unscaled), and sd3_train.py, which compares clean samples.
    random, latents = generator(), data["images"]
    noise = torch.randn(latents.shape, generator=random)
    indices = (torch.rand(len(latents), generator=random) * 1000).long()
    timesteps, sigmas = scheduler.timesteps[indices], scheduler.sigmas[indices]
    weighting = 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    sigmas = sigmas.view(-1, 1, 1, 1)
    noisy_model_input = (1.0 - sigmas) * latents + sigmas * noise
    model_pred, target = model(noisy_model_input, timesteps)[0], noise - latents
    if precondition_outputs:
        model_pred, target = model_pred * (-sigmas) + noisy_model_input, latents
    huber = {"huber_schedule": schedule, "huber_c": 0.3, "huber_scale": 1.5}
    huber_c = get_huber_threshold(timesteps, scheduler, **huber)
    loss = conditional_loss(model_pred, target, kind, huber_c) * data["loss_masks"]
    theirs = (loss.mean([1, 2, 3]) * weighting * data["loss_weights"]).mean()

    assert_same(objective(model, data, generator()), theirs, model)


def test_losses_at_fixed_levels_are_squared_whatever_the_loss():
    data = {"images": batch()["images"]}

    def errors(objective):
        return objective.losses_at(
            Model(), data, quantiles=(0.2, 0.8), noise=GaussianNoise(), generator=generator()
        )

    for plain, changed in (
        (DenoisingObjective(), {"loss": Huber()}),
        (FlowMatchingObjective(), {"loss": Huber(schedule="constant")}),
        (FlowMatchingObjective(), {"precondition_outputs": True}),
        (FlowMatchingObjective(), {"density": "mode", "weighting": "sigma_sqrt"}),
        (FlowMatchingObjective(), {"noise": InputPerturbation(strength=0.5)}),
        (DenoisingObjective(), {"snr_gamma": 5.0}),
    ):
        assert torch.equal(errors(plain), errors(attrs.evolve(plain, **changed)))


def test_preconditioned_outputs_ignore_the_input_perturbation():
    objective = FlowMatchingObjective(
        noise=InputPerturbation(strength=0.5), precondition_outputs=True
    )
    model, data = Model(), {"images": torch.zeros(4, 4, 8, 8)}
    found = attrs.evolve(objective, precondition_outputs=False)
    inputs = found.inputs(data, generator())
    levels = found.draw_levels(inputs, generator())
    velocity = found.compare(model, inputs, levels)
    image = objective.compare(model, inputs, levels)
    sigmas = levels.sigmas.view(-1, 1, 1, 1)
    expected = -sigmas * (velocity.prediction - velocity.target)
    torch.testing.assert_close(image.prediction - image.target, expected, rtol=1e-5, atol=1e-6)


def test_a_custom_loss_replaces_the_squared_error():
    class Absolute:
        def errors(self, prediction, target, level):
            assert level.time.shape == (6,)
            return (prediction - target).abs()

    model, data = Model(), {"images": batch()["images"]}
    objective = FlowMatchingObjective(loss=Absolute())
    random = generator()
    inputs = objective.inputs(data, random)
    plain = attrs.evolve(objective, loss=None)
    found = plain.compare(model, inputs, plain.draw_levels(inputs, random))
    expected = torch.nn.functional.l1_loss(found.prediction, found.target)
    torch.testing.assert_close(objective(model, data, generator()), expected)


@pytest.mark.parametrize(
    ("make", "key", "fix"),
    [
        (lambda: Huber(threshold=0.0), "threshold", "0.1"),
        (lambda: SmoothL1(threshold=float("nan")), "threshold", "0.1"),
        (lambda: SmoothL1(threshold="0.1"), "threshold", "0.1"),
        (lambda: Huber(schedule="linear"), "schedule", '"exponential"'),
        (lambda: Huber(scale=2.0), "scale", "different schedule"),
        (lambda: Huber(scale=-1.0, schedule="constant"), "scale", "0.1"),
        (
            lambda: FlowMatchingObjective(loss=Huber())(Model(), batch(), generator()),
            "loss.schedule",
            '"exponential"',
        ),
    ],
)
def test_invalid_settings_are_refused(make, key, fix):
    with pytest.raises(InvalidValueError) as caught:
        make()
    assert caught.value.key == key
    assert fix in caught.value.fix
