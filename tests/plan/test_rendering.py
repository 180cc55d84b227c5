"""Rendered configurations, compared with reviewed golden files.

``ZEROTUNE_UPDATE_GOLDEN=1 pytest tests/plan/test_rendering.py`` rewrites them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.plan.conftest import ADAMW, REFERENCE_A, REFERENCE_B, REFERENCE_C, WARMUP, unet_facts
from zerotune.errors import InvalidValueError, UnresolvedPlanError
from zerotune.plan import DeepSpeedPlan, RunFacts
from zerotune.plan.optimizer.choices import OptimizerChoice, SchedulerChoice
from zerotune.plan.plan import ResolvedPlan
from zerotune.platform import Platform

GOLDEN = Path(__file__).parent / "golden"
AUTO = "auto"

CUDA = Platform.synthetic("cuda")
CPU = Platform.synthetic("cpu")
MPS = Platform.synthetic("mps", deepspeed=False)

HUGGING_FACE = {
    "fp16": {
        "enabled": AUTO,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": AUTO},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}


def zero(**keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": keys,
        "optimizer": ADAMW,
    }


CASES: dict[str, tuple[dict[str, Any] | str, dict[str, Any]]] = {
    "reference_a_cuda": (REFERENCE_A, {"platform": CUDA}),
    "reference_a_cpu": (REFERENCE_A, {"platform": CPU, "model": unet_facts()}),
    "reference_b_cuda": (REFERENCE_B, {"platform": CUDA, "model": unet_facts()}),
    "reference_b_cpu": (REFERENCE_B, {"platform": CPU, "model": unet_facts()}),
    "reference_b_bf16_cpu": (
        REFERENCE_B | {"bf16": {"enabled": True}},
        {"platform": CPU, "model": unet_facts()},
    ),
    "reference_c_cuda": (REFERENCE_C, {"platform": CUDA}),
    "reference_c_cpu": (REFERENCE_C, {"platform": CPU}),
    "stage_0_fp32": (zero(stage=0) | {"bf16": {"enabled": False}}, {"platform": CUDA}),
    "stage_1_two_ranks": (zero(stage=1), {"platform": CUDA, "world_size": 2}),
    "stage_2_fp16": (zero(stage=2) | {"bf16": False, "fp16": True}, {"platform": CUDA}),
    "stage_3": (zero(stage=3), {"platform": CUDA, "model": unet_facts()}),
    "stage_3_nvme_two_ranks": (
        zero(
            stage=3,
            offload_param={"device": "nvme", "nvme_path": "/mnt/a"},
            offload_optimizer={
                "device": "nvme",
                "nvme_path": "/mnt/b",
                "pipeline_read": True,
                "pipeline_write": True,
            },
        ),
        {"platform": CUDA, "model": unet_facts(), "world_size": 2},
    ),
    "hugging_face_auto": (
        HUGGING_FACE,
        {
            "platform": CUDA,
            "model": unet_facts(),
            "run": RunFacts(
                micro_batch_size=4, gradient_accumulation_steps=2, gradient_clipping=0.5
            ),
        },
    ),
    "plain_engine": (REFERENCE_A, {"platform": MPS}),
}


def resolve(case: str, folder: Path) -> ResolvedPlan:
    written, kwargs = CASES[case]
    if isinstance(written, str):
        file = folder / "accelerate.yaml"
        file.write_text(written)
        return DeepSpeedPlan.from_yaml(file).resolve(**kwargs)
    return DeepSpeedPlan.from_dict(written).resolve(**kwargs)


def settle(resolved: ResolvedPlan, **changes: Any) -> ResolvedPlan:
    """Stand in for ``zerotune.optim``, which other tests run on plans."""
    offloaded = resolved.offload_optimizer != "none"
    optimizer = {
        "name": "AdamW",
        "params": ADAMW["params"],
        "implementation": "DeepSpeedCPUAdam" if offloaded else "FusedAdam",
        "source": "deepspeed" if resolved.uses_deepspeed else "torch",
        "weight_decay_mode": "decoupled",
    }
    scheduler = SchedulerChoice(name="WarmupLR", params=WARMUP["params"])
    return attrs.evolve(
        resolved, optimizer=OptimizerChoice(**(optimizer | changes)), scheduler=scheduler
    )


@pytest.mark.parametrize("case", CASES)
def test_the_rendered_configuration_equals_the_golden_file(case, tmp_path):
    rendered = settle(resolve(case, tmp_path)).to_deepspeed()
    text = json.dumps(rendered, indent=2, allow_nan=False) + "\n"
    file = GOLDEN / f"{case}.json"
    if os.environ.get("ZEROTUNE_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_every_golden_file_belongs_to_a_case():
    assert {file.stem for file in GOLDEN.glob("*.json")} == CASES.keys()


def test_no_value_of_the_optimizer_is_automatic_in_a_resolved_plan(tmp_path):
    rendered = resolve("hugging_face_auto", tmp_path).to_deepspeed()
    assert rendered["optimizer"]["params"]["lr"] == 1e-4
    assert AUTO not in {*rendered["optimizer"]["params"].values()} - {(0.9, 0.999)}


def test_a_torch_optimizer_is_left_out_and_allowed_as_untested(tmp_path):
    rendered = settle(
        resolve("reference_a_cuda", tmp_path), source="torch", name="SGD", implementation="SGD"
    ).to_deepspeed()
    assert "optimizer" not in rendered
    assert rendered["zero_allow_untested_optimizer"] is True
    assert rendered["zero_force_ds_cpu_optimizer"] is False
    assert rendered["scheduler"]["type"] == "WarmupLR"


@pytest.mark.parametrize(
    ("implementation", "untested"),
    [("DeepSpeedCPUAdam", False), ("MuAdamW", True), ("MuSGD", True)],
)
def test_an_optimizer_untested_with_zero_is_allowed(implementation, untested, tmp_path):
    rendered = settle(
        resolve("reference_a_cuda", tmp_path), implementation=implementation
    ).to_deepspeed()
    assert rendered["zero_allow_untested_optimizer"] is untested


def test_without_a_scheduler_no_section_is_rendered(tmp_path):
    resolved = resolve("reference_a_cuda", tmp_path)
    choice = OptimizerChoice(name="AdamW", params={"lr": 1.0}, implementation="FusedAdam")
    assert (
        "scheduler" not in attrs.evolve(resolved, optimizer=choice, scheduler=None).to_deepspeed()
    )


def test_nvme_offload_without_a_folder_is_not_rendered():
    plan = DeepSpeedPlan.from_dict(
        zero(
            stage=3,
            offload_param={"device": "nvme"},
            offload_optimizer={"device": "nvme", "nvme_path": AUTO},
        )
    )
    resolved = plan.resolve(platform=CUDA)
    assert resolved.nvme_paths == {"param": None, "optimizer": None}
    with pytest.raises(UnresolvedPlanError) as caught:
        resolved.to_deepspeed()
    assert caught.value.key == "zero_optimization.offload_param.nvme_path"
    leased = resolved.with_nvme_path(param="/lease/a", optimizer=Path("/lease/b"))
    assert leased.nvme_paths == {"param": "/lease/a", "optimizer": "/lease/b"}
    assert leased.to_deepspeed()["zero_optimization"]["offload_param"]["nvme_path"] == "/lease/a"
    assert leased.digest() == resolved.digest()


def test_a_folder_for_an_unswapped_part_is_refused(tmp_path):
    resolved = resolve("reference_a_cuda", tmp_path)
    with pytest.raises(InvalidValueError, match="does not use NVMe"):
        resolved.with_nvme_path(optimizer="/x")
    assert resolved.with_nvme_path() == resolved


def test_private_keys_are_not_rendered():
    plan = DeepSpeedPlan.from_dict({"_note": "x", "wandb": {"enabled": False}})
    rendered = plan.resolve(platform=CUDA).to_deepspeed()
    assert "_note" not in rendered
    assert rendered["wandb"] == {"enabled": False}


def test_the_digest_differs_between_plans_and_world_sizes(tmp_path):
    one = settle(resolve("stage_3", tmp_path))
    assert one.digest() == settle(resolve("stage_3", tmp_path)).digest()
    assert len(one.digest()) == 64
    other = settle(resolve("stage_1_two_ranks", tmp_path))
    assert one.digest() != other.digest()
    assert one.digest() != settle(resolve("stage_3", tmp_path), params={"lr": 2.0}).digest()


def test_the_rendered_dict_is_a_copy(tmp_path):
    resolved = settle(resolve("stage_3", tmp_path))
    resolved.to_deepspeed()["optimizer"]["params"]["lr"] = 7
    assert resolved.to_deepspeed()["optimizer"]["params"]["lr"] == 1e-4
