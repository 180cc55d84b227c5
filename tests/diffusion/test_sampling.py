"""Sampling, on one rank and on several, against a loop written out here."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler

from tests.support.models import Ranked, tiny_unet
from zerotune.diffusion import ClassConditional, images_to_grid, sample
from zerotune.errors import InvalidValueError

FAMILY = ClassConditional(null_label=10, dropout=0.1)
LABELS = torch.tensor([3, 1, 4, 1, 5])


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def draw(model, **changes):
    options = {
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "family": FAMILY,
        "labels": LABELS,
        "steps": 3,
        "guidance_scale": 1.5,
        "generator": generator(),
    }
    return sample(model, **(options | changes))


class FakeGroup:
    """One rank of two; the other's images are given."""

    def __init__(self, rank, other=None):
        self.rank, self.world_size, self.other, self.sent = rank, 2, other, None

    def agree(self, value, what):
        pass

    def gather(self, value):
        self.sent, _ = value
        other = torch.zeros_like(self.sent) if self.other is None else self.other
        return [value, (other, None)] if self.rank == 0 else [(other, None), value]


DYNAMIC = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
# 8 x 8 pixels are 16 tokens of 2 x 2; diffusers' pipelines interpolate mu between 256 and 4096
# tokens.
MU = 0.5 + (1.15 - 0.5) / (4096 - 256) * (16 - 256)


@pytest.mark.parametrize(
    ("scheduler", "told"), [(FlowMatchEulerDiscreteScheduler(), {}), (DYNAMIC, {"mu": MU})]
)
def test_guided_euler_sampling_matches_a_hand_written_loop(scheduler, told):
    model = tiny_unet().eval()
    images = draw(model, scheduler=scheduler)

    seeds = torch.randint(2**63 - 1, (5,), generator=generator()).tolist()
    expected = torch.stack(
        [torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    scheduler.set_timesteps(3, **told)
    with torch.no_grad():
        for time in scheduler.timesteps:
            known = model(expected, time, class_labels=LABELS).sample
            unknown = model(expected, time, class_labels=torch.full((5,), 10)).sample
            guided = unknown + 1.5 * (known - unknown)
            expected = scheduler.step(guided, time, expected).prev_sample
    assert images.shape == (5, 1, 8, 8)
    assert torch.allclose(images, expected, atol=1e-5)


@pytest.mark.parametrize(
    "scheduler", [FlowMatchEulerDiscreteScheduler(), DDPMScheduler(), DDIMScheduler()]
)
def test_an_image_depends_on_its_index_and_not_on_the_batch_size(scheduler):
    model = tiny_unet()
    whole = draw(model, scheduler=scheduler)
    in_twos = draw(model, scheduler=scheduler, batch_size=2)
    assert torch.allclose(whole, in_twos, atol=1e-5)
    assert torch.isfinite(whole).all()
    assert not torch.allclose(whole, draw(model, scheduler=scheduler, generator=generator(6)))


def test_two_ranks_draw_the_images_of_one_rank_in_equally_many_forward_passes():
    alone = draw(tiny_unet())
    second = Ranked(tiny_unet(), FakeGroup(rank=1))
    draw(second)
    first = Ranked(tiny_unet(), FakeGroup(rank=0, other=second.group.sent))
    together = draw(first)
    assert torch.allclose(together, alone, atol=1e-5)
    assert first.group.sent.shape[0] == second.group.sent.shape[0] == 3
    assert first.calls == second.calls == 3


def test_a_rank_without_images_joins_the_forward_passes_of_the_others():
    model = Ranked(tiny_unet(), FakeGroup(rank=1))
    draw(model, labels=LABELS[:1])
    assert model.calls == 3
    assert model.group.sent.shape[0] == 1


def test_sampling_restores_the_models_mode_and_leaves_the_scheduler_unchanged():
    model, scheduler = tiny_unet().train(), FlowMatchEulerDiscreteScheduler()
    draw(model, scheduler=scheduler)
    assert model.training
    assert len(scheduler.timesteps) == 1000


def test_unconditional_models_are_sampled_without_labels():
    model = Ranked(tiny_unet(), None)
    model.module.forward = lambda noisy, _: (noisy * 0.1,)
    images = draw(model, family=None, labels=None, count=3, guidance_scale=1.0)
    assert images.shape == (3, 1, 8, 8)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"labels": None}, "count"),
        ({"labels": None, "count": 2}, "labels"),
        ({"count": 4}, "count"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"family": ClassConditional()}, "guidance_scale"),
        ({"family": None}, "labels"),
    ],
)
def test_conflicting_arguments_are_refused(changes, key):
    with pytest.raises(InvalidValueError) as caught:
        draw(tiny_unet(), **changes)
    assert caught.value.key == key
    assert caught.value.fix


def test_a_model_without_a_configuration_requires_a_shape():
    model = Ranked(torch.nn.Identity(), None)
    with pytest.raises(InvalidValueError, match="shape"):
        draw(model)


def test_a_grid_shows_the_enlarged_images_in_rows():
    images = torch.full((5, 1, 2, 2), -1.0)
    images[4, 0, 0, 1] = 7.0
    grid = images_to_grid(images, columns=2, upscale=3, gap=1)
    assert grid.mode == "L"
    assert grid.size == (2 * 7 + 1, 3 * 7 + 1)
    assert grid.getpixel((1, 1)) == 0
    assert grid.getpixel((1, 15)) == 0
    assert [grid.getpixel((x, 15)) for x in (3, 4, 6)] == [0, 255, 255]
    assert grid.getpixel((8, 15)) == 255, "no sixth image"


def test_a_grid_of_colour_images_is_rgb_and_other_channels_are_refused():
    assert images_to_grid(torch.zeros(4, 3, 8, 8), columns=2).mode == "RGB"
    with pytest.raises(InvalidValueError, match="images"):
        images_to_grid(torch.zeros(4, 4, 8, 8), columns=2)
