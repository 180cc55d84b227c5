"""A dropped accumulation window leaves no trace."""

from __future__ import annotations

import pytest

from tests.backend.discarded import CASES, STAGE_3, differences
from tests.support.ranks import run_ranks
from tests.support.runs import Case

NVME = Case(
    stage=3, accumulation=2, offload="nvme", offload_param="nvme", micro_batch=4, overrides=STAGE_3
)


def check(ranks, cases):
    for found in ranks:
        assert [name for name, _, _ in found] == [str(case) for case in cases]
        for case, (name, unlike, counters) in zip(cases, found, strict=True):
            assert unlike == [], f"{name}: the next steps differ"
            assert counters == {"steps": 5, "skipped": 1, "micro": 5 * case.accumulation}, name


@pytest.mark.deepspeed
@pytest.mark.world_size(2)
def test_the_next_step_is_as_if_the_window_had_not_been():
    check(run_ranks(differences, CASES, world_size=2), CASES)


@pytest.mark.deepspeed
@pytest.mark.nvme
def test_gradients_on_nvme_are_forgotten_too(tmp_path):
    import attrs

    cases = (attrs.evolve(NVME, nvme_path=str(tmp_path)),)
    check(run_ranks(differences, cases), cases)
