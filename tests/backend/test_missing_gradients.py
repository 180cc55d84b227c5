"""Weights without a gradient in a step: left as they are as in torch, or moved by zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import ranks
from tests.support.runs import build
from zerotune.errors import CollectiveError, EngineError, StepOrderError
from zerotune.plan.context import Streaming
from zerotune.plan.plan import DeepSpeedPlan

# Each test needs its own process: DeepSpeed keeps state of its first engine until the end.
pytestmark = [pytest.mark.deepspeed, ranks(1)]

ADAM = {"lr": 1e-2, "weight_decay": 0.01}
UNITS = ("first", "middle", "last")
NEAR = 1e-6
"""Largest difference of two weights; a gradient too many or too few moves weights by 4e-3."""
WINDOWS = [(0, 0), (0, 0), (1, 0), (0, 0), (1, 1), (0, 0)]
"""Whether each micro batch of each window leaves the layer in the middle out."""
LEFT_OUT_LAST = [(0, 0), (0, 1), (0, 0)]


class Net(torch.nn.Module):
    """Three layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (torch.nn.Linear(17, 17) for _ in UNITS)
        self.leaves_out = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x if self.leaves_out else self.middle(torch.tanh(x)))


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 17, generator=torch.Generator().manual_seed(number))


def torch_weights(windows: Any, *, zeros: bool) -> tuple[torch.Tensor, int]:
    """Train with torch, and return the middle layer's weights and the number of its steps."""
    model = Net()
    adam = torch.optim.AdamW(model.parameters(), **ADAM)
    for number, window in enumerate(windows):
        for at, leaves_out in enumerate(window):
            model.leaves_out = bool(leaves_out)
            (model(batch(2 * number + at)).square().mean() / 2).backward()
        for each in model.parameters() if zeros else ():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        adam.step()
        adam.zero_grad()
    weight = model.middle.weight
    return weight.detach(), int(adam.state[weight]["step"])


def start(
    stage: int, offload: str, precision: str = "fp32", kind: str = "AdamW", **context: Any
) -> Any:
    params = ADAM if kind == "AdamW" else {"lr": 1e-3}
    plan = DeepSpeedPlan.build(
        stage=stage, offload=offload, micro_batch_size=4, precision=precision,
        gradient_clipping=0.0, gradient_accumulation_steps=2,
        optimizer={"type": kind, "params": params},
    )  # fmt: skip
    return build(Net(), plan, **context)


def train(engine: Any, windows: Any, first: int = 0) -> None:
    for number, window in enumerate(windows, start=first):
        for at, leaves_out in enumerate(window):
            engine.module.leaves_out = bool(leaves_out)
            x = batch(2 * number + at).to(engine.dtype)
            engine.backward(engine(x).float().square().mean())
            engine.step()


def far(engine: Any, weight: torch.Tensor) -> float:
    return float((dict(engine.master_weights.gather())["middle.weight"] - weight).abs().max())


@pytest.mark.parametrize(
    ("how", "windows"),
    [({"engine": "host"}, WINDOWS), ({"streamed": Streaming(units=UNITS)}, LEFT_OUT_LAST)],
)
def test_the_host_engine_leaves_weights_and_their_counters_as_torch_does(how, windows, tmp_path):
    from zerotune.checkpoint import load_checkpoint, save_checkpoint

    weight, taken = torch_weights(windows, zeros=False)
    with start(2, "cpu", **how) as engine:
        train(engine, windows)
        assert far(engine, weight) < NEAR
        steps = {f.address.name.split(".")[0]: f.step for f in engine.master_weights.read()}
        assert steps == {"first": len(windows), "middle": taken, "last": len(windows)}
    # The counters are part of a checkpoint.
    with start(2, "cpu", **how) as engine:
        train(engine, windows[:-1])
        save_checkpoint(tmp_path / "saved", engine=engine)
    with start(2, "cpu", **how) as engine:
        load_checkpoint(tmp_path / "saved", engine=engine)
        train(engine, windows[-1:], first=len(windows) - 1)
        assert far(engine, weight) < NEAR


@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (2, "none"), (3, "cpu")])
def test_deepspeed_takes_zeros_and_says_so_once(stage, offload):
    with start(stage, offload, engine="deepspeed") as engine:
        train(engine, WINDOWS[:4])
        assert not any(each.key == "optimizer.step.gradients" for each in engine.decisions)
        train(engine, WINDOWS[4:], first=4)
        said = [each for each in engine.decisions if each.key == "optimizer.step.gradients"]
        assert "middle.weight and 1 other" in said[0].reason
        assert len(said) == 1
        assert far(engine, torch_weights(WINDOWS, zeros=True)[0]) < NEAR


@pytest.mark.parametrize("how", [("fp32", "AdamW"), ("bf16", "AdamW"), ("fp32", "RMSprop")])
def test_stage_0_freezes_weights_as_torch_does_or_refuses_to(how):
    with start(0, "none", *how) as engine:
        train(engine, LEFT_OUT_LAST[:1])
        # FusedAdam's counter is in the state of the last weight.
        engine.module.last.requires_grad_(False)
        before = engine.module.last.weight.detach().clone()
        if "RMSprop" in how:
            train(engine, LEFT_OUT_LAST[:1])
            assert torch.equal(engine.module.last.weight, before)
        else:
            with pytest.raises(EngineError, match=r"last\..*frozen after the engine started"):
                train(engine, LEFT_OUT_LAST[:1])
            engine.module.last.requires_grad_(True)
            assert engine.step().applied


@ranks(2)
@pytest.mark.parametrize("leaves_out", ["all", "one"])
def test_ranks_without_deepspeed_never_step_with_gradients_that_were_not_averaged(leaves_out):
    plan = DeepSpeedPlan.build(
        micro_batch_size=4, precision="fp32", gradient_clipping=0.0,
        optimizer={"type": "AdamW", "params": ADAM},
    )  # fmt: skip
    with build(Net(), plan, deepspeed=False, timeout_s=20) as engine:
        before = [value.clone() for _, value in engine.master_weights.gather()]
        engine.module.leaves_out = leaves_out == "all" or engine.group.rank == 1
        loss = engine(batch(engine.group.rank)).square().mean()
        if engine.module.leaves_out:
            with pytest.raises(EngineError, match="would not average gradients"):
                engine.backward(loss)
            with pytest.raises(StepOrderError):
                engine.step()
            weights = dict(engine.module.named_parameters()).values()
            assert all(map(torch.equal, before, weights))
        else:
            with pytest.raises(CollectiveError):
                engine.backward(loss)
