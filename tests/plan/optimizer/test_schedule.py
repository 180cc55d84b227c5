from __future__ import annotations

import pytest

from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.optim import OptimizerResolver
from zerotune.plan.context import RunFacts
from zerotune.plan.optimizer.curves import lr_at

ADAMW = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


@pytest.fixture
def schedule(make_plan):
    def run(name=None, params=None, *, optimizer="AdamW", arguments=ADAMW, **kwargs):
        plan = make_plan(optimizer, arguments, scheduler=name, scheduler_params=params, **kwargs)
        return OptimizerResolver().resolve(plan)

    return run


def test_without_a_scheduler_section_the_rate_is_constant_as_in_deepspeed(schedule, decisions_for):
    resolution = schedule()
    assert resolution.scheduler is None
    (decision,) = decisions_for(resolution, "scheduler.type")
    assert "stays constant" in decision.reason
    assert [item for item in resolution.decisions if item.key.startswith("scheduler.params")] == []


def test_warm_up_steps_without_a_scheduler_give_a_warning(schedule, decisions_for):
    resolution = schedule(run=RunFacts(warmup_steps=37))
    assert resolution.scheduler is None
    (decision,) = decisions_for(resolution, "run.warmup_steps")
    assert (decision.severity, decision.before) == ("warning", 37)
    assert "scheduler.type" in decision.reason


def test_the_default_warms_up_to_the_optimizers_lr(schedule, decisions_for):
    resolution = schedule("auto")
    assert resolution.scheduler.name == "WarmupLR"
    assert dict(resolution.scheduler.params) == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 1e-4,
        "warmup_num_steps": 500,
        "warmup_type": "log",
    }
    (decision,) = decisions_for(resolution, "scheduler.type")
    assert (decision.before, decision.after) == (None, "WarmupLR")


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        (RunFacts(), 500),
        (RunFacts(warmup_steps=37), 37),
        (RunFacts(warmup_steps=37, total_steps=100), 37),
        (RunFacts(total_steps=100_000), 500),
        (RunFacts(total_steps=1000), 50),
        (RunFacts(total_steps=40), 2),
    ],
)
def test_the_default_warm_up_fits_into_the_run(schedule, decisions_for, run, steps):
    resolution = schedule("auto", run=run)
    assert resolution.scheduler.params["warmup_num_steps"] == steps
    (decision,) = decisions_for(resolution, "scheduler.params.warmup_num_steps")
    assert (decision.before, decision.after) == (None, steps)


@pytest.mark.parametrize("run", [RunFacts(total_steps=5), RunFacts(warmup_steps=0)])
def test_a_run_too_short_for_a_warm_up_starts_at_the_peak(schedule, run):
    """DeepSpeed's shortest warm-up would waste two updates at a learning rate of 0."""
    resolution = schedule("auto", run=run)
    assert [lr_at(resolution.scheduler, step, 1e-4) for step in range(5)] == [1e-4] * 5
    assert all(item.severity == "note" for item in resolution.decisions)


def test_a_complete_schedule_is_used_unchanged(schedule):
    written = {
        "warmup_min_lr": 0,
        "warmup_max_lr": 1e-4,
        "warmup_num_steps": 500,
        "warmup_type": "linear",
    }
    resolution = schedule("WarmupLR", written)
    assert dict(resolution.scheduler.params) == written
    assert [item for item in resolution.decisions if item.key.startswith("scheduler")] == []


