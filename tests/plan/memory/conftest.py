"""An estimate with round numbers: a ZeRO-2 run of a small model with its optimizer on the host."""

from __future__ import annotations

import pytest

from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.plan.memory.items import ALWAYS, MemoryItem, Workload
from zerotune.plan.plan import MemoryEstimate
from zerotune.platform import Platform
from zerotune.platform.facts import GIB


def item(component, place, gib, phases=ALWAYS, **more):
    return MemoryItem(
        component=component, place=place, nbytes=int(gib * GIB), phases=phases, **more
    )


ITEMS = (
    item("weights", "device", 4, note="bf16"),
    item("activations", "device", 2, {"forward and backward"}, note="blocks recomputed"),
    item("buckets", "device", 0.5, {"forward and backward", "optimizer step"}),
    item("flat copy", "device", 3.5, {"initialization"}, note="cloned while ZeRO sets up"),
    item("master weights", "host", 8, pinned=True),
    item("optimizer states", "host", 16, note="exp_avg and exp_avg_sq"),
)


def estimate_of(*items, **changes):
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16")
    model = ModelFacts.from_shapes([("weight", (2000, 1000))], name="UNet")
    resolved = plan.resolve(platform=Platform.synthetic("cuda"), model=model)
    workload = Workload(**{"batch": 2, "height": 512, "width": 768, "ema": "none", **changes})
    return MemoryEstimate(resolved=resolved, workload=workload, items=items)


@pytest.fixture
def make_estimate():
    return estimate_of


@pytest.fixture
def make_item():
    return item


@pytest.fixture
def estimate():
    return estimate_of(*ITEMS)
