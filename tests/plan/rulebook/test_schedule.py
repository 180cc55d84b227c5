from __future__ import annotations

import pytest

from tests.plan.rulebook.findings import find, one
from zerotune.plan import DeepSpeedPlan, RunFacts
from zerotune.plan.optimizer.resolver import OptimizerResolver
from zerotune.platform import Platform


def schedule(name, **params):
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": name, "params": params},
    }


@pytest.mark.parametrize(("steps", "found"), [(0, 1), (1, 0), ("auto", 0), (None, 0)])
def test_no_warmup(steps, found):
    assert len(find("scheduler-no-warmup", schedule("WarmupLR", warmup_num_steps=steps))) == found


def test_no_warmup_is_recorded_once():
    plan = DeepSpeedPlan.from_dict(schedule("WarmupLR", warmup_num_steps=0))
    finding = one("scheduler-no-warmup", plan)
    resolved = plan.resolve(platform=Platform.synthetic("cuda"))
    settled = OptimizerResolver().resolve(resolved)
    assert settled.scheduler.params["warmup_num_steps"] == 1
    recorded = [each for each in settled.decisions if each.key == finding.key]
    assert [(each.before, each.after) for each in recorded] == [(0, 1)]


@pytest.mark.parametrize(
    ("warmup", "total", "run", "found"),
    [
        (500, None, 1000, 0),
        (1000, None, 1000, 1),
        (500, 400, None, 1),
        (500, 500, 1000, 1),
        (500, "auto", None, 0),
        (0, None, 0, 0),
    ],
)
def test_warmup_too_long(warmup, total, run, found):
    config = schedule("WarmupDecayLR", warmup_num_steps=warmup, total_num_steps=total)
    findings = find("scheduler-warmup-too-long", config, run=RunFacts(total_steps=run))
    assert len(findings) == found
    if found:
        assert "never reaches its peak" in findings[0].reason


@pytest.mark.parametrize(
    ("name", "total", "reason"),
    [
        ("WarmupDecayLR", 800, "stays at 0 for the last 200 steps"),
        ("WarmupCosineLR", 800, "stays at its smallest value for the last 200 steps"),
        ("WarmupDecayLR", 1500, "ends 500 steps before"),
    ],
)
def test_scheduler_total(name, total, reason):
    run = RunFacts(total_steps=1000)
    finding = one("scheduler-total", schedule(name, total_num_steps=total), run=run)
    assert reason in finding.reason
    assert finding.fix == 'write 1000, or "auto"'


@pytest.mark.parametrize(("total", "run"), [(1000, 1000), (1000, None), ("auto", 5), (None, 5)])
def test_scheduler_total_that_fits_or_is_unknown(total, run):
    config = schedule("WarmupDecayLR", total_num_steps=total)
    assert find("scheduler-total", config, run=RunFacts(total_steps=run)) == []


@pytest.mark.parametrize(
    ("name", "lr", "params", "fix"),
    [
        ("WarmupDecayLR", 1e-4, {}, "write 0.0001, or 0.001"),
        ("WarmupDecayLR", "auto", {}, 'write "auto", or 0.001'),
        ("WarmupDecayLR", 1e-3, {}, None),
        ("WarmupDecayLR", 1e-4, {"warmup_max_lr": "auto"}, None),
        ("WarmupDecayLR", 1e-4, {"warmup_max_lr": None}, None),
        ("WarmupLR", 1e-4, {}, None),
    ],
)
def test_a_schedule_that_peaks_elsewhere_in_deepspeed(name, lr, params, fix):
    config = schedule(name, total_num_steps=1000, **params)
    config["optimizer"]["params"]["lr"] = lr
    findings = find("scheduler-peak-unset", config)
    assert [fix in finding.fix for finding in findings] == [True] * (fix is not None)


@pytest.mark.deepspeed
@pytest.mark.parametrize("params", [{}, {"warmup_max_lr": 5e-5}])
def test_the_peak_that_deepspeed_chooses(params):
    import torch
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    theirs = WarmupDecayLR(optimizer, total_num_steps=1000, **params).max_lrs
    config = schedule("WarmupDecayLR", total_num_steps=1000, **params)
    config["optimizer"]["params"]["lr"] = 1e-4
    resolved = DeepSpeedPlan.from_dict(config).resolve(platform=Platform.synthetic("cuda"))
    ours = OptimizerResolver().resolve(resolved).scheduler.params["warmup_max_lr"]
    assert bool(find("scheduler-peak-unset", config)) == (theirs != [ours])


@pytest.mark.parametrize(
    ("steps", "found"), [(1e3, 1), ("100", 1), (100, 0), ("auto", 0), (None, 0), (1.5, 0)]
)
def test_a_warmup_that_is_no_integer_in_json(steps, found):
    findings = find("scheduler-warmup-number", schedule("WarmupLR", warmup_num_steps=steps))
    assert len(findings) == found
    if found:
        assert findings[0].fix == f"write {int(float(steps))}"


@pytest.mark.deepspeed
@pytest.mark.parametrize("steps", [1e3, "100", 100])
@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_deepspeed_rejects_the_same_numbers_of_warmup_steps(name, steps):
    import torch
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    params = {} if name == "WarmupLR" else {"total_num_steps": 1000}
    try:
        getattr(lr_schedules, name)(optimizer, warmup_num_steps=steps, **params)
        refused = False
    except ValueError:
        refused = True
    config = schedule(name, warmup_num_steps=steps, **params)
    assert bool(find("scheduler-warmup-number", config)) == refused
