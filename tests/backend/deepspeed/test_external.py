"""DeepSpeed's engines that accelerate builds for a script."""

from __future__ import annotations

from datetime import timedelta

import pytest
from accelerate.utils import InitProcessGroupKwargs

from tests.support.ranks import ranks
from zerotune import EmbeddedPlan

pytestmark = pytest.mark.deepspeed


@ranks(1)
def test_the_scripts_timeout_and_the_plans_backend_share_one_handler() -> None:
    theirs = InitProcessGroupKwargs(timeout=timedelta(seconds=7200))
    plan = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    with EmbeddedPlan(plan=plan) as run:
        accelerator = run.accelerator(kwargs_handlers=[theirs])
    assert accelerator.init_handler.timeout == timedelta(seconds=7200)
    assert accelerator.init_handler.backend == "gloo"
