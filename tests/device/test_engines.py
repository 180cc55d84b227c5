"""Every engine gives the same bits in whatever order the device works.

``python -m tests.device.matrix`` runs all cases in many orders; here are some, in one order each.
"""

from __future__ import annotations

import attrs
import pytest

from tests.device import on_device
from tests.device.cases import CASES, ZERO_2, differences, run
from tests.support.sampling import nightly
from zerotune.plan.context import Streaming

pytestmark = pytest.mark.deepspeed

BY_NAME = {case.name: case for case in CASES}
SAMPLE = (
    "streamed, activation offload, no clipping",
    "streamed, skipped blocks, no clipping",
    "streamed, resumed, 8-bit",
    "host engine, out of memory",
    "ZeRO-3, CPU offload of both, out of memory",
    "plain, offload, EMA in a file, swapped in",
)


@pytest.mark.parametrize("name", SAMPLE)
@on_device()
def test_the_order_of_the_devices_work_changes_no_bit(name, tmp_path):
    reference = run(BY_NAME[name], 0, 1.0, tmp_path)
    assert not differences(reference, run(BY_NAME[name], 1, 0.02, tmp_path))


# The first also writes shared weights, which no device may read then.
@pytest.mark.parametrize(
    "name", ["streamed, 2 ranks, EMA swapped in", *nightly("ZeRO-3, 2 ranks, no offload")]
)
@on_device(ranks=2)
def test_the_order_of_the_devices_work_changes_no_bit_of_two_ranks(name, tmp_path):
    reference = run(BY_NAME[name], 0, 1.0, tmp_path)
    assert not differences(reference, run(BY_NAME[name], 1, 0.02, tmp_path))


@pytest.mark.parametrize(
    "changes", [{}, *nightly({"clipping": 0.0, "checkpointing": "on"})], ids=str
)
@on_device()
def test_every_place_of_the_step_gives_the_same_bits(changes, tmp_path):
    case = attrs.evolve(ZERO_2, steps=3, **changes)
    reference = run(case, 0, 0.1, tmp_path)
    for other in (
        {"engine": "host"},
        {"streamed": Streaming(memory=32 * 1024)},
        {"streamed": Streaming(units=("blocks.0", "blocks.3"), window=2)},
        {"engine": "host", "stage": 3, "offload_param": "cpu"},
    ):
        assert not differences(reference, run(attrs.evolve(case, **other), 1, 0.1, tmp_path))


@on_device(ranks=2)
def test_stage_3_of_two_ranks_gives_the_bits_of_zero_2(tmp_path):
    case = attrs.evolve(ZERO_2, steps=3, ranks=2)
    theirs = run(case, 0, 0.1, tmp_path)
    mine = run(attrs.evolve(case, engine="host", stage=3), 1, 0.1, tmp_path)
    # Each engine divides master weights and EMAs among the ranks in its own way.
    common = {"losses", "norms", *(name for name in theirs if name.startswith("weight "))}
    assert common <= mine.keys()
    assert not common & {*differences(theirs, mine)}
