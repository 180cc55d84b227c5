"""The curves equal those of the real DeepSpeed classes, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.errors import InvalidValueError, OptimizerError, UnresolvedPlanError
from zerotune.plan.optimizer.choices import SchedulerChoice
from zerotune.plan.optimizer.curves import betas_at, lr_at

BASE_LR = 3e-4
BETAS = (0.9, 0.95)
STEPS = 200


@pytest.fixture(scope="module")
def lr_schedules():
    # DeepSpeed chooses its accelerator on import, so set it before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        return pytest.importorskip("deepspeed.runtime.lr_schedules")


def choice(name: str, params: dict) -> SchedulerChoice:
    return SchedulerChoice(name=name, params=params)


def deepspeed_curve(lr_schedules, name, params, steps=STEPS):
    """Return ``(lr, betas)`` of the parameter group during each of ``steps`` updates."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=BASE_LR, betas=BETAS)
    scheduler = getattr(lr_schedules, name)(optimizer, **params)
    seen = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        seen.append((group["lr"], tuple(group["betas"])))
        # The engine's order in `_take_model_step`: the optimizer, then the scheduler.
        scheduler.step()
    return seen


def assert_equal_curves(lr_schedules, name, params, steps=STEPS):
    scheduler = choice(name, params)
    ours = [
        (lr_at(scheduler, step, BASE_LR), betas_at(scheduler, step, BETAS)) for step in range(steps)
    ]
    assert ours == deepspeed_curve(lr_schedules, name, params, steps)


lrs = st.floats(min_value=0.0, max_value=1.0, allow_nan=False)
positive_lrs = st.floats(min_value=1e-8, max_value=1.0, allow_nan=False)
warmup_types = st.sampled_from(["log", "linear"])
warmup_steps = st.integers(min_value=1, max_value=250)
totals = st.integers(min_value=1, max_value=400)


@settings(max_examples=60, deadline=None)
@given(
    low=lrs,
    high=st.one_of(st.none(), lrs),
    steps=warmup_steps,
    kind=warmup_types,
)
def test_warmup_lr_equals_that_of_deepspeed(lr_schedules, low, high, steps, kind):
    assert_equal_curves(
        lr_schedules,
        "WarmupLR",
        {
            "warmup_min_lr": low,
            "warmup_max_lr": high,
            "warmup_num_steps": steps,
            "warmup_type": kind,
        },
    )


@settings(max_examples=60, deadline=None)
@given(low=lrs, high=lrs, steps=warmup_steps, kind=warmup_types, total=totals)
def test_warmup_decay_lr_equals_that_of_deepspeed(lr_schedules, low, high, steps, kind, total):
    assert_equal_curves(
        lr_schedules,
        "WarmupDecayLR",
        {
            "total_num_steps": total,
            "warmup_min_lr": low,
            "warmup_max_lr": high,
            "warmup_num_steps": steps,
            "warmup_type": kind,
        },
    )


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.floats(0.0, 1.0),
    floor=st.floats(0.0, 1.0),
    steps=warmup_steps,
    kind=warmup_types,
    total=totals,
)
def test_warmup_cosine_lr_equals_that_of_deepspeed(lr_schedules, ratio, floor, steps, kind, total):
    assert_equal_curves(
        lr_schedules,
        "WarmupCosineLR",
        {
            "total_num_steps": total,
            "warmup_min_ratio": ratio,
            "warmup_num_steps": steps,
            "cos_min_ratio": floor,
            "warmup_type": kind,
        },
    )


@settings(max_examples=60, deadline=None)
@given(
    low=positive_lrs,
    size=st.integers(1, 300),
    rate=st.floats(0.0, 10.0),
    staircase=st.booleans(),
)
def test_lr_range_test_equals_that_of_deepspeed(lr_schedules, low, size, rate, staircase):
    assert_equal_curves(
        lr_schedules,
        "LRRangeTest",
        {
            "lr_range_test_min_lr": low,
            "lr_range_test_step_size": size,
            "lr_range_test_step_rate": rate,
            "lr_range_test_staircase": staircase,
        },
    )


@settings(max_examples=150, deadline=None)
@given(
    low=positive_lrs,
    high=positive_lrs,
    decay=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    # DeepSpeed allows fractional half-cycles, which reveal a changed order of subtraction.
    first=st.one_of(st.integers(1, 150), st.floats(0.5, 150.0)),
    second=st.one_of(st.none(), st.integers(0, 150), st.floats(0.0, 150.0)),
    first_stairs=st.integers(0, 7),
    second_stairs=st.one_of(st.none(), st.integers(0, 7)),
    decay_step=st.integers(0, 50),
    momentum=st.booleans(),
    min_mom=st.floats(0.0, 0.99),
    max_mom=st.floats(0.0, 0.99),
    decay_mom=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
def test_one_cycle_equals_that_of_deepspeed(
    lr_schedules, low, high, decay, first, second, first_stairs, second_stairs, decay_step,
    momentum, min_mom, max_mom, decay_mom,
):  # fmt: skip
    assert_equal_curves(
        lr_schedules,
        "OneCycle",
        {
            "cycle_min_lr": low,
            "cycle_max_lr": high,
            "decay_lr_rate": decay,
            "cycle_first_step_size": first,
            "cycle_second_step_size": second,
            "cycle_first_stair_count": first_stairs,
            "cycle_second_stair_count": second_stairs,
            "decay_step_size": decay_step,
            "cycle_momentum": momentum,
            "cycle_min_mom": min_mom,
            "cycle_max_mom": max_mom,
            "decay_mom_rate": decay_mom,
        },
    )


WARMUP = {
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 1e-4,
    "warmup_num_steps": 500,
    "warmup_type": "log",
}


def test_no_schedule_gives_a_constant_rate():
    assert lr_at(None, 10_000, BASE_LR) == BASE_LR
    assert betas_at(None, 10_000, BETAS) == BETAS


def test_only_one_cycle_changes_betas_and_missing_betas_stay_none():
    assert betas_at(choice("WarmupLR", WARMUP), 3, BETAS) == BETAS
    one_cycle = choice("OneCycle", {"cycle_momentum": True})
    assert betas_at(one_cycle, 3, None) is None


def test_a_negative_step_is_refused():
    with pytest.raises(InvalidValueError, match=r"step = -1"):
        lr_at(choice("WarmupLR", WARMUP), -1, BASE_LR)
    with pytest.raises(InvalidValueError, match=r"step = -1"):
        betas_at(None, -1, BETAS)


def test_an_unknown_schedule_error_lists_the_known_ones():
    with pytest.raises(OptimizerError, match=r"scheduler.type = 'Cosine'.*WarmupCosineLR"):
        lr_at(choice("Cosine", {}), 0, BASE_LR)


def test_a_missing_argument_is_named():
    params = {key: value for key, value in WARMUP.items() if key != "warmup_type"}
    with pytest.raises(UnresolvedPlanError, match=r"scheduler\.params\.warmup_type"):
        lr_at(choice("WarmupLR", params), 7, BASE_LR)
