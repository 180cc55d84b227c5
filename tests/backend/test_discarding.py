"""A dropped accumulation window leaves no trace."""

from __future__ import annotations

import math

import pytest

from tests.backend.discarded import CASES, STAGE_3, differences, left_open, poisoned
from tests.support.ranks import ranks, run_ranks
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
def test_a_discarded_window_does_not_change_the_next_step():
    check(run_ranks(differences, CASES, world_size=2), CASES)


UNCHECKED = tuple(
    Case(deepspeed=deepspeed, stage=stage, clipping=clipping, precision=precision, offload=offload)
    for deepspeed, stage, clipping, precision, offload in (
        (False, 0, 0.0, "fp32", "cpu"),
        (True, 0, 1.0, "fp32", "none"),
        (True, 0, 0.0, "bf16", "none"),
        (True, 1, 0.0, "bf16", "cpu"),
        (True, 2, 0.0, "bf16", "none"),
        (True, 3, 0.0, "fp32", "cpu"),
    )
)


@pytest.mark.deepspeed
@ranks(2)
def test_a_non_finite_gradient_skips_the_step_on_every_rank():
    for case, found in zip(UNCHECKED, [poisoned(case) for case in UNCHECKED], strict=True):
        assert found["unlike"] == [], case
        assert found["applied"] == (False, True), case
        assert found["finite"], case
        assert found["skipped"] == (3, 1), case
        assert found["norm"] > 0, case


UNNORMED = tuple(
    Case(stage=stage, clipping=0.0, overrides=(("compute_grad_norm", False),)) for stage in (1, 2)
)
OPEN = (
    Case(deepspeed=False),
    Case(stage=0, precision="bf16"),
    Case(stage=2, offload="cpu"),
    Case(stage=3, overrides=STAGE_3),
)


@pytest.mark.deepspeed
@ranks(2)
def test_non_finite_gradients_are_detected_without_a_norm_and_dropped_on_loading_a_state():
    for case, found in zip(UNNORMED, [poisoned(case) for case in UNNORMED], strict=True):
        assert found["unlike"] == [], case
        assert found["applied"] == (False, True), case
        assert found["finite"], case
        assert math.isnan(found["bad norm"]), case
        assert found["norm"] is None, case
    assert [left_open(case) for case in OPEN] == [[]] * len(OPEN)


@pytest.mark.deepspeed
@pytest.mark.nvme
def test_gradients_on_nvme_are_discarded_too(tmp_path):
    import attrs

    cases = (attrs.evolve(NVME, nvme_path=str(tmp_path)),)
    check(run_ranks(differences, cases), cases)
