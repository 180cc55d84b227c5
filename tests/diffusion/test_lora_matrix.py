"""Adapters on every engine: stages 0-3, none/cpu/nvme, fp32 and bf16.

The number of processes alternates, so that each model and each place runs with one and with two.
``test_lora_on_engines`` has a sample for the default suite.
"""

from __future__ import annotations

import itertools

import attrs
import pytest

from tests.diffusion.adapting import WHOLE, Adapted, case_for, follow
from tests.diffusion.test_lora_on_engines import (
    DORA,
    HALF,
    STEPS,
    TEXT,
    WIDE,
    check_files,
    check_losses,
    check_partitioned,
    on_nvme,
    plain_losses,
)
from tests.support.needs import needs
from tests.support.ranks import run_ranks
from tests.support.runs import Case
from zerotune.diffusion import LoRA

peft = needs("peft")

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.nightly,
]

PLACES = [
    Case(stage=0),
    *(Case(stage=stage, offload=where) for stage in (1, 2) for where in ("none", "cpu")),
    Case(stage=3, overrides=(WHOLE,)),
    Case(stage=3, offload="cpu", offload_param="cpu", engine="deepspeed", overrides=(WHOLE,)),
]
MODELS = {
    "unet": Adapted(),
    "unet-checkpointing": Adapted(checkpointing=True),
    "text": TEXT,
    "dora": DORA,
    "rslora": Adapted(lora=LoRA(rank=4, alpha=8, rslora=True)),
    "lokr": Adapted(lora=peft.LoKrConfig(r=2, alpha=4)),
    "loha": Adapted(lora=peft.LoHaConfig(r=4, alpha=4, target_modules=["to_q", "to_k", "conv1"])),
    "oft": Adapted(lora=peft.OFTConfig(oft_block_size=8)),
}
RUNS = [
    (kind, case, 1 + (row + column) % 2)
    for (row, case), (column, kind) in itertools.product(enumerate(PLACES), enumerate(MODELS))
]


@pytest.mark.parametrize(
    ("kind", "case", "world_size"), RUNS, ids=[f"{kind}-{case}-{n}" for kind, case, n in RUNS]
)
def test_losses_equal_those_of_the_plain_engine(kind, case, world_size, tmp_path):
    adapted = MODELS[kind]
    expected = plain_losses(adapted, tmp_path)
    results = run_ranks(
        follow,
        case_for(case, world_size),
        adapted,
        str(tmp_path),
        STEPS,
        HALF,
        world_size=world_size,
    )
    check_losses(results[0]["losses"], expected)
    check_files(results[0])
    if case.stage == 3:
        check_partitioned(results)


@pytest.mark.parametrize(
    ("kind", "case", "world_size"), [run for run in RUNS if run[0] in ("unet", "text")], ids=str
)
def test_the_exported_file_reproduces_the_engines_bf16_output(kind, case, world_size, tmp_path):
    rounded = attrs.evolve(case_for(case, world_size), precision="bf16")
    results = run_ranks(
        follow, rounded, MODELS[kind], str(tmp_path), STEPS, HALF, world_size=world_size
    )
    check_files(results[0])
    assert results[0]["dtypes"] == {"torch.bfloat16"}


@pytest.mark.nvme
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_frozen_base_and_the_adapters_states_are_swapped_to_nvme(world_size, tmp_path):
    # Each rank's part of a matrix takes 1 MiB in bf16, the least that DeepSpeed swaps.
    wide = attrs.evolve(WIDE, wide=16384 * world_size)
    case = on_nvme(tmp_path, world_size, precision="bf16")
    results = run_ranks(follow, case, wide, str(tmp_path), STEPS, HALF, world_size=world_size)
    check_files(results[0])
    check_partitioned(results)
    assert all(found["swapped"] == {"frozen": True, "optimizer": True} for found in results)
