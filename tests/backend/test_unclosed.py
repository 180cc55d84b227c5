"""A script that never closes its engine ends without an error message."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch, zerotune
from zerotune import DeepSpeedPlan, ModelFacts, OptimizerResolver
from zerotune.training.setup import build_engine

model = torch.nn.Linear(8, 8)
plan = DeepSpeedPlan.build(stage=2, offload="cpu", optimizer="AdamW")
plan = plan.resolve(model=ModelFacts.from_module(model), engine="deepspeed")
engine = build_engine(model=model, plan=OptimizerResolver().resolve(plan))
loss = engine.deepspeed_engine(torch.ones(2, 8, dtype=torch.bfloat16)).pow(2).mean()
engine.backward(loss)
engine.step()
print("trained")
"""


# Nightly: deepspeed/test_order.py ends the only thread that would outlive such a script.
@pytest.mark.nightly
@pytest.mark.deepspeed
def test_a_script_with_an_unclosed_engine_exits_without_an_ignored_exception(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert "Exception ignored" not in done.stderr
