"""Every engine: stages 0-3, none/cpu/nvme, one and two processes, fp32 and bf16.

``test_shadow_on_engines`` has a sample for the default suite.
"""

from __future__ import annotations

import itertools

import attrs
import pytest

from tests.ema.engines import follow
from tests.ema.test_shadow_on_engines import PARTITIONED, check
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.nightly,
]

# Offload has no effect at stage 0, and NVMe none below stage 3: the plan refuses both.
PLACES = [
    PLAIN,
    Case(stage=0),
    *(Case(stage=stage, offload=where) for stage in (1, 2) for where in ("none", "cpu")),
    *(Case(stage=3, offload=where, overrides=PARTITIONED) for where in ("none", "cpu")),
]
RUNS = [
    (attrs.evolve(case, precision=precision), world_size)
    for case, precision, world_size in itertools.product(PLACES, ("fp32", "bf16"), (1, 2))
]


@pytest.mark.parametrize(
    ("case", "world_size"), RUNS, ids=[f"{case}-{world_size}" for case, world_size in RUNS]
)
def test_the_ema_equals_a_float64_reference(case, world_size):
    check(run_ranks(follow, case, world_size=world_size))


@pytest.mark.nvme
@pytest.mark.parametrize(
    ("precision", "world_size"), list(itertools.product(("fp32", "bf16"), (1, 2)))
)
def test_the_ema_on_nvme_equals_a_float64_reference(precision, world_size, tmp_path):
    case = Case(
        stage=3,
        offload="nvme",
        offload_param="nvme",
        precision=precision,
        nvme_path=str(tmp_path),
        overrides=(("sub_group_size", 300_000), ("stage3_param_persistence_threshold", 0)),
    )
    results = run_ranks(follow, case, world_size=world_size)
    check(results)
    assert all(seen["swapped"] >= 2 and not seen["whole"] for seen in results)
