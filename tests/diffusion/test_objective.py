"""Losses against the formulas of diffusers' training scripts, written out here."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

from tests.support.models import digits_batch
from zerotune.diffusion import (
    ClassConditional,
    DenoisingObjective,
    FlowMatchingObjective,
    Unconditional,
)
from zerotune.errors import DataError, InvalidValueError

FAMILY = ClassConditional(null_label=10, dropout=0.3)


def batch(size=6):
    images, labels = digits_batch(size)
    return {"images": images, "labels": labels}


def generator(seed=7):
    return torch.Generator().manual_seed(seed)


class Recorder(torch.nn.Module):
    """Predict zeros and record the arguments."""

    device = torch.device("cpu")
    dtype = torch.bfloat16

    def forward(self, noisy, timesteps, **conditioning):
        self.noisy, self.timesteps, self.conditioning = noisy, timesteps, conditioning
        return (torch.zeros_like(noisy),)


def test_sampling_with_the_same_scheduler_does_not_change_the_loss():
    scheduler = FlowMatchEulerDiscreteScheduler()
    objective = FlowMatchingObjective(scheduler=scheduler)
    before = objective(Recorder(), batch(), generator())
    scheduler.set_timesteps(4)
    assert torch.equal(objective(Recorder(), batch(), generator()), before)


def test_inputs_have_the_models_precision_but_timesteps_do_not():
    model = Recorder()
    loss = FlowMatchingObjective(family=FAMILY)(model, batch(), generator())
    assert model.noisy.dtype == torch.bfloat16
    assert model.timesteps.dtype == torch.float32
    assert model.conditioning["class_labels"].dtype == torch.int64
    assert loss.dtype == torch.float32
    DenoisingObjective()(model, batch(), generator())
    assert model.timesteps.dtype == torch.int64


def test_all_randomness_comes_from_the_given_generator():
    objective, model = FlowMatchingObjective(family=FAMILY), Recorder()
    state = torch.get_rng_state()
    first = objective(model, batch(), generator())
    torch.rand(5)
    assert torch.equal(objective(model, batch(), generator()), first)
    assert not torch.equal(objective(model, batch(), generator(8)), first)
    torch.set_rng_state(state)


def test_label_dropout_has_the_requested_rate():
    labels = torch.arange(10).repeat(1000)
    family = ClassConditional(null_label=10, dropout=0.1)
    kept = family.conditioning({"labels": labels}, generator())["class_labels"]
    dropped = kept == 10
    assert 0.09 < dropped.float().mean() < 0.11
    assert torch.equal(kept[~dropped], labels[~dropped])
    never = ClassConditional(null_label=10).conditioning({"labels": labels}, generator())
    assert torch.equal(never["class_labels"], labels)


def test_invalid_settings_are_refused_with_a_fix():
    with pytest.raises(InvalidValueError, match="null_label") as caught:
        ClassConditional(dropout=0.1)
    assert caught.value.key == "dropout"
    with pytest.raises(InvalidValueError, match="probability"):
        ClassConditional(null_label=1, dropout=1.5)
    with pytest.raises(InvalidValueError, match="density"):
        FlowMatchingObjective(density="gaussian")
    with pytest.raises(InvalidValueError, match="DDPMScheduler"):
        FlowMatchingObjective(scheduler=DDPMScheduler())
    with pytest.raises(InvalidValueError, match="prediction_type"):
        DenoisingObjective(scheduler=DDPMScheduler(prediction_type="flow"))


def test_missing_labels_or_wrong_channels_are_data_errors():
    with pytest.raises(DataError, match="no 'labels', only \\['images'\\]"):
        FlowMatchingObjective(family=FAMILY)(
            Recorder(), {"images": torch.zeros(2, 1, 8, 8)}, generator()
        )

    class Doubling(Recorder):
        def forward(self, noisy, *_):
            return torch.cat([noisy, noisy], dim=1)

    with pytest.raises(DataError, match="predict a variance"):
        DenoisingObjective(family=Unconditional())(Doubling(), batch(), generator())
