"""Start a saved file on the real engine, in a process of its own."""

from __future__ import annotations

import os
from typing import Any


def train(file: str, swap: str, steps: int = 2) -> dict[str, Any]:
    """Load a file saved by the builder, as a training script would, and take some steps."""
    import torch

    from tests.support.models import tiny_unet
    from tests.support.runs import unet_loss
    from zerotune.optim import OptimizerResolver
    from zerotune.plan import DeepSpeedPlan, ModelFacts
    from zerotune.training.setup import build_engine

    torch.manual_seed(0)
    model = tiny_unet()
    resolved = DeepSpeedPlan.load(file).resolve(
        model=ModelFacts.from_module(model),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        engine="deepspeed",
    )
    folders = {part: swap for part, folder in resolved.nvme_paths.items() if folder is None}
    engine = build_engine(
        model=model, plan=OptimizerResolver().resolve(resolved.with_nvme_path(**folders))
    )
    losses = []
    for _ in range(steps):
        loss = unet_loss(engine, 0)
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    stage = engine.deepspeed_engine.zero_optimization_stage()
    engine.close()
    return {"stage": stage, "losses": losses}


def accept(cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Pass configurations to the installed DeepSpeed; return its errors."""
    import deepspeed.runtime.config as reading

    class Alone:
        def get_rank(self, *_: Any) -> int:
            return 0

        def get_world_size(self, *_: Any) -> int:
            return 1

    reading.dist = Alone()
    refused = {}
    for name, given in cases.items():
        try:
            stage = int(reading.DeepSpeedConfig(given).zero_config.stage)
        except Exception as error:  # noqa: BLE001 - whatever it raises is a refusal
            refused[name] = f"{type(error).__name__}: {error}"
        else:
            if stage != given["zero_optimization"]["stage"]:
                refused[name] = f"read as stage {stage}"
    return refused
