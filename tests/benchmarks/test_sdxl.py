"""The benchmarks made for a GPU, from end to end with tiny models on whatever there is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.families import SDXL
from benchmarks.flux import DOUBLE, SINGLE, depth, host_need
from benchmarks.framework import CaseRefused, Context, TimeIsUp, WorkerError
from benchmarks.large import BUDGET_S, PLANS, REFERENCE, compare, host_bytes, last_line
from benchmarks.sdxl import BENCHMARK, TINY
from zerotune.platform import GIB, Platform


@pytest.mark.deepspeed
def test_sdxl_runs_from_end_to_end(tmp_path: Path) -> None:
    assert main(["sdxl", "--quick", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "sdxl.json").read_text())
    compared, card = result["cases"]
    assert list(compared["contestants"]) == [REFERENCE, "zerotune ZeRO-3"]
    for name, found in compared["contestants"].items():
        assert {"seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"} <= set(found)
        assert all(value > 0 for value in found["seconds"]["samples"])
        assert compared["facts"][name]["parameters"] == compared["facts"][REFERENCE]["parameters"]
    assert compared["facts"]["zerotune ZeRO-3"]["plan"]["zero_optimization"]["stage"] == 3
    assert compared["facts"]["zerotune ZeRO-3"]["estimate"]["host"] > 0
    assert "stage 2" in " ".join(compared["notes"])
    assert card["facts"]["advised"] == "no partitioning"
    assert (tmp_path / "sdxl.md").read_text().startswith("# sdxl")


def test_all_cases_of_a_full_run_are_there_and_the_goals_look_at_them() -> None:
    cases = {case.name: case for case in BENCHMARK.cases(False)}
    sizes = {"1024², batch 1", "1024², batch 2", "1024², batch 4", "1024², batch 8",
             "768², batch 8", "128², batch 8"}  # fmt: skip
    assert sizes | {f"card of {cap} GiB" for cap in (24, 16, 12, 10, 8, 6, 4)} == set(cases)
    assert {goal.case for goal in BENCHMARK.goals} <= set(cases)
    assert next(iter(cases)) == "1024², batch 8", "the headline is measured first"
    for case in cases.values():
        json.dumps(case.settings)


def test_the_tiny_model_is_of_the_same_kind() -> None:
    assert {key for key in SDXL if SDXL[key] == TINY[key]} >= {
        "_class_name",
        "down_block_types",
        "up_block_types",
        "addition_embed_type",
    }


def machine(ram: int, torch: str) -> Platform:
    return Platform.synthetic("cuda", vram=80 * GIB, ram=ram * GIB, versions={"torch": torch})


@pytest.mark.parametrize("torch", ["2.11.0", "2.13.0"])
def test_flux_is_as_deep_as_the_memory_allows(torch: str) -> None:
    """Seven double blocks would need 131 GiB: the reference's page-locked memory is rounded up."""
    assert depth(machine(1024, torch)) == (DOUBLE, SINGLE)
    here = machine(128, torch)
    assert depth(here) == (6, 12)
    assert host_need(7, here) > 128 * GIB > 1.1 * host_need(6, here)


class Fails:
    def __init__(self, error: str) -> None:
        self.error = error

    def __call__(self, *_: Any) -> Any:
        raise WorkerError(self.error)


def test_a_case_without_memory_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"plans": PLANS, "turn": 1, "steps": 1}
    context = Context(scratch=tmp_path, log=lambda _line: None)
    monkeypatch.setattr("benchmarks.large._run", Fails("x\ntorch.OutOfMemoryError: no more"))
    with pytest.raises(CaseRefused, match=r"zerotune ZeRO-2: torch\.OutOfMemoryError: no more"):
        compare(settings, context)
    monkeypatch.setattr("benchmarks.large._run", Fails("ValueError: wrong"))
    with pytest.raises(WorkerError, match="wrong"):
        compare(settings, context)
    assert last_line(WorkerError("one\ntwo\n")) == "two"


def test_a_run_ends_before_ten_minutes_and_goes_on_later(tmp_path: Path) -> None:
    long_ago = time.monotonic() - BUDGET_S - 1
    context = Context(scratch=tmp_path, log=lambda _line: None, began=long_ago)
    with pytest.raises(TimeIsUp, match="run it again"):
        compare({"plans": PLANS, "turn": 0, "steps": 1}, context)


def test_page_locked_memory_is_counted_where_the_system_leaves_it_out() -> None:
    about = {"pinned_bytes": 5.0, "pinned_apart": True}
    assert host_bytes(10, about) == 15.0
    assert about == {"pinned_bytes": 5.0}, "a flag is no figure"
    assert host_bytes(10, {"pinned_bytes": 5.0, "pinned_apart": False}) == 10.0
    assert host_bytes(10, {}) == 10.0
