"""A resumed run equals an uninterrupted one, bit for bit, on real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.checkpoint.runs import BEFORE, resumed, uninterrupted
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case

SUB_GROUPS = (("sub_group_size", 100),)

CASES = [
    (PLAIN, 1),
    (attrs.evolve(PLAIN, precision="bf16", accumulation=2), 2),
    (Case(stage=0, precision="bf16"), 1),
    (Case(stage=0), 2),
    (Case(stage=1), 2),
    (Case(stage=1, precision="bf16"), 1),
    (Case(stage=2, precision="bf16", accumulation=2), 2),
    (Case(stage=2, offload="cpu"), 2),
    (Case(stage=2, offload="cpu", precision="bf16"), 1),
    (Case(stage=3, overrides=SUB_GROUPS), 2),
    (Case(stage=3, offload="cpu", offload_param="cpu", precision="bf16"), 1),
]


def check(case: Case, world_size: int, folder: Path) -> None:
    expected = run_ranks(uninterrupted, case, str(folder), world_size=world_size)
    actual = run_ranks(resumed, case, str(folder), world_size=world_size)
    for rank in range(world_size):
        compare(expected[rank], actual[rank])
    if case.stage == 3:
        # Otherwise nothing was partitioned, and the test would show nothing.
        assert all(result["whole"] == 0 for result in expected)


def compare(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert actual["losses"] == expected["losses"]
    assert len(set(actual["losses"])) == len(actual["losses"])
    assert actual["extra"] == {"position": [BEFORE, 0.1]}
    assert not actual["decisions"]
    differing = [
        name
        for name in {**expected, **actual}
        if name not in ("path", "whole", "extra", "decisions")
        and expected.get(name) != actual.get(name)
    ]
    assert not differing


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("case", "world_size"), CASES, ids=[f"{case}-{world_size}" for case, world_size in CASES]
)
def test_a_resumed_run_equals_an_uninterrupted_one(case, world_size, tmp_path):
    check(case, world_size, tmp_path / "step-00000003")


@pytest.mark.deepspeed
@pytest.mark.nvme
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_with_nvme_equals_an_uninterrupted_one(world_size, tmp_path):
    swap = tmp_path / "swap"
    swap.mkdir()
    case = Case(
        stage=3, offload="nvme", offload_param="cpu", nvme_path=str(swap), overrides=SUB_GROUPS
    )
    check(case, world_size, tmp_path / "step-00000003")
