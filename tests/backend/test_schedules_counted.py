"""Schedules count optimizer steps, not micro batches or the steps of other processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import ranks
from tests.support.runs import build
from zerotune.plan.optimizer.choices import SchedulerChoice
from zerotune.plan.optimizer.curves import lr_at

pytestmark = pytest.mark.deepspeed

STEPS = 50
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {
        "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 60,
        "warmup_type": "linear",
    },
    "cosine": {"num_warmup_steps": 10, "num_training_steps": 80, "num_cycles": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("world_size", [2])
@ranks()
def test_schedules_count_optimizer_steps_and_not_micro_batches(world_size: int) -> None:
    from zerotune.plan.plan import DeepSpeedPlan

    found = {}
    for name, params in SCHEDULES.items():
        for accumulation in [1, 4]:
            plan = DeepSpeedPlan.build(
                stage=2,
                precision="fp32",
                gradient_accumulation_steps=accumulation,
                optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
                scheduler={"type": name, "params": params},
            )
            with build(torch.nn.Linear(3, 1), plan) as engine:
                for _ in range(STEPS * accumulation):
                    engine.backward(engine(torch.ones(2, 3)).pow(2).mean())
                    engine.step()
                found[name, accumulation] = engine.lr
    for (name, _), rate in found.items():
        choice = SchedulerChoice(name=name, params=SCHEDULES[name])
        assert rate == lr_at(choice, STEPS, 1e-3), name
