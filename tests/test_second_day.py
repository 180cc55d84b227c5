"""The second day at its smallest, against the source tree."""

from __future__ import annotations

import pytest

from tests import second_day
from tests.support.needs import needs


@pytest.mark.deepspeed
def test_the_second_day_goes_well(tmp_path):
    for module in ("skimage", "sklearn", "transformers"):
        needs(module)
    outcomes = list(second_day.play(tmp_path))
    assert [f"{one.what}: {one.said}" for one in outcomes if not one.well] == []
    assert len(outcomes) == len(second_day.STEPS)
