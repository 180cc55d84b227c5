"""Master weights in host memory of a model whose weights are partly on the device."""

from __future__ import annotations

import pytest
import torch

from tests.device import on_device
from zerotune.errors import EngineError
from zerotune.optim import OptimizerResolver
from zerotune.plan.context import Streaming
from zerotune.plan.facts import ModelFacts
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import Platform
from zerotune.platform.facts import GIB
from zerotune.training.setup import build_engine

pytestmark = pytest.mark.deepspeed


class Block(torch.nn.Linear):
    """A layer whose weights are streamed."""


def streamed():
    """Start an engine that streams two layers, and keeps two others on the device."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 16), Block(16, 16), Block(16, 16), torch.nn.Linear(16, 16)
    )
    plan = DeepSpeedPlan.build(
        stage=2, offload="cpu", precision="bf16", micro_batch_size=2, optimizer="AdamW"
    ).resolve(
        platform=Platform.synthetic("cuda", vram=8 * GIB, ram=24 * GIB),
        model=ModelFacts.from_module(model),
        streamed=Streaming(units=("Block",), window=2),
    )
    return build_engine(model=model, plan=OptimizerResolver().resolve(plan))


def check(engine):
    """Compare samples until each weight has been in one; return the reads of each comparison."""
    read = []
    for sample in range(12):
        torch.simdev.reset_counts()
        engine.master_weights.check_model(sample)
        read.append(torch.simdev.counts().get("downloads", 0))
    return read


@on_device()
def test_weights_on_both_sides_are_checked_with_one_read_of_the_device():
    engine = streamed()
    try:
        loss = engine(torch.ones(2, 16, device="simdev", dtype=torch.bfloat16)).float().mean()
        engine.backward(loss)
        engine.step()
        engine.master_weights.settle()
        assert set(check(engine)) <= {0, 1}
        engine.module[0].weight.data.add_(1.0)
        with pytest.raises(EngineError, match="differ from the optimizer's master weights"):
            check(engine)
    finally:
        engine.close()
