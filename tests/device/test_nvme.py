"""Weights and moments on NVMe, beside a device."""

from __future__ import annotations

import pytest
import torch

from tests.device import on_device
from zerotune.optim.resolver import OptimizerResolver
from zerotune.plan.model import DeepSpeedPlan, ModelFacts
from zerotune.platform import Platform
from zerotune.training.setup import build_engine

WIDTH = 1024
"""DeepSpeed swaps weights of 1 MiB and more."""


def train(folder, lateness):
    torch.simdev.seed_order(0, lateness, 3000)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    written = {"offload": "nvme", "nvme_path": str(folder)} if folder else {"offload": "cpu"}
    plan = DeepSpeedPlan.build(
        stage=3,
        offload_param=written["offload"],
        precision="bf16",
        micro_batch_size=2,
        gradient_clipping=1.0,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
        **written,
    ).with_overrides({"zero_optimization.stage3_param_persistence_threshold": 0})
    resolved = plan.resolve(
        model=ModelFacts.from_module(model),
        platform=Platform.synthetic("cuda", vram=8 << 30, ram=24 << 30),
        world_size=1,
    )
    losses = []
    with build_engine(model=model, plan=OptimizerResolver().apply(resolved)) as engine:
        for seed in range(3):
            random_ = torch.Generator().manual_seed(seed)
            batch = torch.randn(2, WIDTH, generator=random_).bfloat16().to(engine.device)
            loss = engine(batch).float().square().mean()
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
        state = [fragment.value.clone() for fragment in engine.master_weights.read()]
    return [float(loss) for loss in losses], state


@pytest.mark.nvme
@pytest.mark.deepspeed
@on_device()
def test_weights_and_moments_on_nvme_train_to_the_bits_of_those_in_ram(tmp_path):
    losses, state = train(tmp_path, 0.02)
    expected = train(None, 1.0)
    assert losses == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(state, expected[1], strict=True))
