"""The second day with the source tree: its first steps by default, and all steps nightly."""

from __future__ import annotations

import pytest

from tests import second_day
from tests.support.needs import needs


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "steps", [second_day.STEPS[:3], pytest.param(second_day.STEPS, marks=pytest.mark.nightly)],
    ids=["train, stop, go on", "all"],
)  # fmt: skip
def test_every_step_of_the_second_day_succeeds(steps, tmp_path):
    for module in ("skimage", "sklearn", "transformers"):
        needs(module)
    outcomes = list(second_day.play(tmp_path, steps))
    assert [f"{one.what}: {one.said}" for one in outcomes if not one.well] == []
    assert len(outcomes) == len(steps)
