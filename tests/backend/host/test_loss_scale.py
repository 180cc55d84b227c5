"""fp16 in the host engine: steps are skipped, scaled and clipped as in DeepSpeed."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from tests.backend.host.streaming import Run, contents, differences, loss_of, make_model
from tests.support.ranks import ranks
from zerotune.backend.engine import EngineState
from zerotune.backend.step.kernel import HostStepOp, load_host_step
from zerotune.ema import EMAShadow
from zerotune.plan.context import Streaming
from zerotune.plan.optimizer.resolver import OptimizerResolver
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.platform import detect_platform
from zerotune.training.setup import build_engine

pytestmark = [pytest.mark.deepspeed, ranks(1)]

RUN = Run(family="web", precision="fp16")
GROWING = {"initial_scale_power": 22, "loss_scale_window": 2, "hysteresis": 1}


def start(clipping: float, scaling: dict[str, Any], **how: Any) -> Any:
    from deepspeed.accelerator import get_accelerator

    plan = DeepSpeedPlan.from_dict({
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "fp16": {"enabled": True, **scaling},
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.01}},
    })  # fmt: skip
    resolved = plan.resolve(platform=attrs.evolve(detect_platform(), fp16=True), **how)
    with pytest.MonkeyPatch.context() as patch:
        # torch computes in fp16 on any CPU, but DeepSpeed requires one with fast fp16.
        patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda *_: True)
        return build_engine(model=make_model(RUN), plan=OptimizerResolver().resolve(resolved))


def needs_fp16() -> None:
    if not load_host_step().knows(torch.float16):
        pytest.skip("the compiler of the op host_step does not support fp16")


def train(clipping: float, scaling: dict[str, Any], **how: Any) -> dict[str, Any]:
    kept: dict[str, Any] = {"losses": [], "norms": [], "applied": []}
    with start(clipping, scaling, **how) as engine:
        ema = EMAShadow(decay=0.5).attach(engine)
        for step in range(20):
            loss = loss_of(RUN, engine, step)
            engine.backward(loss)
            outcome = engine.step()
            if outcome.applied:
                ema.step()
                kept["norms"].append(outcome.grad_norm)
            kept["losses"].append(float(loss.detach()))
            kept["applied"].append(outcome.applied)
        kept["contents"], kept["state"] = contents(engine, ema), engine.state
        kept["engine"], kept["dtype"] = type(engine).__name__, engine.dtype
    return kept


@pytest.mark.parametrize(
    ("clipping", "scaling"), [(0.5, GROWING), (0.0, GROWING), (0.5, {"loss_scale": 768.0})]
)
def test_losses_and_skipped_steps_are_those_of_deepspeed(clipping, scaling):
    needs_fp16()
    theirs = train(clipping, scaling, engine="deepspeed")
    assert (theirs["engine"], theirs["dtype"]) == ("DeepSpeedEngine", torch.float16)
    skipped = [index for index, applied in enumerate(theirs["applied"]) if not applied]
    assert (len(skipped) > 2) is ("loss_scale" not in scaling)
    for streamed in (None, Streaming(window=2)):
        mine = train(clipping, scaling, streamed=streamed)
        assert mine["engine"] == "HostEngine"
        assert not differences(mine, theirs)
        assert (mine["applied"], mine["state"]) == (theirs["applied"], theirs["state"])


def test_deepspeed_trains_where_the_kernels_cannot_read_fp16(monkeypatch):
    knows = HostStepOp.knows
    monkeypatch.setattr(HostStepOp, "knows", lambda op, d: d != torch.float16 and knows(op, d))
    with start(0.5, GROWING) as engine:
        assert type(engine).__name__ == "DeepSpeedEngine"
        assert "does not support fp16" in engine.explain()


def test_the_loss_scale_is_resumed():
    needs_fp16()
    with start(0.5, GROWING) as engine:
        scale = engine.state.loss_scaler
        assert scale["cur_scale"] == 2.0**22
        before = EngineState(
            global_step=5, micro_step=5, skipped_steps=2, scheduler={},
            loss_scaler={**scale, "cur_scale": 64.0, "cur_iter": 5},
        )  # fmt: skip
        engine.load_state(before)
        assert engine.state == before
