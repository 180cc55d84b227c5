"""Optimizers with 8-bit and 4-bit states on the real engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.needs import needs
from tests.support.ranks import ranks
from tests.support.runs import Case, start
from zerotune.backend.master_weights import OptimizerStates

WHY = "a large wheel for an optional back end"


def engine_of(name: str, stage: int, offload: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    optimizer = {"type": name, "params": {"lr": 1e-2}}
    return start(Case(stage=stage, offload=offload, optimizer=optimizer, lr=1e-2), model)


@pytest.mark.deepspeed
@pytest.mark.parametrize(("stage", "offload"), [(2, "cpu"), (3, "none")])
@ranks(1)
def test_8_bit_states_train_and_are_not_exposed_as_states_per_weight(
    stage: int, offload: str
) -> None:
    needs("bitsandbytes", may_lack=WHY)
    engine = engine_of("AdamW8bit", stage, offload)
    inputs, losses = torch.randn(32, 64), []
    for _ in range(12):
        loss = (engine(inputs) - inputs).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.4 * losses[0]
    _, states = next(iter(engine.master_weights.describe()))
    assert states.tensors == {}
    assert {"state1", "absmax1"} <= set(states.others)
    engine.close()


@pytest.mark.deepspeed
@ranks(1)
def test_torchao_starts_under_a_schedule() -> None:
    needs("torchao", may_lack=WHY)
    # A tensor learning rate broke the start, so no step is needed, which takes ten seconds to
    # compile.
    engine = engine_of("TorchAOAdamW8bit", 2, "none")
    assert isinstance(engine.deepspeed_engine.optimizer.param_groups[0]["lr"], torch.Tensor)
    assert engine.lr == pytest.approx(1e-3, rel=1e-6), "a tenth of 1e-2, where the warm-up starts"
    engine.close()


class Codes(torch.Tensor):
    """Stands in for classes that present low-bit codes as fp32, as torchao's do."""


def test_low_bit_codes_are_not_exposed_as_states() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.state[weight] = {
        "numbers": torch.zeros(4),
        "bytes": torch.zeros(4, dtype=torch.uint8),
        "hidden": torch.zeros(4).as_subclass(Codes),
    }
    states = OptimizerStates(optimizer, weight)
    assert set(states.tensors) == {"numbers"}
    assert states.others == ("bytes", "hidden")
