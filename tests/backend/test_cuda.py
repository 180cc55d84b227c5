"""The engines on a CUDA device. Run with ``nox -s gpu``."""

from __future__ import annotations

import functools

import pytest

from tests.backend.test_parity import worst
from tests.support.ranks import run_ranks
from tests.support.runs import PLAIN, Case, train_unet

pytestmark = [pytest.mark.gpu, pytest.mark.deepspeed]

STEPS = 20
# cuDNN picks convolution algorithms by timing and TF32 may be on: two identical runs differ by
# about 1e-4 relative after 20 steps. A wrong lr or decay mode is off by more than 1e-2.
TOLERANCE = 2e-3
# Uninterrupted bf16 runs of different stages differ by this much, since they round differently.
BF16_TOLERANCE = 4e-2

FP32 = [
    Case(stage=1),
    Case(stage=2),
    Case(stage=2, offload="cpu"),
    Case(stage=3),
    Case(stage=3, offload="cpu", offload_param="cpu"),
]
BF16 = [
    Case(stage=2, precision="bf16"),
    Case(stage=2, offload="cpu", precision="bf16"),
    Case(stage=3, offload="cpu", offload_param="cpu", precision="bf16"),
]


@functools.cache
def reference() -> list[list[float]]:
    return run_ranks(train_on_cuda, PLAIN, STEPS)


def train_on_cuda(case: Case, steps: int) -> list[float]:
    """Run ``train_unet``; fail if there is no CUDA, rather than compare a CPU with a CPU."""
    from zerotune.platform import detect_platform

    assert detect_platform().accelerator == "cuda"
    return train_unet(case, steps, device="cuda")


@pytest.mark.parametrize("case", FP32, ids=str)
def test_fp32_losses_match_the_plain_engine(case: Case) -> None:
    losses = run_ranks(train_on_cuda, case, STEPS)
    assert losses[0][-1] < losses[0][0]
    assert worst(losses, reference()) < TOLERANCE


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_losses_stay_within_the_spread_between_stages(case: Case) -> None:
    losses = run_ranks(train_on_cuda, case, STEPS)
    assert losses[0][-1] < losses[0][0]
    assert worst(losses, reference()) < BF16_TOLERANCE


@pytest.mark.nvme
def test_nvme_losses_match_the_plain_engine(tmp_path) -> None:
    case = Case(stage=3, offload="nvme", offload_param="cpu", nvme_path=str(tmp_path))
    assert worst(run_ranks(train_on_cuda, case, STEPS), reference()) < TOLERANCE


def test_fp16_trains_with_a_dynamic_loss_scale() -> None:
    losses = run_ranks(train_on_cuda, Case(stage=2, precision="fp16"), STEPS)
    assert losses[0][-1] < losses[0][0]
