"""Platforms, a small U-Net's shapes and the reference configurations."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from zerotune.plan import ModelFacts
from zerotune.platform import Platform

ADAMW = {
    "type": "AdamW",
    "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 500},
}
REFERENCE_A = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": ADAMW,
    "scheduler": WARMUP,
}
REFERENCE_B = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/mnt/nvme",
            "buffer_size": 100000000.0,
            "pin_memory": True,
        },
    },
    "optimizer": ADAMW,
}
REFERENCE_C = """\
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 4
  zero3_init_flag: false
  zero_stage: 1
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
use_cpu: false
"""


def unet_facts(width: int = 128) -> ModelFacts:
    """Return names and shapes of a U-Net with ``width`` base channels and attention."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("conv_in.weight", (width, 3, 3, 3))]
    for level, factor in enumerate((1, 2, 4)):
        channels, inner = width * factor, width * max(1, factor // 2)
        block = f"down.{level}"
        shapes += [
            (f"{block}.norm.weight", (inner,)),
            (f"{block}.norm.bias", (inner,)),
            (f"{block}.conv1.weight", (channels, inner, 3, 3)),
            (f"{block}.conv1.bias", (channels,)),
            (f"{block}.time.weight", (channels, 4 * width)),
            (f"{block}.conv2.weight", (channels, channels, 3, 3)),
            (f"{block}.conv2.bias", (channels,)),
            (f"{block}.attention.qkv.weight", (3 * channels, channels)),
            (f"{block}.attention.out.weight", (channels, channels)),
        ]
    return ModelFacts.from_shapes([*shapes, ("scale", ())], name="UNet")


@pytest.fixture
def unet() -> ModelFacts:
    return unet_facts()


@pytest.fixture
def cuda() -> Platform:
    return Platform.synthetic("cuda")


@pytest.fixture
def cpu() -> Platform:
    return Platform.synthetic("cpu")


@pytest.fixture
def no_deepspeed() -> Platform:
    return Platform.synthetic("mps", deepspeed=False)


@pytest.fixture
def reference_a() -> dict[str, Any]:
    return copy.deepcopy(REFERENCE_A)


@pytest.fixture
def reference_b() -> dict[str, Any]:
    return copy.deepcopy(REFERENCE_B)


@pytest.fixture
def reference_c() -> str:
    return REFERENCE_C
