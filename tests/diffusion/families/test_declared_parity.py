"""Train declared families in one process, alternating between all weights and adapters.

Two thirds of them are nightly; ``test_matrix`` has every stage and number of ranks.
"""

from __future__ import annotations

import pytest

from tests.diffusion.families.parity import check_run, worst
from tests.diffusion.families.training import Variant, train_under
from tests.support.declared_pipelines import EXPERTS, MAKERS
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case

STEPS = 3
# A wrong learning rate or a lost gradient is off by 1e-3.
TOLERANCE = 1e-6
# diffusers cannot load adapters into PixArt's transformer, so all its weights are trained.
VARIANTS = {
    name: Variant(lora=bool(number % 2) and not name.startswith("pixart"))
    for number, name in enumerate([*MAKERS, *EXPERTS])
}


@pytest.mark.deepspeed
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2))])
def test_losses_equal_those_of_the_plain_engine(part, folders, tmp_path):
    names = [*VARIANTS][part::3]
    jobs = [(str(folders[name]), VARIANTS[name]) for name in names]
    cases = (PLAIN, Case(stage=2, offload="cpu"))
    (found,) = run_ranks(train_under, jobs, cases, STEPS, str(tmp_path / "exported"))
    for name, (alone, run) in zip(names, found, strict=True):
        check_run(run, stage=2)
        assert worst(run["losses"], alone["losses"]) < TOLERANCE, name
        assert len(set(alone["losses"])) == STEPS
