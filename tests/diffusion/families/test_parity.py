"""A cross-section of the families' runs; ``test_matrix`` has them all.

Each family, stage and number of ranks occurs, with and without offload and checkpointing, all
parameters trained and adapters alone.
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

RUNS = [
    ("sdxl", Case(stage=2, offload="cpu"), 2, [FULL, LORA_CHECKPOINTED]),
    ("sdxl", Case(stage=3, offload="cpu", overrides=WHOLE), 1, [CHECKPOINTED]),
    ("sd15", Case(stage=1), 1, [FULL]),
    ("sd3", Case(stage=3, overrides=WHOLE), 2, [CHECKPOINTED]),
    ("flux", Case(stage=1, offload="cpu"), 2, [FULL]),
    ("flux", Case(stage=3, offload="cpu", overrides=WHOLE), 1, [LORA, CHECKPOINTED]),
]


@pytest.mark.parametrize(
    ("family", "case", "world_size", "variants"),
    RUNS,
    ids=[f"{family}-{case}-{world_size}" for family, case, world_size, _ in RUNS],
)
def test_losses_are_those_of_the_plain_engine(
    folders, tmp_path, family, case, world_size, variants
):
    found = deviations(folders[family], case, variants, world_size, tmp_path / "exported")
    assert max(found.values()) < TOLERANCE
