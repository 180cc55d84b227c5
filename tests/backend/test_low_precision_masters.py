"""Master weights in bf16 are refused before anything starts."""

from __future__ import annotations

import pytest
import torch

from zerotune.backend.deepspeed.engine import DeepSpeedEngine
from zerotune.errors import EngineError
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan, ModelFacts
from zerotune.platform import Platform


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": {"device": "cpu"}}])
def test_bf16_master_weights_are_refused_with_the_reason(
    stage: int, offload: dict[str, dict[str, str]]
) -> None:
    model = torch.nn.Linear(4, 4)
    plan = DeepSpeedPlan.from_dict(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True,
            },
            "zero_optimization": {"stage": stage, **offload},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
    ).resolve(platform=Platform.synthetic("cpu"), model=ModelFacts.from_module(model))
    with pytest.raises(EngineError, match="fp32 master weights") as caught:
        DeepSpeedEngine(model=model, plan=OptimizerResolver().apply(plan))
    assert caught.value.key == "bf16.bf16_master_weights_and_grads"
