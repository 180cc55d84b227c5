"""A resolved plan for any situation, on a machine that need not exist."""

from __future__ import annotations

import pytest

from zerotune.plan.context import RunFacts
from zerotune.plan.facts import ModelFacts
from zerotune.plan.optimizer.choose import BY_CHOICE
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform

SMALL = ModelFacts.from_shapes([("weight", (4, 4)), ("bias", (4,))])
VERSIONS = {"python": "3.11.9", "torch": "2.13.0", "deepspeed": "0.19.8"}


def resolved_plan(
    optimizer=None,
    params=None,
    *,
    scheduler=None,
    scheduler_params=None,
    stage=2,
    offload="cpu",
    precision="fp32",
    run=None,
    accelerator="cpu",
    versions=None,
    deepspeed=True,
    model=SMALL,
    **top_level,
):
    """Resolve a configuration as a user would write it; ``None`` leaves a section out."""
    zero = {"stage": stage, **top_level.pop("zero", {})}
    if offload != "none":
        zero["offload_optimizer"] = {"device": offload}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        **top_level,
    }
    config.setdefault("bf16", {}).setdefault("enabled", precision == "bf16")
    config.setdefault("fp16", {}).setdefault("enabled", precision == "fp16")
    for key, kind, arguments in (
        ("optimizer", optimizer, params),
        ("scheduler", scheduler, scheduler_params),
    ):
        section = {"type": kind, "params": arguments}
        section = {name: value for name, value in section.items() if value is not None}
        if section:
            config[key] = section
    return DeepSpeedPlan.from_dict(config).resolve(
        platform=Platform.synthetic(accelerator, versions=versions or VERSIONS),
        model=model,
        run=run or RunFacts(),
        deepspeed=deepspeed,
    )


@pytest.fixture
def make_plan():
    return resolved_plan


@pytest.fixture
def decisions_for():
    """Return a function that finds the decisions of the choice about one key."""

    def find(resolved, key):
        return [one for one in resolved.decisions if (one.rule, one.key) == (BY_CHOICE, key)]

    return find
