"""The measurements behind driving DeepSpeed directly; docs/engines.md quotes them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.deepspeed


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def prepare_with_accelerate(optimizer_name: str, zero: dict[str, Any]) -> dict[str, Any]:
    """Report what accelerate does to a torch optimizer and to ``"auto"``."""
    import os

    import torch
    from accelerate import Accelerator, DeepSpeedPlugin

    from tests.support.models import tiny_unet
    from tests.support.ranks import free_port

    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    config = CONFIG | {"zero_optimization": CONFIG["zero_optimization"] | zero}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = tiny_unet()
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=1e-3)
    data = torch.utils.data.DataLoader(torch.zeros(4, 4), batch_size=2)
    try:
        engine, *_ = accelerator.prepare(model, optimizer, data)
    except ValueError as error:
        return {"error": str(error)}
    inner = engine.optimizer.optimizer
    return {"class": type(inner).__name__}


def test_accelerate_silently_replaces_an_optimizer() -> None:
    (rmsprop,) = run_ranks(prepare_with_accelerate, "RMSprop", {})
    assert rmsprop["class"] == "DeepSpeedCPUAdam", "RMSprop was asked for"


def test_accelerate_cannot_size_buckets_of_a_model_without_hidden_size() -> None:
    (seen,) = run_ranks(prepare_with_accelerate, "AdamW", {"reduce_bucket_size": "auto"})
    assert "hidden_size" in seen["error"]
