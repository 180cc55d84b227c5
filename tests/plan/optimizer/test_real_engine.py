"""The resolver's choices, compared with what the real DeepSpeed engine builds."""

from __future__ import annotations

import json
import math

import pytest

from tests.plan.optimizer.engine_probe import run_all
from tests.support.ranks import run_ranks
from zerotune.optim import OptimizerResolver
from zerotune.plan.optimizer.curves import lr_at

LR, DECAY, WEIGHT = 0.01, 0.1, 3.0
CONSTANT = {"warmup_num_steps": 0}

OPTIMIZERS = {
    "AdamW": ("AdamW", {"lr": LR, "weight_decay": DECAY}),
    "Adam": ("Adam", {"lr": LR, "weight_decay": DECAY}),
    "Adam L2": ("Adam", {"lr": LR, "weight_decay": DECAY, "adam_w_mode": False}),
    "AdamW torch": ("AdamW", {"lr": LR, "weight_decay": DECAY, "torch_adam": True}),
    "Adam torch L2": (
        "Adam",
        {"lr": LR, "weight_decay": DECAY, "torch_adam": True, "adam_w_mode": False},
    ),
    "Adagrad": ("Adagrad", {"lr": LR, "weight_decay": DECAY}),
    "SGD": ("SGD", {"lr": LR, "weight_decay": DECAY, "momentum": 0.9}),
    "NAdam": ("NAdam", {"lr": LR, "weight_decay": DECAY}),
    "RAdam decoupled": (
        "RAdam",
        {"lr": LR, "weight_decay": DECAY, "decoupled_weight_decay": True},
    ),
    "RMSprop": ("RMSprop", {"lr": LR}),
    "Lion": ("Lion", {"lr": LR, "weight_decay": DECAY}),
}

SCHEDULES = {
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 8, "warmup_type": "linear"},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 8},
}

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow, pytest.mark.timeout(900)]


def run_probe(cases):
    # Compare as JSON, which has no tuples, like DeepSpeed's configuration.
    (results,) = run_ranks(run_all, json.loads(json.dumps(cases)))
    return json.loads(json.dumps(results))


def settle(make_plan, name, params, schedule, schedule_params, **situation):
    plan = make_plan(
        name, params, scheduler=schedule, scheduler_params=schedule_params, **situation
    )
    return OptimizerResolver().resolve(plan)


def case_for(applied, steps):
    choice = applied.optimizer
    return {
        "config": applied.to_deepspeed(),
        "source": choice.source,
        "implementation": choice.implementation,
        "params": dict(choice.params),
        "steps": steps,
        "weight": WEIGHT,
    }


DECOUPLED = WEIGHT * (1 - LR * DECAY)
"""The weight after one update with a gradient of 0 under decoupled decay."""
L2 = WEIGHT - LR
"""The same under L2 decay, which Adam sees as a gradient: its first step has length ``lr``."""


def assert_decays(weight, mode, label):
    if mode == "decoupled":
        assert math.isclose(weight, DECOUPLED, rel_tol=1e-6), label
    elif mode == "l2" and "Adam" in label and label != "NAdam":
        assert math.isclose(weight, L2, rel_tol=1e-6), label
    elif mode == "l2":
        # NAdam's momentum schedule scales the first step.
        assert L2 - LR < weight < (L2 + DECOUPLED) / 2, label


@pytest.mark.parametrize(
    "situation",
    [
        pytest.param({"stage": 1, "offload": "none"}, id="stage 1"),
        pytest.param({"stage": 2, "offload": "cpu"}, id="stage 2, cpu offload"),
    ],
)
def test_the_engine_builds_the_resolved_optimizer_and_schedule(make_plan, situation):
    settled = {
        label: settle(make_plan, name, params, "WarmupLR", CONSTANT, **situation)
        for label, (name, params) in OPTIMIZERS.items()
        if label != "Lion" or situation["offload"] == "cpu"
    }
    results = run_probe({label: case_for(applied, steps=1) for label, applied in settled.items()})
    for label, applied in settled.items():
        choice, result = applied.optimizer, results[label]
        assert result["class"] == choice.implementation, label
        assert result["basic"] == choice.implementation, label
        for key, value in result["group"].items():
            expected = choice.params[key]
            assert value == (list(expected) if isinstance(expected, tuple) else expected), label
        assert [lr for lr, _ in result["seen"]] == [LR], label
        assert_decays(result["weight"], choice.weight_decay_mode, label)


def test_the_engines_learning_rates_follow_the_curves(make_plan):
    steps = 10
    settled = {
        name: settle(
            make_plan, "AdamW", {"lr": LR, "betas": [0.9, 0.95]}, name, params, stage=1,
            offload="none",
        )
        for name, params in SCHEDULES.items()
    }  # fmt: skip
    results = run_probe({name: case_for(applied, steps) for name, applied in settled.items()})
    for name, applied in settled.items():
        expected = [
            [
                lr_at(applied.scheduler, step, LR),
                [0.9, 0.95],
            ]
            for step in range(steps)
        ]
        assert results[name]["seen"] == expected, name