def test_auto_values_are_filled(schedule, decisions_for):
    resolution = schedule(
        "WarmupDecayLR",
        {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
        run=RunFacts(total_steps=900, warmup_steps=90),
    )
    assert dict(resolution.scheduler.params) == {
        "total_num_steps": 900,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 1e-4,
        "warmup_num_steps": 90,
        "warmup_type": "log",
    }
    for key in ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"):
        (decision,) = decisions_for(resolution, f"scheduler.params.{key}")
        assert decision.before == "auto"


@pytest.mark.parametrize("params", [{"total_num_steps": "auto"}, {}])
@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_an_unknown_total_length_is_an_error_that_names_the_key(schedule, name, params):
    with pytest.raises(OptimizerError) as error:
        schedule(name, {"warmup_num_steps": 10, **params})
    assert error.value.key == "scheduler.params.total_num_steps"
    assert "RunFacts(total_steps=…)" in error.value.fix


def test_an_explicit_length_wins_over_the_run(schedule, decisions_for):
    resolution = schedule(
        "WarmupDecayLR",
        {"total_num_steps": 1000, "warmup_num_steps": 10},
        run=RunFacts(total_steps=2000),
    )
    assert resolution.scheduler.params["total_num_steps"] == 1000
    (decision,) = decisions_for(resolution, "scheduler.params.total_num_steps")
    assert (decision.before, decision.after, decision.severity) == (2000, 1000, "warning")


def test_a_peak_that_replaces_the_optimizers_lr_gives_a_warning(schedule, decisions_for):
    resolution = schedule("WarmupLR", {"warmup_max_lr": 1e-3, "warmup_num_steps": 10})
    assert resolution.scheduler.params["warmup_max_lr"] == 1e-3
    (decision,) = decisions_for(resolution, "optimizer.params.lr")
    assert (decision.before, decision.after, decision.severity) == (1e-4, 1e-3, "warning")


def test_a_warm_up_longer_than_the_schedule_gives_a_warning(schedule, decisions_for):
    resolution = schedule("WarmupDecayLR", {"total_num_steps": 100, "warmup_num_steps": 200})
    (decision,) = decisions_for(resolution, "scheduler.params.total_num_steps")
    assert decision.severity == "warning"


class TestNoWarmUp:
    """DeepSpeed: ``warmup_num_steps must be a positive integer``."""

    def test_without_warm_up_steps_warmup_lr_becomes_constant(self, schedule, decisions_for):
        resolution = schedule("WarmupLR", {"warmup_num_steps": 0, "warmup_max_lr": 1e-4})
        assert [lr_at(resolution.scheduler, step, 1e-4) for step in range(9)] == [1e-4] * 9
        assert resolution.scheduler.params["warmup_num_steps"] == 1
        (decision,) = decisions_for(resolution, "scheduler.params.warmup_num_steps")
        assert (decision.before, decision.after, decision.severity) == (0, 1, "warning")

    def test_without_warm_up_steps_cosine_reaches_its_peak_after_one_update(self, schedule):
        resolution = schedule("WarmupCosineLR", {"warmup_num_steps": 0, "total_num_steps": 50})
        curve = [lr_at(resolution.scheduler, step, 1e-4) for step in range(50)]
        assert curve[:3] == [0.0, 1e-4, 1e-4]
        assert curve[1:] == sorted(curve[1:], reverse=True)

    def test_without_warm_up_steps_decay_keeps_its_minimum_and_ends_there(self, schedule):
        resolution = schedule("WarmupDecayLR", {"warmup_num_steps": 0, "total_num_steps": 50})
        assert resolution.scheduler.params["warmup_min_lr"] == 0.0
        curve = [lr_at(resolution.scheduler, step, 1e-4) for step in range(51)]
        assert curve[:2] == [0.0, 0.0]
        assert max(curve) == 1e-4
        assert curve[50] == pytest.approx(1e-4 / 48)


def test_last_batch_iteration_is_left_to_checkpoints(schedule):
    written = {"warmup_num_steps": 10, "last_batch_iteration": -1}
    assert "last_batch_iteration" not in schedule("WarmupLR", written).scheduler.params
    with pytest.raises(InvalidValueError, match="checkpoint"):
        schedule("WarmupLR", {**written, "last_batch_iteration": 100})


def test_diffusers_schedules_get_their_lengths_from_the_run(schedule):
    resolution = schedule("cosine", {}, run=RunFacts(total_steps=100, warmup_steps=7))
    choice = resolution.scheduler
    assert choice.source == "zerotune"
    assert choice.params == {"num_warmup_steps": 7, "num_training_steps": 100, "num_cycles": 0.5}
