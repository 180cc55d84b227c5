"""Using a shadow between accumulated micro batches changes no bit of training."""

from __future__ import annotations

import pytest

from tests.ema.engines import accumulate
from tests.ema.test_shadow_on_engines import PARTITIONED
from tests.support.ranks import run_ranks
from tests.support.runs import Case
from tests.support.sampling import nightly

pytestmark = pytest.mark.deepspeed


def unchanged(case: Case, world_size: int) -> None:
    quiet = run_ranks(accumulate, case, False, world_size=world_size)
    disturbed = run_ranks(accumulate, case, True, world_size=world_size)
    assert disturbed == quiet
    assert [seen["applied"] for seen in quiet] == [2] * world_size


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        *nightly((Case(stage=2, offload="cpu", precision="bf16", accumulation=2), 2)),
        (Case(stage=3, precision="bf16", accumulation=2, overrides=PARTITIONED), 1),
    ],
    ids=str,
)
def test_using_a_shadow_between_micro_batches_does_not_change_training(case, world_size):
    unchanged(case, world_size)


@pytest.mark.nvme
def test_using_a_shadow_between_micro_batches_on_nvme_does_not_change_training(tmp_path):
    unchanged(
        Case(
            stage=3,
            offload="nvme",
            nvme_path=str(tmp_path),
            accumulation=2,
            overrides=(("sub_group_size", 300_000), ("stage3_param_persistence_threshold", 0)),
        ),
        1,
    )
