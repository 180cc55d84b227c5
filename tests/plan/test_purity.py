"""The plan layer consists of values: it imports neither torch nor deepspeed."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys
before = set(sys.modules)
from zerotune.plan import DeepSpeedPlan
DeepSpeedPlan.from_json('{"zero_optimization": {"stage": 2}}').explain()
print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))
"""
HEAVY = {"torch", "deepspeed", "accelerate", "diffusers", "numpy", "safetensors", "yaml"}


def test_reading_a_plan_loads_no_heavy_package():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(json.loads(done.stdout))
