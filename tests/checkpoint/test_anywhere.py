"""A checkpoint of one plan resumes under another as if uninterrupted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoint import anywhere
from tests.checkpoint.anywhere import LEAN, ROUNDED, apart, folder_of
from tests.support.ranks import run_ranks

FP32, BF16 = 5e-5, 3e-3
"""Largest relative loss difference: the spread of uninterrupted runs at different stages."""

# (saved under, processes) -> (resumed under, processes); a checkpoint is used more than once.
# ``test_matrix`` has all pairs of all plans.
PAIRS = [
    (("plain", 1), ("z3-cpu", 2), "fp32"),
    (("plain", 1), ("z3-nvme", 1), "fp32"),
    (("z1", 2), ("z2-cpu", 1), "bf16"),
    (("host", 2), ("z2-cpu", 1), "fp32"),
    (("streamed-8bit", 2), ("z3-cpu", 2), "fp32"),
]
BYTES = {"streamed-8bit": 1}
"""Bytes per stored element of a moment; 4 by default."""
Run = tuple[str, int, str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Any:
    """Return a function that returns an uninterrupted run with a checkpoint, made on first use."""
    root = tmp_path_factory.mktemp("anywhere")
    made: dict[Run, dict[str, Any]] = {}

    def run(name: str, world_size: int, precision: str) -> tuple[str, dict[str, Any]]:
        folder = folder_of(root, name, precision, world_size)
        key = (name, world_size, precision)
        if key not in made:
            arguments = (name, precision, str(folder), str(root))
            made[key] = run_ranks(anywhere.saved, *arguments, world_size=world_size)[0]
        return str(folder), made[key]

    return run


@pytest.mark.deepspeed
@pytest.mark.nvme
@pytest.mark.parametrize(
    ("source", "target", "precision"),
    PAIRS,
    ids=[f"{a}x{n}-{b}x{m}-{precision}" for (a, n), (b, m), precision in PAIRS],
)
def test_a_run_resumes_under_another_plan(source, target, precision, runs, tmp_path):
    folder, expected = runs(*source, precision)
    name, world_size = target
    ranks = run_ranks(
        anywhere.resumed, name, precision, [folder], str(tmp_path), world_size=world_size
    )
    bound = FP32 if precision == "fp32" else BF16
    check(
        name, expected, ranks[0][0], ROUNDED if source[0] in LEAN and name != source[0] else bound
    )
    assert ranks[0][0]["losses"] == ranks[-1][0]["losses"]
    for (found,) in ranks:
        # Each rank reads exactly the elements it owns, once.
        for kind in ("weights", "shadow.ema"):
            assert found["read"].pop(kind) == 4 * found["owned"]
        each = BYTES.get(source[0], 4)
        for kind in ("optimizer.exp_avg", "optimizer.exp_avg_sq"):
            extra = found["read"].pop(kind) - each * found["owned"]
            # Codes are read from the beginning of their block.
            assert extra == 0 or (each == 1 and 0 < extra < 256 * 40)
            found["read"].pop(f"{kind}_scale", None)
        assert set(found["read"]) == {"rank"}
    if "z3" in name and world_size == 2:
        assert ranks[0][0]["owned"] < 0.51 * sum(found["owned"] for (found,) in ranks) + 100


def check(name: str, expected: dict[str, Any], actual: dict[str, Any], bound: float) -> None:
    # Weights, moments, counters and EMA equal the saved ones bit for bit, however partitioned.
    names = {each for each in expected["state"] if not each.startswith("step ")}
    assert len(names) > 4 * 10
    assert not {n for n in names if actual["state"][n] != expected["state"][n]}
    steps = {value for each, value in actual["state"].items() if each.startswith("step ")}
    assert steps == {str(anywhere.BEFORE)}
    assert actual["step"] == anywhere.BEFORE
    changed = ("stage: ", "engine: ", "world_size: ")
    assert any(decision.startswith(changed) for decision in actual["decisions"])
    # If nothing was partitioned or swapped, the test would prove nothing.
    assert bool(actual["whole"]) == ("z3" not in name)
    assert bool(actual["swapped"]) == ("nvme" in name)
    assert apart(expected["losses"], actual["losses"]) <= bound
