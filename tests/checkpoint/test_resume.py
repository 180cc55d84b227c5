"""A resumed run equals an uninterrupted one, bit for bit, on real engines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.checkpoint.runs import (
    AFTER,
    BEFORE,
    WideBufferedNet,
    hostile,
    reseed,
    resumed,
    shadow_of,
    train,
    uninterrupted,
)
from tests.support.ranks import ranks, run_ranks
from tests.support.runs import PLAIN, Case, start
from tests.support.sampling import nightly
from zerotune.checkpoint import load_checkpoint, save_checkpoint

# Make several sub-groups, and partition every parameter although the model is tiny.
PARTITIONED = (("sub_group_size", 100), ("stage3_param_persistence_threshold", 0))
# Biases and scalars stay whole on every rank, as they do in a real model.
PERSISTENT = (("sub_group_size", 100), ("stage3_param_persistence_threshold", 20))

CASES = [
    (attrs.evolve(PLAIN, precision="bf16", accumulation=2), 2),
    (Case(stage=2, precision="bf16", accumulation=2), 2),
    (Case(stage=2, offload="cpu", engine="deepspeed"), 1),
    (
        Case(
            stage=3,
            offload="cpu",
            offload_param="cpu",
            precision="bf16",
            overrides=PERSISTENT,
            engine="deepspeed",
        ),
        1,
    ),
    *nightly(
        (PLAIN, 1),
        (Case(stage=0, precision="bf16"), 2),
        (Case(stage=1), 2),
        (Case(stage=2, offload="cpu", optimizer="AdamWBF16States", precision="bf16"), 2),
        (Case(stage=3, overrides=PARTITIONED), 2),
    ),
]


def check(case: Case, world_size: int, folder: Path, *, astray: int = 0) -> list[dict[str, Any]]:
    expected = run_ranks(uninterrupted, case, str(folder), world_size=world_size)
    actual = run_ranks(resumed, case, str(folder), astray, world_size=world_size)
    for rank in range(world_size):
        compare(expected[rank], actual[rank])
    # If nothing was partitioned at stage 3, the test would prove nothing.
    if PARTITIONED[1] in case.overrides:
        assert all(not result["whole"] for result in expected)
    elif PERSISTENT[1] in case.overrides:
        assert all(0 < len(result["whole"]) < 9 for result in expected)
    return expected


def compare(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert actual["losses"] == expected["losses"]
    assert len(set(actual["losses"])) == len(actual["losses"])
    assert actual["extra"] == {"position": [BEFORE, 0.1]}
    assert not actual["decisions"]
    differing = [
        name
        for name in {**expected, **actual}
        if name not in ("path", "whole", "swapped", "extra", "decisions")
        and expected.get(name) != actual.get(name)
    ]
    assert not differing


@pytest.mark.deepspeed
@pytest.mark.parametrize(("case", "world_size"), CASES, ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one(case, world_size, tmp_path):
    # One process resumes in a new engine, two in one that has already stepped.
    check(case, world_size, tmp_path / "step-00000003", astray=world_size - 1)


def on_nvme(swap, **changes):
    swap.mkdir()
    pieces = (("sub_group_size", 300_000), ("stage3_param_persistence_threshold", 0))
    return Case(stage=3, offload="nvme", nvme_path=str(swap), overrides=pieces, **changes)


@pytest.mark.deepspeed
@pytest.mark.nvme
def test_a_resumed_run_with_nvme_equals_an_uninterrupted_one(tmp_path):
    case = on_nvme(tmp_path / "swap", offload_param="nvme")
    results = check(case, 2, tmp_path / "step-00000003", astray=1)
    assert all(result["swapped"] >= 2 for result in results)


def brought_in(case, folder):
    """Count how often saves before and after the first step read each sub-group from NVMe."""
    with start(case, WideBufferedNet()) as engine:
        wrapper = engine.deepspeed_engine.optimizer
        swapped = [
            index
            for index in range(len(wrapper.fp32_partitioned_groups_flat))
            if wrapper._swappable_optimizer_subgroup(index)
        ]
        counts = Counter()
        bring = wrapper._optimizer_states_and_gradient_swap_in

        def counted(index, *arguments, **others):
            counts[index] += 1
            return bring(index, *arguments, **others)

        found = []
        for number in range(2):
            wrapper._optimizer_states_and_gradient_swap_in = counted
            save_checkpoint(folder / str(number), engine=engine)
            found.append([counts[index] for index in swapped])
            counts.clear()
            wrapper._optimizer_states_and_gradient_swap_in = bring
            x = torch.randn(4, 7, 7).to(engine.dtype)
            engine.backward(engine(x).float().square().mean())
            engine.step()
        return found


@pytest.mark.deepspeed
@pytest.mark.nvme
def test_a_save_reads_each_sub_group_from_nvme_once(tmp_path):
    case = on_nvme(tmp_path / "swap")
    for found in run_ranks(brought_in, case, tmp_path, world_size=2):
        assert len(found[0]) >= 2
        assert {count for counts in found for count in counts} == {1}


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "case",
    [
        # NAdam's momentum product starts at one, while all other states start at zero.
        Case(stage=2, optimizer="NAdam"),
        *nightly(attrs.evolve(PLAIN, optimizer="NAdam"), Case(stage=3, offload="cpu")),
    ],
    ids=str,
)
@ranks(1)
def test_a_run_can_restart_from_a_checkpoint_made_before_its_first_step(case, tmp_path):
    folder = tmp_path / "start"
    engine = hostile(case, seed=0)
    ema = shadow_of(engine)
    reseed(0)
    save_checkpoint(folder, engine=engine, shadows={"ema": ema})
    losses = []
    for _ in range(2):
        load_checkpoint(folder, engine=engine, shadows={"ema": ema})
        losses.append(train(engine, ema, AFTER))
    engine.close()
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == len(losses[0])
