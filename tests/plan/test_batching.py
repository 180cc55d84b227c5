from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.errors import PlanConflictError
from zerotune.plan import DeepSpeedPlan, RunFacts
from zerotune.plan.resolve.batch import Batch, solve_batch
from zerotune.plan.sections import LaunchSection

AUTO = "auto"


def solve(train=None, micro=None, accumulation=None, *, world_size=1, **run):
    plan = DeepSpeedPlan(
        train_batch_size=train,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=accumulation,
    )
    return solve_batch(plan, run=RunFacts(**run), world_size=world_size)


@pytest.mark.parametrize(
    ("written", "world_size", "run", "solved"),
    [
        ((8, 2, 4), 1, {}, (8, 2, 4)),
        ((16, 2, 4), 2, {}, (16, 2, 4)),
        ((8, 2, None), 2, {}, (8, 2, 2)),
        ((8, 2, AUTO), 4, {}, (8, 2, 1)),
        ((8, None, 4), 2, {}, (8, 1, 4)),
        ((8, None, None), 2, {}, (8, 4, 1)),
        ((8, AUTO, AUTO), 1, {"micro_batch_size": 2}, (8, 2, 4)),
        ((8, AUTO, AUTO), 1, {"gradient_accumulation_steps": 2}, (8, 4, 2)),
        ((None, 2, 4), 2, {}, (16, 2, 4)),
        ((AUTO, AUTO, AUTO), 3, {}, (3, 1, 1)),
        ((None, None, 4), 1, {}, (4, 1, 4)),
        (
            (None, None, None),
            2,
            {"micro_batch_size": 3, "gradient_accumulation_steps": 2},
            (12, 3, 2),
        ),
    ],
)
def test_missing_numbers_are_solved(written, world_size, run, solved):
    batch, _ = solve(*written, world_size=world_size, **run)
    assert (batch.train, batch.micro, batch.accumulation) == solved


def test_a_filled_number_is_recorded_with_its_arithmetic():
    _, decisions = solve(8, 2, AUTO, world_size=2)
    (decision,) = decisions
    assert decision.key == "gradient_accumulation_steps"
    assert (decision.before, decision.after) == (AUTO, 2)
    assert "train batch 8 / (micro batch 2 x world size 2)" in decision.reason


def test_a_default_micro_batch_of_one_is_recorded():
    batch, decisions = solve()
    assert batch == Batch(train=1, micro=1, accumulation=1)
    assert [d.key for d in decisions] == [
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
    ]


def test_reference_a_above_one_process_is_an_error_with_a_fix():
    with pytest.raises(PlanConflictError) as caught:
        solve(8, 2, 4, world_size=2)
    message = str(caught.value)
    assert message.startswith("train_batch_size = 8: 8 != 2 (train_micro_batch_size_per_gpu)")
    assert "x 4 (gradient_accumulation_steps) x 2 (world size)" in message
    assert "are consistent at world size 1" in message
    for change in (
        "train_batch_size = 16",
        "gradient_accumulation_steps = 2",
        "train_micro_batch_size_per_gpu = 1",
    ):
        assert change in caught.value.fix


def test_numbers_that_no_world_size_satisfies_are_reported_as_such():
    with pytest.raises(PlanConflictError, match="no number of processes makes"):
        solve(7, 2, 4)


def test_an_uneven_share_is_refused():
    with pytest.raises(PlanConflictError, match="multiple of 21, such as"):
        solve(2**62, None, 3, world_size=7)


def test_a_conflicting_request_of_the_run_is_not_silently_ignored():
    batch, decisions = solve(8, 2, 4, micro_batch_size=8, gradient_accumulation_steps=1)
    assert batch.micro == 2
    assert [(d.key, d.before, d.after, d.severity) for d in decisions] == [
        ("train_micro_batch_size_per_gpu", 8, 2, "warning"),
        ("gradient_accumulation_steps", 1, 4, "warning"),
    ]


def test_accumulation_in_the_launchers_file_fills_an_open_value():
    plan = DeepSpeedPlan(launch=LaunchSection(gradient_accumulation_steps=4))
    assert solve_batch(plan, run=RunFacts(), world_size=1)[0].accumulation == 4
    run = RunFacts(gradient_accumulation_steps=2)
    assert solve_batch(plan, run=run, world_size=1)[0].accumulation == 2


NUMBERS = st.none() | st.just(AUTO) | st.integers(1, 64)


@settings(deadline=None)
@given(NUMBERS, NUMBERS, NUMBERS, st.integers(1, 9), st.none() | st.integers(1, 8))
def test_a_solution_is_consistent_and_keeps_explicit_values(
    train, micro, accumulation, world, run_micro
):
    try:
        batch, _ = solve(train, micro, accumulation, world_size=world, micro_batch_size=run_micro)
    except PlanConflictError:
        return
    assert batch.train == batch.micro * batch.accumulation * world
    for written, solved in zip(
        (train, micro, accumulation), (batch.train, batch.micro, batch.accumulation), strict=True
    ):
        assert written in (None, AUTO, solved)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.integers(1, 9))
def test_every_change_proposed_by_an_error_works(train, micro, accumulation, world):
    try:
        solve(train, micro, accumulation, world_size=world)
    except PlanConflictError as error:
        names = {
            "train_batch_size": 0,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
        }
        proposals = re.findall(r"(\w+) = (\d+)", error.fix)
        assert proposals
        for name, value in proposals:
            numbers = [train, micro, accumulation]
            numbers[names[name]] = int(value)
            solve(*numbers, world_size=world)
