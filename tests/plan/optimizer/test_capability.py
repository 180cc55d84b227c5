from __future__ import annotations

import itertools

import pytest

from zerotune.errors import OptimizerError, PlanError
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.optimizer.capability import Situation, capability_of
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.platform import Platform

STAGES = (0, 1, 2, 3)


def capability(name, *, accelerator="cpu", **situation):
    platform = Platform.synthetic(accelerator)
    return OptimizerResolver.capability(name, platform=platform, **situation)


def refusal_of(resolve, **given):
    try:
        resolve(**given)
    except (OptimizerError, PlanError) as error:
        return error
    return None


def test_lion_uses_deepspeeds_kernel_with_cpu_offload_or_on_cuda():
    assert capability("Lion", stage=2, offload="cpu").implementation == "DeepSpeedCPULion"
    assert capability("Lion", stage=2, accelerator="cuda").implementation == "FusedLion"
    for accelerator, offload in (("cpu", "none"), ("xpu", "cpu"), ("xpu", "none")):
        answer = capability("Lion", stage=2, accelerator=accelerator, offload=offload)
        assert answer.implementation == "Lion"


def test_adagrad_is_not_offloaded_on_apple_gpus():
    assert capability("Adagrad", stage=2, offload="cpu", accelerator="mps").status == "cannot"
    assert capability("Adagrad", stage=2, accelerator="mps").status == "works"


def test_a_missing_package_is_named_with_its_extra():
    for name, extra in (("AdamW8bit", "optimizers"), ("Prodigy", "optimizers")):
        answer = capability_of(OPTIMIZERS[name], Situation(packages=frozenset()))
        assert answer.status == "cannot"
        assert f"zerotune[{extra}]" in answer.reason


def test_optimizers_with_global_statistics_cannot_run_with_sub_groups():
    assert capability("Prodigy", stage=2).runs
    answer = capability("Prodigy", stage=3)
    assert answer.status == "cannot"
    assert answer.alternative == "Prodigy at stage 2"
    assert capability("AdamWScheduleFree", stage=3).status == "cannot"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("stage", "offload"), [(3, "none"), (3, "cpu"), (3, "nvme"), (2, "cpu")])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_alternative_runs_where_the_optimizer_is_refused(name, stage, offload, world_size):
    plan = DeepSpeedPlan.build(
        stage=stage, micro_batch_size=1, optimizer={"type": name, "params": {"lr": 1e-4}}
    )
    if offload != "none":
        section = {"device": offload, **({"nvme_path": "/swap"} if offload == "nvme" else {})}
        plan = plan.with_overrides({"zero_optimization.offload_optimizer": section})
    given = {"platform": Platform.synthetic("cuda", device_count=2), "world_size": world_size}
    refusal = refusal_of(plan.resolve, **given)
    if refusal is not None:
        mended = [{key or refusal.key: to for key, to in edits.items()} for edits in refusal.edits]
        assert mended
        assert [refusal_of(plan.with_overrides(each).resolve, **given) for each in mended] == [
            None for _ in mended
        ]


@pytest.mark.parametrize("name", ["AdamW8bit", "TorchAOAdamW8bit", "TorchAOAdamW4bit"])
def test_low_bit_states_cannot_be_swapped(name):
    for accelerator in ("cpu", "cuda"):
        answer = capability(name, stage=3, offload="nvme", accelerator=accelerator)
        assert (answer.status, answer.alternative) == ("cannot", f"{name} with offload to the CPU")


def test_bf16_states_cannot_be_swapped_but_run_everywhere_else():
    answer = capability("AdamWBF16States", stage=3, offload="nvme")
    assert (answer.status, answer.alternative) == ("cannot", "AdamW")
    assert "would become fp32" in answer.reason
    for stage, offload in [(0, "none"), (1, "none"), (2, "cpu"), (3, "cpu")]:
        answer = capability("AdamWBF16States", stage=stage, offload=offload)
        assert answer.runs
        assert answer.implementation == "AdamWBF16States"
        assert "without a vectorised kernel" not in answer.reason


def test_torchao_says_when_its_states_stay_unpartitioned():
    assert "fp32" not in capability("TorchAOAdamW8bit", stage=0).reason
    assert "fp32 unless" in capability("TorchAOAdamW8bit", stage=2).reason


def test_one_bit_optimizers_name_the_last_release_that_had_them():
    assert "removed in DeepSpeed 0.19" in capability("1bit-adam", stage=0).reason


def test_torch_optimizers_run_under_zero_with_a_note_of_what_changes():
    assert capability("SGD", stage=0).status == "works"
    answer = capability("SGD", stage=1)
    assert answer.status == "works with"
    assert answer.config == {"zero_allow_untested_optimizer": True}
    answer = capability("SGD", stage=2, offload="cpu")
    assert answer.config == {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_unsuited_to_diffusion_are_marked_as_cannot_run(name):
    for deepspeed in (True, False):
        assert capability(name, uses_deepspeed=deepspeed).status == "cannot"


def test_the_plain_engine_runs_every_torch_optimizer():
    runs = {
        "AdamW", "Adam", "Adagrad", "SGD", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta",
        "ASGD", "Rprop", "Adafactor", "Lion", "Lamb", "Muon",
        "Prodigy", "AdamWScheduleFree", "AdamW8bit", "TorchAOAdamW8bit",
        "TorchAOAdamW4bit", "AdamWBF16States",
    }  # fmt: skip
    assert {name for name in OPTIMIZERS if capability(name, uses_deepspeed=False).runs} == runs


@pytest.mark.parametrize("accelerator", ["cuda", "rocm", "mps", "xpu", "cpu"])
def test_every_cell_has_an_answer(accelerator):
    """``cannot`` always comes with a reason and an alternative; nothing raises."""
    places = itertools.product(OPTIMIZERS, (True, False), STAGES, ("none", "cpu", "nvme"))
    for name, deepspeed, stage, offload in places:
        answer = capability(
            name,
            accelerator=accelerator,
            stage=stage,
            offload=offload,
            uses_deepspeed=deepspeed,
        )
        assert answer.runs or (answer.reason and answer.alternative), name
        assert not answer.config or answer.status == "works with", name
        assert bool(answer.implementation) == answer.runs, name
