"""Prior preservation, compared with the arithmetic of diffusers' DreamBooth script."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDPMScheduler
from examples.recipes.prior_preservation import PriorPreservation

from tests.support.models import digits_batch, tiny_unet
from zerotune.diffusion import (
    ClassConditional,
    DataStream,
    DenoisingObjective,
    ImageTensors,
)

pytestmark = pytest.mark.nightly


def stream(count, size, seed):
    images, labels = digits_batch(count, seed=seed)
    dataset = ImageTensors(images=images, labels=labels)
    return DataStream(dataset, micro_batch_size=size, seed=seed)


def both(weight=1.0, instances=2, priors=2):
    return PriorPreservation(
        instances=stream(5, instances, 1), priors=stream(9, priors, 2), weight=weight
    )


def test_the_loss_equals_that_of_the_dreambooth_script():
    model, batch = tiny_unet(), next(both(weight=0.7))
    loss = DenoisingObjective(family=ClassConditional())(
        model, batch, torch.Generator().manual_seed(3)
    )

    random, scheduler = torch.Generator().manual_seed(3), DDPMScheduler()
    model_input = torch.cat([next(stream(5, 2, 1))["images"], next(stream(9, 2, 2))["images"]])
    noise = torch.randn(model_input.shape, generator=random)
    timesteps = torch.randint(0, 1000, (4,), generator=random)
    noisy_model_input = scheduler.add_noise(model_input, noise, timesteps)
    model_pred = model(noisy_model_input, timesteps, class_labels=batch["labels"]).sample
    model_pred, model_pred_prior = torch.chunk(model_pred, 2, dim=0)
    target, target_prior = torch.chunk(noise, 2, dim=0)
    prior_loss = torch.nn.functional.mse_loss(model_pred_prior, target_prior)
    expected = torch.nn.functional.mse_loss(model_pred, target) + 0.7 * prior_loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("instances", "priors"), [(1, 3), (3, 1), (2, 4)])
def test_unequal_shares_still_sum_two_means(instances, priors):
    batch = next(both(weight=2.0, instances=instances, priors=priors))
    losses = torch.rand(instances + priors, generator=torch.Generator().manual_seed(0))
    weighted = (losses * batch["loss_weights"]).mean()
    expected = losses[:instances].mean() + 2.0 * losses[instances:].mean()
    torch.testing.assert_close(weighted, expected)
