"""Adapters train, save, resume and export the same on every engine.

This is a sample; ``test_lora_matrix`` has the rest.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.diffusion.adapting import WHOLE, Adapted, case_for, follow
from tests.support.needs import needs
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case
from zerotune.diffusion import LoRA

peft = needs("peft")

STEPS, HALF = 12, 6
LENGTHS = pytest.mark.parametrize(
    ("steps", "half"), [(4, 2), pytest.param(STEPS, HALF, marks=pytest.mark.nightly)]
)
TEXT = Adapted(kind="text", checkpointing=True)
"""A U-Net and its text encoder, both with adapters, in one engine."""
DORA = Adapted(kind="sd3", lora=LoRA(rank=4, alpha=8, dora=True))
LOKR = Adapted(
    lora=peft.LoKrConfig(r=2, alpha=4, target_modules=["to_q", "conv1"]), checkpointing=True
)
"""LoKr factors: no module's forward pass fetches them, and they need the base weight's shape."""
WIDE = Adapted(lora=LoRA(rank=16, targets=("attn2.to_k", "attn2.to_v")), wide=2048)
"""Adapters of more than 1 MiB together: DeepSpeed swaps nothing smaller."""
CLOSE = 5e-5
_plain: dict[tuple[str, int], list[float]] = {}


def plain_losses(adapted, folder, steps=STEPS, half=HALF):
    """Return the losses of one process without DeepSpeed, after checking its files."""
    key = repr(adapted), steps
    if key not in _plain:
        case, place = case_for(PLAIN, 1), str(folder / "plain")
        (found,) = run_ranks(follow, case, adapted, place, steps, half)
        check_files(found)
        _plain[key] = found["losses"]
    return _plain[key]


PARTITIONED = Case(
    stage=3, offload="cpu", offload_param="cpu", engine="deepspeed", overrides=(WHOLE,)
)


def on_nvme(folder, world_size, precision="fp32"):
    case = Case(
        stage=3,
        offload="nvme",
        offload_param="nvme",
        precision=precision,
        nvme_path=str(folder / "swap"),
        overrides=(WHOLE,),
    )
    return case_for(case, world_size)


def check_losses(found, expected):
    assert len(found) == len(expected)
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    assert worst <= CLOSE, (found, expected)


def check_files(found):
    assert found["same"], "the file gives the trained output"
    assert found["same_average"]
    assert found["average_differs"]
    assert found["learned"] > 0.002


def check_partitioned(results):
    """Check that no parameter, frozen or trained, is whole outside a forward pass."""
    for found in results:
        assert len(found["held"]) > len(found["trained"]) > 0
        assert not any(found["held"].values())


@pytest.mark.deepspeed
@LENGTHS
def test_a_unet_and_its_encoder_resume_from_stage_2_at_stage_3(steps, half, tmp_path):
    expected = plain_losses(TEXT, tmp_path, steps, half)
    case = case_for(Case(stage=2, offload="cpu"), 1)
    (first,) = run_ranks(follow, case, TEXT, str(tmp_path), steps, half)
    check_losses(first["losses"], expected)
    check_files(first)
    assert first["file"][2] == ("unet", "text_encoder")
    assert not first["stuck"]
    # Weights, two moments and EMA of the adapters in fp32, and nothing of the base.
    weights = tmp_path / "half" / "weights-00001-of-00001.safetensors"
    assert 0 < weights.stat().st_size - 4 * first["file"][1] < 40_000
    case = case_for(PARTITIONED, 2)
    resume = partial(follow, resumed=True)
    results = run_ranks(resume, case, TEXT, str(tmp_path), steps, half, world_size=2)
    check_losses(results[0]["losses"], expected[half:])
    check_files(results[0])
    check_partitioned(results)


@pytest.mark.deepspeed
@LENGTHS
def test_kronecker_factors_train_at_stage_3(steps, half, tmp_path):
    expected = plain_losses(LOKR, tmp_path, steps, half)
    case = case_for(PARTITIONED, 2)
    results = run_ranks(follow, case, LOKR, str(tmp_path), steps, half, world_size=2)
    check_losses(results[0]["losses"], expected)
    check_files(results[0])
    check_partitioned(results)


@pytest.mark.deepspeed
@pytest.mark.nvme
@LENGTHS
def test_the_states_of_adapters_can_be_on_nvme(steps, half, tmp_path):
    expected = plain_losses(WIDE, tmp_path, steps, half)
    results = run_ranks(follow, on_nvme(tmp_path, 1), WIDE, str(tmp_path), steps, half)
    check_losses(results[0]["losses"], expected)
    check_files(results[0])
    check_partitioned(results)
    # The plan keeps fp32 parameters in host memory here: DeepSpeed would swap them as bf16.
    assert results[0]["swapped"] == {"frozen": False, "optimizer": True}
