"""A diagonal through the declared families' runs; ``test_matrix`` has them all.

Each family, stage 2 and 3 with CPU offload, one and two processes, with and without checkpointing,
all parameters trained and adapters alone. Several families share a start.
"""

from __future__ import annotations

import pytest

from tests.diffusion.families.parity import check_run, worst
from tests.diffusion.families.training import Variant, train_several
from tests.support.declared_pipelines import EXPERTS, MAKERS
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(240)]

STEPS = 3
# A wrong rate or a lost gradient is off by 1e-3.
TOLERANCE = 1e-6
FULL, LORA = Variant(), Variant(lora=True)
SPARED, LORA_SPARED = Variant(checkpointing=True), Variant(lora=True, checkpointing=True)
WHOLE = (("stage3_param_persistence_threshold", 0),)

RUNS = {
    "z2-2": (Case(stage=2, offload="cpu"), 2, {}),
    "z3-2": (Case(stage=3, offload="cpu", overrides=WHOLE), 2, {}),
    "z3-1": (Case(stage=3, offload="cpu", overrides=WHOLE), 1, {}),
}
_TURNS = [("z2-2", [FULL]), ("z3-2", [SPARED]), ("z3-1", [LORA_SPARED]), ("z2-2", [LORA])]
NAMES = [*MAKERS, *EXPERTS]
for number, name in enumerate(NAMES):
    for turn in (number, number + 1):
        run, variants = _TURNS[turn % len(_TURNS)]
        if name.startswith("pixart") and variants[0].lora:
            continue  # diffusers loads no adapters into PixArt's transformer.
        RUNS[run][2].setdefault(name, []).extend(variants)


@pytest.fixture(scope="module")
def reference(folders):
    """Losses of the plain engine, by family and variant."""
    # Checkpointing changes no arithmetic.
    wanted = {
        name: [plain for plain in (FULL, LORA) if any(v.lora == plain.lora for v in _of(name))]
        for name in NAMES
    }
    jobs = [(str(folders[name]), variants) for name, variants in wanted.items()]
    found = run_ranks(train_several, jobs, PLAIN, STEPS)[0]
    return {
        (name, variant.lora): run["losses"]
        for name, runs in zip(wanted, found, strict=True)
        for variant, run in zip(wanted[name], runs, strict=True)
    }


def _of(name):
    return [variant for _, _, families in RUNS.values() for variant in families.get(name, [])]


@pytest.mark.parametrize("run", ["z2-2", pytest.param("z3-2", marks=pytest.mark.nightly), "z3-1"])
def test_losses_are_those_of_the_plain_engine(folders, tmp_path, reference, run):
    case, world_size, families = RUNS[run]
    jobs = [(str(folders[name]), variants) for name, variants in families.items()]
    found = run_ranks(
        train_several, jobs, case, STEPS, str(tmp_path / "exported"), world_size=world_size
    )[0]
    for (name, variants), runs in zip(families.items(), found, strict=True):
        for variant, one in zip(variants, runs, strict=True):
            expected = reference[name, variant.lora]
            check_run(one, stage=case.stage)
            assert worst(one["losses"], expected) < TOLERANCE, (name, str(variant))
            assert len(set(expected)) == STEPS
