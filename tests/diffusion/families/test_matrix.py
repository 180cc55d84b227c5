"""Every family at every stage: offload none and cpu, one and two processes, checkpointing off and
on, all parameters and adapters alone.

Many minutes long, so it runs where ``ZEROTUNE_FAMILY_MATRIX`` is set; ``test_parity`` has the
cross-section. Deviations are written to the file that variable names, if it is a path.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from tests.diffusion.families.parity import TOLERANCE, VARIANTS, WHOLE, deviations
from tests.support.pipelines import MAKERS
from tests.support.runs import Case

_WANTED = os.environ.get("ZEROTUNE_FAMILY_MATRIX", "")

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not _WANTED, reason="set ZEROTUNE_FAMILY_MATRIX for all families"),
]

PLACES = [
    Case(stage=stage, offload=where, overrides=WHOLE if stage == 3 else ())
    for stage, where in itertools.product((1, 2, 3), ("none", "cpu"))
]
RUNS = [(f, case, ranks) for case, ranks, f in itertools.product(PLACES, (1, 2), MAKERS)]


@pytest.mark.parametrize(
    ("family", "case", "world_size"), RUNS, ids=[f"{f}-{case}-{w}" for f, case, w in RUNS]
)
def test_losses_are_those_of_the_plain_engine(folders, tmp_path, family, case, world_size):
    found = deviations(folders[family], case, VARIANTS, world_size, tmp_path / "exported")
    if os.sep in _WANTED:
        with Path(_WANTED).open("a") as file:
            for variant, value in found.items():
                row = [family, str(case), world_size, str(variant), value]
                file.write(json.dumps(row) + "\n")
    assert max(found.values()) < TOLERANCE
