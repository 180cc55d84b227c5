"""A beginner's first mistakes raise an error that names what to write, or are accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.support.ranks import ranks
from zerotune import DenoisingObjective, ImageTensors, Trainer, Unconditional, prepare
from zerotune.errors import DataError, InvalidValueError, UnknownKeyError
from zerotune.plan import DeepSpeedPlan
from zerotune.training.arguments import check_model, check_objective

IMAGES = torch.zeros(2, 3, 8, 8)


def tiny_unet():
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        norm_num_groups=4,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )


def loss_of(images):
    objective = DenoisingObjective(family=Unconditional())
    return objective(tiny_unet(), {"images": images}, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("images", "fix"),
    [
        (np.zeros((2, 3, 8, 8), np.float32), "torch.from_numpy"),
        (torch.zeros(2, 8, 8, 3), r"permute\(0, 3, 1, 2\)"),
        (torch.zeros(2, 1, 8, 8), "in_channels=1"),
    ],
    ids=["numpy", "channels last", "one channel"],
)
def test_images_in_another_form_are_refused_with_the_conversion(images, fix):
    with pytest.raises(DataError, match=fix) as caught:
        loss_of(images)
    assert caught.value.key == "batch['images']"


@pytest.mark.parametrize("images", [np.zeros((2, 3, 8, 8), np.float32), torch.zeros(2, 8, 8, 3)])
def test_a_dataset_in_memory_refuses_them_too(images):
    with pytest.raises(DataError, match="images must"):
        ImageTensors(images=images)


def test_another_error_of_the_model_stays_as_it_is():
    class Failing(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.float32

        def forward(self, *_, **__):
            raise RuntimeError("mine")

    objective = DenoisingObjective(family=Unconditional())
    with pytest.raises(RuntimeError, match="mine"):
        objective(Failing(), {"images": IMAGES}, torch.Generator())


@pytest.mark.parametrize("objective", [functional.mse_loss, torch.nn.MSELoss()])
def test_a_loss_of_two_tensors_is_no_objective(objective):
    with pytest.raises(InvalidValueError, match="compares two tensors") as caught:
        check_objective(objective, tiny_unet())
    assert "DenoisingObjective(" in caught.value.fix


def test_a_class_is_no_model():
    with pytest.raises(InvalidValueError, match="is a class") as caught:
        check_model(type(tiny_unet()))
    assert "from_pretrained" in caught.value.fix


def test_build_names_both_batch_sizes():
    with pytest.raises(UnknownKeyError, match="micro_batch_size"):
        DeepSpeedPlan.build(batch_size=4)


@pytest.mark.deepspeed
@ranks(1)
def test_prepare_takes_model_and_plan_by_position_and_trains_what_eval_left():
    with prepare(tiny_unet().eval(), DeepSpeedPlan.build(stage=0)) as engine:
        assert engine.module.training
        (found,) = (each for each in engine.plan.decisions if each.key == "model")
        assert (found.before, found.after) == ("eval mode", "training mode")


@pytest.mark.deepspeed
@ranks(1)
def test_a_model_in_training_mode_needs_no_decision_and_fit_takes_its_steps_by_position():
    data = ImageTensors(images=torch.zeros(4, 3, 8, 8))
    with Trainer(model=tiny_unet(), plan=DeepSpeedPlan.build(stage=0), data=data) as trainer:
        assert all(each.key != "model" for each in trainer.engine.plan.decisions)
        assert trainer.fit(1).steps == 1
