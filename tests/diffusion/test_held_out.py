"""The validation loss: the same figure for the same weights, on any ranks and at any time."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDPMScheduler

from tests.diffusion.validating import OBJECTIVE, held_out, validate, validate_and_train
from tests.support.models import Ranked, tiny_unet
from tests.support.ranks import run_ranks
from tests.support.runs import Case
from zerotune.diffusion import DenoisingObjective, validation_loss
from zerotune.diffusion.data.order import derive_seed
from zerotune.errors import DataError, InvalidValueError

PARTITIONED = (("stage3_param_persistence_threshold", 0),)


class FakeGroup:
    """A process group whose ranks run in this process, one after the other."""

    def __init__(self, rank, world_size, box):
        self.rank, self.world_size, self.box, self.agreed = rank, world_size, box, []

    def agree(self, value, what):
        self.agreed.append((value, what))

    def gather(self, value):
        self.box[self.rank] = value
        return list(self.box.values())


def test_the_validation_loss_is_the_mean_of_the_samples_errors_at_fixed_levels():
    model = tiny_unet()
    objective = DenoisingObjective()
    batches = [{"images": batch["images"]} for batch in held_out((3, 1))]
    unlabelled = tiny_unet()
    unlabelled.class_embedding = None
    found = validation_loss(objective, unlabelled, batches, seed=4, quantiles=(0.5, 0.2))

    scheduler, errors = DDPMScheduler(), {0.2: [], 0.5: []}
    with torch.no_grad():
        for index, batch in enumerate(batches):
            for row, image in enumerate(batch["images"]):
                seed = derive_seed(4, "validation", index, row)
                noise = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
                for quantile, kept in errors.items():
                    time = torch.tensor([int(1000 * quantile)])
                    noisy = scheduler.add_noise(image[None], noise, time)
                    kept.append(((unlabelled(noisy, time).sample - noise) ** 2).mean())
    expected = {quantile: float(torch.stack(kept).mean()) for quantile, kept in errors.items()}
    assert found.samples == 4
    assert list(found.by_quantile) == [0.2, 0.5]
    assert found.by_quantile == pytest.approx(expected, rel=1e-5)
    assert found.mean == pytest.approx(sum(expected.values()) / 2, rel=1e-5)
    assert model.training


def test_the_validation_loss_is_repeatable_and_leaves_model_and_random_state_unchanged():
    model = tiny_unet().train()
    state = torch.get_rng_state()
    first = validation_loss(OBJECTIVE, model, held_out())
    torch.rand(3)
    assert validation_loss(OBJECTIVE, model, held_out()) == first
    torch.set_rng_state(state)
    validation_loss(OBJECTIVE, model, held_out())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert validation_loss(OBJECTIVE, model, held_out(), seed=1) != first
    with torch.no_grad():
        model.conv_out.weight.mul_(1.1)
    assert validation_loss(OBJECTIVE, model, held_out()) != first


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_validation_loss_is_the_same_on_any_number_of_ranks(world_size):
    model, box = tiny_unet(), {}
    expected = validation_loss(OBJECTIVE, model, held_out(), quantiles=(0.3, 0.7))
    calls = []
    for rank in range(world_size):
        ranked = Ranked(model, FakeGroup(rank, world_size, box))
        found = validation_loss(OBJECTIVE, ranked, held_out(), quantiles=(0.3, 0.7))
        calls.append(ranked.calls)
        assert ranked.group.agreed
    assert found == expected
    assert calls == [2 * -(-3 // world_size)] * world_size


@pytest.mark.deepspeed
def test_stage_3_on_two_ranks_gives_the_plain_models_loss_and_training_continues():
    bare = validate(tiny_unet()).by_quantile
    case = Case(stage=3, micro_batch=4, overrides=PARTITIONED)
    ranks = run_ranks(validate_and_train, case, world_size=2)
    for (before, after), sizes in ranks:
        assert set(sizes) == {0}
        assert (before, after) == tuple(ranks[0][0])
        assert before.by_quantile == pytest.approx(bare, rel=1e-5)
        # Gradients still flow after an evaluation, and the next one sees the new weights.
        assert after.by_quantile != before.by_quantile


def test_objectives_and_data_that_cannot_be_validated_are_refused():
    model = tiny_unet()
    with pytest.raises(InvalidValueError, match="losses_at"):
        validation_loss(torch.nn.functional.mse_loss, model, held_out())
    with pytest.raises(DataError, match="at least one batch"):
        validation_loss(OBJECTIVE, model, [])
    for quantiles in ((), (0.5, 1.5)):
        with pytest.raises(InvalidValueError, match="from 0 to 1"):
            validation_loss(OBJECTIVE, model, held_out(), quantiles=quantiles)
    empty = {"images": torch.zeros(0, 1, 8, 8), "labels": torch.zeros(0)}
    with pytest.raises(DataError, match="empty batches") as caught:
        validation_loss(OBJECTIVE, model, [*held_out(), empty])
    assert caught.value.key == "batches[3]"
