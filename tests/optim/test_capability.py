from __future__ import annotations

import pytest

from zerotune.errors import OptimizerError
from zerotune.optim import OPTIMIZERS, OptimizerResolver
from zerotune.platform import Platform

STAGES = (0, 1, 2, 3)


def capability(name, *, accelerator="cpu", deepspeed_version="0.19.8", **situation):
    resolver = OptimizerResolver(
        platform=Platform.synthetic(accelerator), deepspeed_version=deepspeed_version
    )
    return resolver.capability(name, **situation)


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adagrad"])
def test_what_runs_everywhere(name, stage, offload):
    answer = capability(name, stage=stage, offload=offload)
    assert answer.status == "works"
    assert answer.verified


def test_only_what_was_run_is_verified():
    assert capability("AdamW", stage=2, offload="cpu", precision="bf16").verified
    assert not capability("AdamW", stage=3, offload="nvme").verified
    assert not capability("AdamW", stage=2, accelerator="cuda").verified
    assert not capability("AdamW", stage=2, precision="fp16").verified


def test_lion_needs_cpu_offload_or_cuda():
    assert capability("Lion", stage=2, offload="cpu").status == "works"
    assert capability("Lion", stage=2, accelerator="cuda").status == "works"
    answer = capability("Lion", stage=2)
    assert answer.status == "cannot"
    assert "CUDA kernel" in answer.reason
    assert 'offload_optimizer.device "cpu"' in answer.alternative
    assert capability("Lion", stage=2, offload="cpu", accelerator="xpu").status == "cannot"


def test_a_kernel_apple_lacks():
    assert capability("Adagrad", stage=2, offload="cpu", accelerator="mps").status == "cannot"
    assert capability("Adagrad", stage=2, accelerator="mps").status == "works"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "name",
    ["Lamb", "Muon", "MuAdam", "MuAdamW", "MuSGD", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"],
)
def test_what_cannot_run_yet_says_why_and_what_else(name, stage):
    for accelerator in ("cpu", "cuda"):
        for offload in ("none", "cpu"):
            answer = capability(name, stage=stage, offload=offload, accelerator=accelerator)
            assert answer.status == "cannot"
            assert len(answer.reason) > 20
            assert answer.alternative == "AdamW"


def test_one_bit_names_the_release_that_had_them():
    assert "removed it in the 0.19 series" in capability("1bit-adam", stage=0).reason
    older = capability("1bit-adam", stage=0, deepspeed_version="0.18.9").reason
    assert "0.18.9" in older
    assert "stage 0 only" in older


def test_muon_at_stage_3_has_a_reason_of_its_own():
    assert "refuses stage 3" in capability("Muon", stage=3).reason
    assert "refuses stage 3" not in capability("Muon", stage=2).reason


def test_torch_classes_run_under_zero_with_what_they_change():
    assert capability("SGD", stage=0).status == "works"
    answer = capability("SGD", stage=1)
    assert answer.status == "works with"
    assert answer.config == {"zero_allow_untested_optimizer": True}
    answer = capability("SGD", stage=2, offload="cpu")
    assert answer.config == {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    assert not capability("Adamax", stage=2).verified


def test_factored_moments_do_not_survive_flat_partitions():
    assert capability("Adafactor", stage=0).status == "works"
    assert capability("Adafactor", stage=2).status == "cannot"


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_what_does_not_suit_diffusion(name):
    for deepspeed in (True, False):
        assert capability(name, uses_deepspeed=deepspeed).status == "cannot"


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_plain_engine_runs_what_torch_has(name):
    runs = {
        "AdamW", "Adam", "Adagrad", "SGD", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta",
        "ASGD", "Rprop", "Adafactor",
    }  # fmt: skip
    assert capability(name, uses_deepspeed=False).runs == (name in runs)


def test_an_unknown_name_is_an_error_here_too():
    with pytest.raises(OptimizerError, match="did you mean"):
        OptimizerResolver().capability("Lyon")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("accelerator", ["cuda", "rocm", "mps", "xpu", "cpu"])
def test_every_cell_answers(name, accelerator):
    """``cannot`` always comes with a reason and an alternative; nothing raises."""
    for deepspeed in (True, False):
        for stage in STAGES:
            for offload in ("none", "cpu", "nvme"):
                answer = capability(
                    name,
                    accelerator=accelerator,
                    stage=stage,
                    offload=offload,
                    uses_deepspeed=deepspeed,
                )
                assert answer.runs or (answer.reason and answer.alternative)
                assert bool(answer.config) == (answer.status == "works with")
