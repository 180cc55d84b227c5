"""The plain engine: torch alone, its loss scale, and results in fp32."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import pytest
import torch

from tests.support.ranks import ranks
from tests.support.runs import PLAIN, build, start
from zerotune.backend.plain import carried_scale
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import detect_platform

BF16 = attrs.evolve(PLAIN, precision="bf16", micro_batch=2)


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))


class Named(torch.nn.Module):
    """Return results in a dict, one of them not a floating-point number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"sample": (self.inner(x),), "index": x.argmax(-1)}


@ranks(1)
def test_the_plain_engine_trains_without_accelerate_and_deepspeed(monkeypatch):
    for package in ("accelerate", "deepspeed"):
        # Every further import fails.
        monkeypatch.setitem(sys.modules, package, None)
    with start(BF16, small()) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            assert engine.step().applied


@ranks(1)
def test_the_forward_pass_computes_in_the_plans_precision_and_returns_fp32():
    with (
        start(BF16, Named()) as engine,
        start(attrs.evolve(BF16, precision="fp32"), Named()) as wide,
    ):
        seen = []
        engine.module.inner[0].register_forward_hook(lambda *call: seen.append(call[2].dtype))
        x = torch.ones(2, 4)
        trained = engine(x)
        with engine.evaluating():
            evaluated = engine(x)
        assert seen == [torch.bfloat16] * 2
        for found in (trained, evaluated):
            assert found["sample"][0].dtype == torch.float32
            assert found["index"].dtype == torch.int64
        assert torch.equal(trained["sample"][0], evaluated["sample"][0])
        assert not torch.equal(trained["sample"][0], wide(x)["sample"][0]), "each its own precision"
        assert "bfloat16" in engine.explain()


def start_fp16(*, clipping: float) -> Any:
    plan = DeepSpeedPlan.build(
        stage=0, precision="fp16", micro_batch_size=2, gradient_clipping=clipping,
        gradient_accumulation_steps=2, optimizer={"type": "SGD", "params": {"lr": 1e-2}},
    )  # fmt: skip
    platform = attrs.evolve(detect_platform(log=False), fp16=True)
    return build(small(), plan, platform=platform, deepspeed=False)


@ranks(1)
def test_fp16_gradients_are_unscaled_for_a_script_that_clips_them():
    clipped = 0
    with start_fp16(clipping=0.0) as engine, start_fp16(clipping=0.1) as reference:
        for step in range(8):
            for each in (engine, reference):
                for micro in range(2):
                    each.backward(each(torch.full((2, 4), step + 1.0)).square().mean())
                    if each is engine and micro == 1:
                        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
                    if step == 6 and micro == 1:
                        each.discard()
                    else:
                        outcome = each.step()
            clipped += outcome.applied and outcome.grad_norm > 0.1
            assert engine.state == reference.state
            pairs = zip(engine.module.parameters(), reference.module.parameters(), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), step
    assert clipped > 2


@pytest.mark.parametrize(
    "saved", [{}, {"scale": 8.0}, {"scale": 8.0, "_growth_tracker": 3, "growth_factor": 0, "x": 1}]
)
def test_a_loss_scale_is_restored_whatever_else_was_saved(saved):
    scaler = torch.amp.GradScaler(device="cpu", init_scale=4.0)
    fresh = scaler.state_dict()
    scaler.load_state_dict(carried_scale(saved, fresh=fresh))
    assert scaler.get_scale() == saved.get("scale", 4.0)
    after = scaler.state_dict()
    assert after["_growth_tracker"] == saved.get("_growth_tracker", 0)
    assert after["growth_factor"] == fresh["growth_factor"]
