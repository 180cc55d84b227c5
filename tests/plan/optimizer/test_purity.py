from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from zerotune.optim import OptimizerResolver
from zerotune.plan.optimizer.choices import SchedulerChoice
from zerotune.plan.optimizer.names import normalise_optimizer_name
from zerotune.plan.optimizer.curves import lr_at
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.platform import Platform

plan = DeepSpeedPlan.build(stage=2, offload="cpu", optimizer="Adam").resolve(
    platform=Platform.synthetic("cpu"),
    model=ModelFacts.from_shapes([("weight", (4, 4))]),
)
resolution = OptimizerResolver().resolve(plan)
assert resolution.explain()
lr_at(resolution.scheduler, 3, resolution.optimizer.lr)
heavy = {"torch", "deepspeed", "accelerate", "diffusers", "numpy"} & set(sys.modules)
print(sorted(heavy))
"""


def test_settling_an_optimizer_imports_no_heavy_package():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
