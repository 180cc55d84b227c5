"""Each optimizer under ZeRO against the same optimizer alone: partitioning must not change it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.models import tiny_unet
from tests.support.ranks import run_ranks
from tests.support.runs import Case, start, unet_loss

pytestmark = pytest.mark.deepspeed

STEPS, FEWER = 20, 8
# Relative difference of single losses over 20 steps in fp32. Partitioned sums run in another order;
# Adam's division by small second moments amplifies that to 2e-5. Muon's iteration multiplies
# rounding by its coefficients (3.4 per round, five rounds), and Lion turns a difference in the last
# bit into one of 2 lr where a momentum is nearly 0. A bf16 moment's rounding depends on its place
# in the shard, so ZeRO's is another sample.
TOLERANCES = {"Lion": 3e-4, "Muon": 3e-4, "AdamWBF16States": 2e-2}
TOLERANCE = 5e-5

PARAMS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3},
    "Adam": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.01},
    "Adagrad": {"lr": 1e-2},
    "Lion": {"lr": 1e-4, "weight_decay": 0.1},
    "Muon": {"lr": 2e-2, "adam_lr": 1e-3},
    "AdamWBF16States": {"lr": 1e-3},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "RMSprop": {"lr": 1e-3},
    "NAdam": {"lr": 1e-3},
    "Adamax": {"lr": 1e-3},
    "RAdam": {"lr": 1e-3},
    "Adadelta": {"lr": 1.0},
}
PLACES = [(1, "none"), (2, "none"), (3, "none"), (1, "cpu"), (2, "cpu"), (3, "cpu")]
FEW = [
    ("Lion", 1, "none"), ("Muon", 3, "cpu"), ("SGD", 3, "none"),
    ("AdamWBF16States", 2, "cpu"),
]  # fmt: skip
"""Each stage, and each need of optimizers: whole parameters, custom states, torch's class."""
SPLIT = [("Muon", 2, "none")]


def train(case: Case, steps: int) -> list[float]:
    """Return the losses; fail if another optimizer runs than the requested one."""
    engine = start(case, tiny_unet())
    assert engine.plan.optimizer.name == case.optimizer["type"]
    losses = []
    for step in range(steps):
        loss = unet_loss(engine, step)
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    engine.close()
    return losses


def train_all(
    cells: list[tuple[str, int, str]], steps: int
) -> dict[tuple[str, int, str], list[float]]:
    """Return the losses of every cell, and of each optimizer alone under stage ``-1``."""
    names = dict.fromkeys(name for name, _, _ in cells)
    return {
        (name, stage, offload): train(
            Case(
                stage=max(stage, 0),
                offload=offload,
                deepspeed=stage >= 0,
                optimizer={"type": name, "params": PARAMS[name]},
                lr=PARAMS[name]["lr"],
                # Partition every parameter, and step several sub-groups one after the other.
                overrides=(("stage3_param_persistence_threshold", 0), ("sub_group_size", 20_000))
                if stage == 3
                else (),
            ),
            steps,
        )
        for name, stage, offload in [*((name, -1, "none") for name in names), *cells]
    }


def assert_equal(results: dict[tuple[str, int, str], list[float]]) -> None:
    for (name, stage, offload), losses in results.items():
        alone = results[name, -1, "none"]
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))
        assert worst < TOLERANCES.get(name, TOLERANCE), (name, stage, offload, worst)
        assert min(losses[-5:]) < losses[0], f"{name} must learn, or agreement means nothing"


def test_a_sample_of_layouts_matches_the_optimizer_alone() -> None:
    (results,) = run_ranks(train_all, FEW, FEWER)
    assert_equal(results)


def test_optimizers_that_need_whole_parameters_match_when_partitioned() -> None:
    for results in run_ranks(train_all, SPLIT, FEWER, world_size=2):
        assert_equal(results)


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(PARAMS))
def test_every_stage_and_offload_matches_the_optimizer_alone(name: str) -> None:
    (results,) = run_ranks(train_all, [(name, *place) for place in PLACES], STEPS, timeout_s=400)
    assert_equal(results)
