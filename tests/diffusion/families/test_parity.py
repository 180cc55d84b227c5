"""A sample of the families' runs; ``test_matrix`` has all of them.

Each family, stage and number of ranks occurs, with and without offload and checkpointing, training
all parameters or adapters only; the default suite has one of each kind of model.
"""

from __future__ import annotations

import pytest

from tests.diffusion.families.parity import TOLERANCE, WHOLE, deviations
from tests.diffusion.families.training import Variant
from tests.support.runs import Case

pytestmark = pytest.mark.deepspeed

FULL, LORA = Variant(), Variant(lora=True)
CHECKPOINTED, LORA_CHECKPOINTED = (
    Variant(checkpointing=True),
    Variant(lora=True, checkpointing=True),
)

GATHERED = Case(stage=3, offload="cpu", engine="deepspeed", overrides=WHOLE)
RUNS = [
    ("sdxl", Case(stage=2, offload="cpu"), 2, [FULL, LORA_CHECKPOINTED]),
    ("sdxl", GATHERED, 1, [CHECKPOINTED]),
    ("sd15", Case(stage=1), 1, [FULL]),
    ("sd3", Case(stage=3, overrides=WHOLE), 2, [CHECKPOINTED]),
    ("flux", Case(stage=1, offload="cpu"), 2, [FULL]),
    ("flux", GATHERED, 1, [LORA, CHECKPOINTED]),
]
STEPS = 12
IN_THE_SUITE = ("sd15-z1-none-none-fp32-1", "sd3-z3-none-none-fp32-2", "flux-z3-cpu-none-fp32-1")


@pytest.mark.parametrize(
    ("family", "case", "world_size", "variants"),
    [
        pytest.param(*run, id=name, marks=() if name in IN_THE_SUITE else pytest.mark.nightly)
        for run in RUNS
        for name in [f"{run[0]}-{run[1]}-{run[2]}"]
    ],
)
def test_losses_equal_those_of_the_plain_engine(
    folders, tmp_path, family, case, world_size, variants
):
    found = deviations(folders[family], case, variants, world_size, tmp_path / "exported", STEPS)
    assert max(found.values()) < TOLERANCE
