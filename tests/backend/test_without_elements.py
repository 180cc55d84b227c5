"""A trainable parameter without elements, which DeepSpeed accepts at stages 0 to 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import RanksFailed, ranks, run_ranks
from tests.support.runs import build
from zerotune.checkpoint.export.model import ModelFolderReader, export_model
from zerotune.checkpoint.load import load_checkpoint
from zerotune.checkpoint.save import save_checkpoint
from zerotune.ema import EMAShadow
from zerotune.plan.plan import DeepSpeedPlan

pytestmark = pytest.mark.deepspeed

PLAIN = -1
"""Stands for the plain engine in place of a ZeRO stage."""


class Net(torch.nn.Module):
    """A model with an empty parameter between others, used in its forward."""

    def __init__(self, *, empty: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 64)
        if empty:
            self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.last = torch.nn.Linear(64, 8)

    def forward(self, x_b8: torch.Tensor) -> torch.Tensor:
        y = self.last(self.first(x_b8))
        return y + self.empty.sum() if hasattr(self, "empty") else y


def begin(stage: int, offload: str, *, hidden: bool, empty: bool = True) -> Any:
    model = Net(empty=empty)
    plan = DeepSpeedPlan.build(
        stage=max(stage, 0),
        offload=offload,
        precision="bf16" if stage > 0 else "fp32",
        micro_batch_size=2,
        gradient_clipping=0.5,
        optimizer={"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.01}},
    )
    return build(model, plan, engine="host" if hidden else "deepspeed", deepspeed=stage != PLAIN)


def train(engine: Any, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + engine.group.rank)
        x = torch.randn(2, 8, generator=generator).to(engine.dtype)
        loss = (engine(x).float() - 1).square().mean()
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return losses


@pytest.mark.parametrize(
    ("stage", "offload", "hidden", "world_size"),
    [
        (PLAIN, "cpu", False, 2),
        (0, "none", False, 2),
        (2, "cpu", False, 1),
        (2, "cpu", True, 2),
    ],
)
@ranks()
def test_a_parameter_without_elements_does_not_change_training_or_resume(
    stage: int, offload: str, hidden: bool, world_size: int, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    with begin(stage, offload, hidden=hidden, empty=False) as engine:
        without = train(engine, *range(6))
    with begin(stage, offload, hidden=hidden) as engine:
        ema = EMAShadow(decay=0.9).attach(engine)
        losses = train(engine, 0, 1, 2)
        ema.step()
        save_checkpoint(folder, engine=engine, shadows={"ema": ema})
        losses += train(engine, 3, 4, 5)
        # At stage 0 it changes how DeepSpeed's norm over several ranks rounds.
        assert losses == pytest.approx(without, rel=1e-6)
        assert engine.module.empty.shape == (0, 3)
        export_model(exported := folder.with_name("model"), engine=engine)
        engine.group.barrier("read what rank 0 has written")
        assert ModelFolderReader(exported).tensors["empty"].shape == (0, 3)
    with begin(stage, offload, hidden=hidden) as engine:
        ema = EMAShadow(decay=0.9).attach(engine)
        load_checkpoint(folder, engine=engine, shadows={"ema": ema})
        assert train(engine, 3, 4, 5) == losses[3:]


def test_stage_3_refuses_a_parameter_without_elements_before_anything_starts() -> None:
    with pytest.raises(RanksFailed, match=r"partition a parameter without elements") as caught:
        run_ranks(refused, world_size=2)
    assert "model.empty = (0, 3)" in str(caught.value)


def refused() -> None:
    begin(3, "cpu", hidden=False)
