"""The profile recipe writes a trace of the model's operators."""

from __future__ import annotations

import json

import pytest

from tests.examples.recipes.starting import started
from tests.support.ranks import run_ranks


@pytest.mark.deepspeed
def test_the_trace_contains_the_models_operators(tmp_path):
    (losses,), _ = run_ranks(started, "profile_steps", [["--output", str(tmp_path)]])[0]
    assert len(losses) == 4
    trace = json.loads((tmp_path / "trace-rank0.json").read_text())
    assert any("convolution" in event.get("name", "") for event in trace["traceEvents"])
