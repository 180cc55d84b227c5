"""Clock, seeds, streams and restored state."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from zerotune.diffusion import DataStream, ImageTensors
from zerotune.diffusion.data.streams import RepeatedBatches
from zerotune.training.batches import as_stream
from zerotune.training.save import (
    TrainerState,
    generator_from_text,
    generator_to_text,
    moved,
    seed_everything,
    trainer_state,
)


class OneOf:
    """A process group of ``world_size`` ranks that all return the same."""

    def __init__(self, rank=0, world_size=1):
        self.rank, self.world_size = rank, world_size

    def barrier(self, purpose):
        """Do nothing: all ranks have arrived."""

    def gather(self, value, **_):
        return [value] * self.world_size


@pytest.fixture
def restored_random_state():
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def drawn(generator):
    return (
        random.random(),
        float(np.random.rand()),
        float(torch.rand(())),
        float(torch.rand((), generator=generator)),
    )


@pytest.mark.usefixtures("restored_random_state")
def test_a_seed_fixes_every_generator_and_differs_between_ranks():
    first = drawn(seed_everything(5, rank=0))
    assert drawn(seed_everything(5, rank=0)) == first
    for other in (drawn(seed_everything(5, rank=1)), drawn(seed_everything(6, rank=0))):
        assert all(one != two for one, two in zip(first, other, strict=True))


def test_a_generator_state_survives_json():
    generator = torch.Generator().manual_seed(1)
    torch.randn(3, generator=generator)
    text = generator_to_text(generator)
    expected = torch.randn(5, generator=generator)
    again = torch.Generator()
    generator_from_text(again, text)
    assert torch.equal(torch.randn(5, generator=again), expected)


def engine(rank=0, world_size=1, micro=2):
    group = OneOf(rank, world_size)
    return SimpleNamespace(group=group, plan=SimpleNamespace(micro_batch_size=micro))


def test_datasets_loaders_and_batches_become_streams():
    dataset = ImageTensors(images=torch.arange(-3.0, 3.0).view(6, 1, 1, 1))
    halves = [as_stream(dataset, engine=engine(rank, 2), seed=3) for rank in range(2)]
    assert all(isinstance(half, DataStream) for half in halves)
    seen = [float(value) for _ in range(3) for half in halves for value in next(half)["images"]]
    assert sorted(seen[:6]) == [-3, -2, -1, 0, 1, 2]
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    for batches in (loader, list(loader), tuple(loader)):
        stream = as_stream(batches, engine=engine(), seed=3)
        assert isinstance(stream, RepeatedBatches)
        assert next(stream)["images"].flatten().tolist() == [-3, -2]
    assert as_stream(halves[0], engine=engine(0, 2), seed=3) is halves[0]
    assert as_stream(None, engine=engine(), seed=3) is None


def state_of(group, stream=None):
    generator = torch.Generator().manual_seed(8)
    return trainer_state(stream=stream, generator=generator, seed=8, group=group)


def restore(state, group, stream=None, step=4):
    generator = torch.Generator()
    saved = TrainerState.of(state["trainer"])
    with moved(stream, saved.data, group=group):
        decisions = saved.restore(generator, step=step, group=group)
    return float(torch.rand((), generator=generator)), decisions


def test_another_number_of_ranks_draws_new_noise_with_a_decision_and_keeps_the_data_order():
    stream = DataStream(list(range(6)), micro_batch_size=2)
    next(stream)
    state = state_of(OneOf(world_size=2), stream)
    expected = float(torch.rand((), generator=torch.Generator().manual_seed(8)))
    assert restore(state, OneOf(world_size=2)) == (expected, ())

    later = DataStream(list(range(6)), micro_batch_size=3, seed=1)
    first, (decision,) = restore(state, OneOf(), later)
    assert later.position == 2
    assert (decision.key, decision.before, decision.after) == ("generators", 2, 1)
    assert decision.severity == "warning"
    assert first != expected
    assert restore(state, OneOf())[0] == first, "fixed by the seed and the step"
    assert restore(state, OneOf(), step=5)[0] != first
