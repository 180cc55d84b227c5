"""Optimizers with states in 8 and 4 bits on the real engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.needs import needs
from tests.support.ranks import run_ranks
from tests.support.runs import Case, start
from zerotune.backend.master_weights import OptimizerStates

WHY = "a large wheel for an optional back end"


def engine_of(name: str, stage: int, offload: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    optimizer = {"type": name, "params": {"lr": 1e-2}}
    return start(Case(stage=stage, offload=offload, optimizer=optimizer, lr=1e-2), model)


def train_in_8_bits(stage: int, offload: str) -> dict[str, Any]:
    engine = engine_of("AdamW8bit", stage, offload)
    inputs, losses = torch.randn(32, 64), []
    for _ in range(12):
        loss = (engine(inputs) - inputs).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    fragment = next(iter(engine.master_weights.read()))
    found = {"losses": losses, "states": dict(fragment.states), "others": fragment.other_states}
    engine.close()
    return found


@pytest.mark.deepspeed
@pytest.mark.parametrize(("stage", "offload"), [(2, "cpu"), (3, "none")])
def test_8_bit_states_train_and_are_not_taken_for_numbers_per_weight(
    stage: int, offload: str
) -> None:
    needs("bitsandbytes", may_lack=WHY)
    (found,) = run_ranks(train_in_8_bits, stage, offload)
    assert found["losses"][-1] < 0.4 * found["losses"][0]
    assert found["states"] == {}
    assert {"state1", "absmax1"} <= set(found["others"])


def rate_of_torchao() -> tuple[bool, float]:
    # Its update would be compiled for ten seconds; starting is what a rate in a tensor broke.
    engine = engine_of("TorchAOAdamW8bit", 2, "none")
    rate = engine.deepspeed_engine.optimizer.param_groups[0]["lr"]
    found = isinstance(rate, torch.Tensor), engine.lr
    engine.close()
    return found


@pytest.mark.deepspeed
def test_torchao_starts_under_a_schedule() -> None:
    needs("torchao", may_lack=WHY)
    ((is_tensor, rate),) = run_ranks(rate_of_torchao)
    assert is_tensor
    assert rate == pytest.approx(1e-3, rel=1e-6), "a tenth of 1e-2, where the warm-up starts"


class Codes(torch.Tensor):
    """Stands for classes that hide low-bit codes behind an fp32 face, as torchao's do."""


def test_codes_are_not_states() -> None:
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
