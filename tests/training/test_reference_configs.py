"""The reference configurations load, resolve and run; changes are recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from zerotune.plan import DeepSpeedPlan

STAGE_2 = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 500},
    },
}
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  zero3_init_flag: false
  zero_stage: 1
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 1
"""


def stage_3(nvme_path: str, precision: dict[str, Any]) -> dict[str, Any]:
    return precision | {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme",
                "nvme_path": nvme_path,
                "buffer_size": 100000000.0,
                "pin_memory": True,
            },
        },
    }


def write(folder: Path) -> dict[str, Path]:
    """Write the three configurations to files, as their users have them."""
    (folder / "swap").mkdir()
    names = ("stage2.json", "stage3.json", "stage3-bf16.json", "accelerate.yaml")
    files = {name: folder / name for name in names}
    files["stage2.json"].write_text(json.dumps(STAGE_2))
    swap = str(folder / "swap")
    files["stage3.json"].write_text(json.dumps(stage_3(swap, {})))
    files["stage3-bf16.json"].write_text(json.dumps(stage_3(swap, {"bf16": {"enabled": True}})))
    files["accelerate.yaml"].write_text(ACCELERATE)
    return files


def read(path: Path) -> DeepSpeedPlan:
    return (
        DeepSpeedPlan.from_yaml(path) if path.suffix == ".yaml" else DeepSpeedPlan.from_json(path)
    )


def train(path: Path) -> dict[str, Any]:
    """Run nine micro batches through ``prepare``; return what ran and what was decided."""
    from tests.support.models import tiny_unet
    from tests.support.runs import unet_loss
    from zerotune import prepare

    losses, applied = [], 0
    with prepare(model=tiny_unet(), plan=read(path)) as engine:
        for step in range(9):
            loss = unet_loss(engine, step)
            losses.append(float(loss.detach()))
            engine.backward(loss)
            applied += engine.step().applied
        return {
            "losses": losses,
            "applied": applied,
            "stage": engine.plan.stage,
            "precision": engine.plan.precision,
            "accumulation": engine.plan.gradient_accumulation_steps,
            "offload": (engine.plan.offload_optimizer, engine.plan.offload_param),
            "decisions": {d.key: d.severity for d in engine.decisions},
        }


@pytest.mark.deepspeed
def test_stage_2_with_offload_runs_and_says_that_offload_param_has_no_effect(
    tmp_path: Path,
) -> None:
    (seen,) = run_ranks(train, write(tmp_path)["stage2.json"])
    assert seen["applied"] == 2, "9 micro batches, 4 per step"
    assert seen["stage"] == 2
    assert seen["offload"] == ("cpu", "none")
    assert seen["decisions"]["zero_optimization.offload_param"] == "warning"
    assert all(0 < loss < 10 for loss in seen["losses"])


@pytest.mark.deepspeed
@pytest.mark.nvme
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["stage3.json", "stage3-bf16.json"])
def test_stage_3_with_parameters_on_nvme_runs(name: str, tmp_path: Path) -> None:
    (seen,) = run_ranks(train, write(tmp_path)[name])
    assert seen["stage"] == 3
    assert seen["offload"][1] == "nvme"
    assert seen["applied"] == 9
    assert "zero_optimization.offload_param.buffer_size" in seen["decisions"]
    assert all(0 < loss < 10 for loss in seen["losses"])
    assert list((tmp_path / "swap").iterdir()) == [], "the run's swap folder went with it"


@pytest.mark.deepspeed
def test_the_accelerate_yaml_runs(tmp_path: Path) -> None:
    (seen,) = run_ranks(train, write(tmp_path)["accelerate.yaml"])
    assert seen["stage"] == 1
    assert seen["precision"] == "bf16"
    assert seen["accumulation"] == 4
    assert seen["applied"] == 2
