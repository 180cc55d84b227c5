"""Every family at every stage: offload none and cpu, checkpointing off and on, all parameters or
adapters only.

The number of processes alternates, so that each family and each place runs with one and with two.
The default suite has one of each kind of model. Deviations are written to the file that
``ZEROTUNE_FAMILY_NOTES`` names.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from tests.diffusion.families.parity import TOLERANCE, VARIANTS, WHOLE, check_run, deviations, worst
from tests.diffusion.families.training import Variant, train
from tests.support.declared_pipelines import EXPERTS
from tests.support.declared_pipelines import MAKERS as DECLARED
from tests.support.pipelines import MAKERS
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case

_STEPS = 5
_CLOSE = 1e-6
_NOTES = os.environ.get("ZEROTUNE_FAMILY_NOTES")

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(1800)]

PLACES = [
    *(Case(stage=stage, offload=where) for stage in (1, 2) for where in ("none", "cpu")),
    Case(stage=3, overrides=WHOLE),
    Case(stage=3, offload="cpu", engine="deepspeed", overrides=WHOLE),
]
RUNS = [
    (family, case, 1 + (row + column) % 2)
    for (row, case), (column, family) in itertools.product(enumerate(PLACES), enumerate(MAKERS))
]
SAMPLE = [
    ("qwen-image", Case(stage=1), 1, [Variant()]),
    ("sd3", Case(stage=3, overrides=WHOLE), 2, [Variant(checkpointing=True)]),
    ("flux", PLACES[-1], 1, [Variant(lora=True)]),
]


@pytest.mark.parametrize(
    ("family", "case", "world_size", "variants"), SAMPLE, ids=[run[0] for run in SAMPLE]
)
def test_a_sample_equals_the_plain_engine(folders, tmp_path, family, case, world_size, variants):
    found = deviations(folders[family], case, variants, world_size, tmp_path / "exported", _STEPS)
    assert max(found.values()) < TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "case", "world_size"), RUNS, ids=[f"{f}-{case}-{w}" for f, case, w in RUNS]
)
def test_losses_equal_those_of_the_plain_engine(folders, tmp_path, family, case, world_size):
    found = deviations(folders[family], case, VARIANTS, world_size, tmp_path / "exported")
    note(family, case, world_size, found)
    assert max(found.values()) < TOLERANCE


def note(family, case, world_size, found):
    if _NOTES:
        with Path(_NOTES).open("a") as file:
            for variant, value in found.items():
                row = [family, str(case), world_size, str(variant), value]
                file.write(json.dumps(row) + "\n")


@pytest.mark.nightly
@pytest.mark.parametrize("family", [*DECLARED, *EXPERTS])
def test_losses_of_declared_families_equal_those_of_the_plain_engine(folders, tmp_path, family):
    folder = str(folders[family])
    variants = VARIANTS
    if family.startswith("pixart"):
        # diffusers cannot load adapters into PixArt's transformer.
        variants = [variant for variant in VARIANTS if not variant.lora]
    plain = [Variant(lora=lora) for lora in {variant.lora for variant in variants}]
    losses = run_ranks(train, folder, PLAIN, plain, _STEPS)[0]
    expected = {v.lora: run["losses"] for v, run in zip(plain, losses, strict=True)}
    places = [case for case in PLACES if case.stage > 1]
    first = [*DECLARED, *EXPERTS].index(family)
    for number, case in enumerate(places, first):
        world_size = 1 + number % 2
        target = tmp_path / f"{case}-{world_size}"
        runs = run_ranks(train, folder, case, variants, _STEPS, str(target), world_size=world_size)
        found = {}
        for variant, run in zip(variants, runs[0], strict=True):
            check_run(run, stage=case.stage)
            found[variant] = worst(run["losses"], expected[variant.lora])
        note(family, case, world_size, found)
        assert max(found.values()) < _CLOSE, (str(case), world_size)
