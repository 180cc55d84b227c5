"""The curves equal those of the real DeepSpeed classes, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.errors import InvalidValueError, OptimizerError, UnresolvedPlanError
from zerotune.plan.optimizer.choices import SchedulerChoice
from zerotune.plan.optimizer.curves import lr_at

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
    ours = [(lr_at(scheduler, step, BASE_LR), BETAS) for step in range(steps)]
    assert ours == deepspeed_curve(lr_schedules, name, params, steps)


lrs = st.floats(min_value=0.0, max_value=1.0, allow_nan=False)
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


WARMUP = {
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 1e-4,
    "warmup_num_steps": 500,
    "warmup_type": "log",
}


def test_no_schedule_gives_a_constant_rate():
    assert lr_at(None, 10_000, BASE_LR) == BASE_LR


def test_a_negative_step_is_refused():
    with pytest.raises(InvalidValueError, match=r"step = -1"):
        lr_at(choice("WarmupLR", WARMUP), -1, BASE_LR)


def test_an_unknown_schedule_error_lists_the_known_ones():
    with pytest.raises(OptimizerError, match=r"scheduler.type = 'Cosine'.*WarmupCosineLR"):
        lr_at(choice("Cosine", {}), 0, BASE_LR)


def test_a_missing_argument_is_named():
    params = {key: value for key, value in WARMUP.items() if key != "warmup_type"}
    with pytest.raises(UnresolvedPlanError, match=r"scheduler\.params\.warmup_type"):
        lr_at(choice("WarmupLR", params), 7, BASE_LR)
