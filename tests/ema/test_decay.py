"""Decay schedules equal diffusers' and their definition, and refuse invalid input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.ema import HalfLife, RampDecay, WarmupDecay
from zerotune.ema.decay import ConstantDecay, DecaySchedule, as_schedule, decay_of_update
from zerotune.errors import InvalidValueError


@pytest.mark.parametrize("start_after", [0, 3])
@pytest.mark.parametrize("warmup", [True, False])
def test_decay_schedules_equal_those_of_diffusers(warmup, start_after):
    import torch
    from diffusers.training_utils import EMAModel

    theirs = EMAModel(
        [torch.nn.Parameter(torch.zeros(1))],
        decay=0.995,
        min_decay=0.1,
        update_after_step=start_after,
        use_ema_warmup=warmup,
        inv_gamma=2.0,
        power=0.75,
    )
    ours = (
        WarmupDecay(decay=0.995, inverse_gamma=2.0, power=0.75, min_decay=0.1)
        if warmup
        else RampDecay(decay=0.995, min_decay=0.1)
    )
    for step in [*range(1, 60), 1_000, 5_000]:
        expected = theirs.get_decay(step)
        assert decay_of_update(ours, step=step, start_after=start_after) == pytest.approx(
            expected, rel=1e-12, abs=1e-15
        )


@given(
    decay=st.floats(0.0, 0.99999),
    every=st.integers(1, 50),
    updates=st.integers(1, 20),
)
def test_a_constant_decay_is_raised_to_the_interval(decay, every, updates):
    corrected = decay_of_update(
        ConstantDecay(decay=decay), step=every * updates, update_every=every
    )
    assert corrected == pytest.approx(decay**every, rel=1e-12, abs=1e-300)


def test_an_interval_multiplies_the_decays_of_its_steps():
    schedule = RampDecay(decay=0.9999)
    corrected = decay_of_update(schedule, step=12, update_every=4)
    assert corrected == pytest.approx(math.prod(schedule.at(step) for step in (8, 9, 10, 11)))


def test_an_interval_that_starts_before_the_first_step_copies_the_weights():
    schedule = ConstantDecay(decay=0.9)
    assert decay_of_update(schedule, step=4, update_every=4, start_after=3) == 0.0
    assert decay_of_update(schedule, step=8, update_every=4, start_after=3) == pytest.approx(0.9**4)


def test_after_one_half_life_half_of_the_old_weights_remains():
    assert HalfLife(steps=250).at(7) ** 250 == pytest.approx(0.5)


@given(
    decay=st.floats(0.5, 0.99999),
    gamma=st.floats(0.1, 1e4),
    power=st.floats(0.05, 2.0),
    step=st.integers(0, 10**9),
)
def test_the_warm_up_rises_within_its_bounds(decay, gamma, power, step):
    schedule = WarmupDecay(decay=decay, inverse_gamma=gamma, power=power)
    assert schedule.at(0) == 0.0
    assert 0.0 <= schedule.at(step) <= schedule.at(step + 1) <= decay


def test_numbers_and_custom_objects_become_decay_schedules():
    class Mine:
        def at(self, step: int) -> float:  # noqa: ARG002
            return 0.5

    mine = Mine()
    assert as_schedule(0.9) == ConstantDecay(decay=0.9)
    assert as_schedule(0) == ConstantDecay(decay=0)
    assert as_schedule(mine) is mine
    assert isinstance(mine, DecaySchedule)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: ConstantDecay(decay=1.0), "ConstantDecay.decay"),
        (lambda: ConstantDecay(decay=-0.1), "ConstantDecay.decay"),
        (lambda: ConstantDecay(decay=math.nan), "ConstantDecay.decay"),
        (lambda: ConstantDecay(decay="0.9"), "ConstantDecay.decay"),
        (lambda: as_schedule(True), "ConstantDecay.decay"),
        (lambda: as_schedule("fast"), "decay"),
        (lambda: WarmupDecay(inverse_gamma=0), "WarmupDecay.inverse_gamma"),
        (lambda: WarmupDecay(power=-1), "WarmupDecay.power"),
        (lambda: RampDecay(min_decay=2), "RampDecay.min_decay"),
        (lambda: HalfLife(steps=0), "HalfLife.steps"),
    ],
)
def test_invalid_values_are_named(make, key):
    with pytest.raises(InvalidValueError) as caught:
        make()
    assert caught.value.key == key


def test_a_schedule_that_leaves_its_range_is_named():
    class Growing:
        def at(self, step: int) -> float:
            return 1.0 + step

    with pytest.raises(InvalidValueError, match="step 4"):
        decay_of_update(Growing(), step=5)
