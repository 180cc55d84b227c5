"""zerotune's Muon has none of the defects of DeepSpeed's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import ranks
from tests.support.runs import build
from zerotune.backend.optimizers.classes import orthogonalise

pytestmark = pytest.mark.deepspeed


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv_in = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.hidden = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.out = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(torch.relu(self.conv_in(x)))).mean((2, 3)))


@ranks(1)
def test_our_muon_orthogonalises_only_the_hidden_convolution_at_stage_3() -> None:
    from zerotune.plan.plan import DeepSpeedPlan

    model = Net()
    plan = DeepSpeedPlan.build(
        stage=3,
        precision="fp32",
        optimizer={"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}},
    )
    with build(model, plan) as engine:
        engine.backward(engine(torch.ones(1, 1, 5, 5)).pow(2).sum())
        engine.step()
        assert [
            fragment.address.name
            for fragment in engine.master_weights.read()
            if fragment.step is None
        ] == ["hidden.weight"]


LR = 0.05


class Matrices(torch.nn.Module):
    """Linear layers only, which DeepSpeed's Muon can update too; the middle one is hidden."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(6, 8)
        self.hidden = torch.nn.Linear(8, 8)
        self.outer = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.hidden(torch.tanh(self.inner(x)))))


def error_of(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 6, generator=generator)
    return (model(inputs) - inputs[:, :3].sin()).pow(2).mean()


def gradient() -> torch.Tensor:
    """Return the initial gradient of the hidden matrix, (8, 8)."""
    model = Matrices()
    error_of(model).backward()
    return model.hidden.weight.grad


def spread(matrix: torch.Tensor) -> float:
    """Return the ratio of the second-smallest to the largest singular value, 1 if orthogonal."""
    values = torch.linalg.svdvals(matrix.float())
    return float(values[-2] / values[0])


@ranks(1)
def test_our_muon_takes_an_orthogonal_step_where_deepspeeds_did_not() -> None:
    from zerotune.plan.plan import DeepSpeedPlan

    model = Matrices()
    plan = DeepSpeedPlan.build(
        stage=3,
        offload="cpu",
        precision="fp32",
        gradient_clipping=0.0,
        stage3_param_persistence_threshold=0,
        optimizer={"type": "Muon", "params": {"lr": LR, "adam_lr": 1e-3, "weight_decay": 0.0}},
    )
    with build(model, plan) as engine:
        # Our engine partitions through zero.Init, which was inactive for DeepSpeed's.
        assert hasattr(model.hidden.weight, "ds_id")
        before = dict(engine.master_weights.gather())["hidden.weight"].clone()
        engine.backward(error_of(engine))
        engine.step()
        update = (before - dict(engine.master_weights.gather())["hidden.weight"]) / LR
    torch.testing.assert_close(update, orthogonalise(gradient()), atol=2e-4, rtol=0)
    assert spread(update) > 0.3 > 3 * spread(gradient())
