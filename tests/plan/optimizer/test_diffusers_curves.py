"""The curves equal diffusers', to the last bit."""

from __future__ import annotations

import pytest

from zerotune.plan.optimizer.choices import SchedulerChoice
from zerotune.plan.optimizer.curves import lr_at

WARMUP, TOTAL, LR = 7, 50, 3e-4
CASES = {
    "constant": {},
    "constant_with_warmup": {"num_warmup_steps": WARMUP},
    "linear": {"num_warmup_steps": WARMUP, "num_training_steps": TOTAL},
    "cosine": {"num_warmup_steps": WARMUP, "num_training_steps": TOTAL, "num_cycles": 0.5},
    "cosine_with_restarts": {
        "num_warmup_steps": WARMUP, "num_training_steps": TOTAL, "num_cycles": 3,
    },
    "polynomial": {
        "num_warmup_steps": WARMUP, "num_training_steps": TOTAL, "power": 2.0, "lr_end": 1e-7,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_curves_equal_those_of_get_scheduler(name):
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("diffusers.optimization")
    params = CASES[name]
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=LR)
    function = optimization.TYPE_TO_SCHEDULER_FUNCTION[optimization.SchedulerType(name)]
    scheduler = function(optimizer, **params)
    choice = SchedulerChoice(name=name, params=params, source="zerotune")
    for step in range(TOTAL + 5):
        assert lr_at(choice, step, LR) == optimizer.param_groups[0]["lr"], step
        optimizer.step()
        scheduler.step()
