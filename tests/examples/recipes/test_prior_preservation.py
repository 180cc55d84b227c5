"""Prior preservation, compared with the arithmetic of diffusers' DreamBooth script."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import DDPMScheduler
from examples.recipes.prior_preservation import PriorPreservation

from tests.support.models import digits_batch, tiny_unet
from zerotune.diffusion import (
    ClassConditional,
    DataStream,
    DenoisingObjective,
    FlowMatchingObjective,
    ImageTensors,
)
from zerotune.diffusion.data.streams import BatchStream, Captions, RepeatedBatches
from zerotune.errors import DataError, InvalidValueError

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


def test_without_weight_the_prior_contributes_no_gradient():
    data, model = both(weight=0.0), tiny_unet()
    objective = FlowMatchingObjective(family=ClassConditional())
    batch = dict(next(data))

    def gradient():
        model.zero_grad()
        objective(model, batch, torch.Generator().manual_seed(3)).backward()
        return model.conv_out.weight.grad.clone()

    first = gradient()
    batch["images"] = torch.cat([batch["images"][:2], -batch["images"][2:]])
    assert torch.equal(gradient(), first)
    assert first.abs().max() > 0


def test_a_run_resumes_both_streams():
    data = both()
    assert isinstance(data, BatchStream)
    for _ in range(3):
        next(data)
    state = json.loads(json.dumps(data.state_dict()))
    expected = [next(data) for _ in range(4)]
    again = both()
    again.load_state_dict(state)
    for batch in expected:
        found = next(again)
        assert batch.keys() == found.keys() == {"images", "labels", "loss_weights"}
        assert all(torch.equal(batch[name], found[name]) for name in batch)
    assert again.epoch == data.epoch == pytest.approx(7 * 2 / 5)


def test_captions_and_weights_of_the_data_are_kept():
    def repeated(word, weight):
        images = torch.zeros(2, 1, 4, 4)
        weights = torch.tensor([1.0, weight])
        return RepeatedBatches(
            [{"images": images, "captions": Captions([word, word]), "loss_weights": weights}]
        )

    data = PriorPreservation(
        instances=repeated("sks dog", 3.0), priors=repeated("dog", 0.5), weight=0.5
    )
    batch = next(data)
    assert batch["captions"] == Captions(["sks dog", "sks dog", "dog", "dog"])
    assert isinstance(batch["captions"], Captions)
    assert batch["loss_weights"].tolist() == [2.0, 6.0, 1.0, 0.5]


def test_incompatible_streams_are_data_errors():
    def repeated(**batch):
        return RepeatedBatches([batch])

    images = torch.zeros(2, 1, 8, 8)
    one = repeated(images=images)
    with pytest.raises(DataError, match="same keys") as caught:
        next(PriorPreservation(instances=one, priors=repeated(latents=images)))
    assert caught.value.value == ["images", "latents"]
    with pytest.raises(DataError, match="same size"):
        next(PriorPreservation(instances=one, priors=repeated(images=torch.zeros(2, 1, 4, 8))))
    with pytest.raises(InvalidValueError, match="weight"):
        PriorPreservation(instances=one, priors=one, weight=-1.0)
