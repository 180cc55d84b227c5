"""Parameter groups reach the real engines intact, and stay intact under every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.models import HostileNet
from tests.support.ranks import ranks
from tests.support.runs import build
from zerotune.backend.optimizers.client import CurveScheduler, parameter_groups
from zerotune.errors import EngineError, VerificationError
from zerotune.optim import OptimizerResolver, ParameterGroup, ParameterGroups
from zerotune.plan.optimizer.choices import GroupChoice, OptimizerChoice, SchedulerChoice
from zerotune.plan.optimizer.curves import lr_at
from zerotune.plan.plan import DeepSpeedPlan
from zerotune.training.setup import build_engine

SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4},
}
STAGES = [(0, "none"), (2, "cpu"), (3, "cpu")]


def engine_with_groups(
    stage: int, offload: str, *, deepspeed: bool = True, optimizer: str = "AdamW", sub: int = 20
) -> Any:
    groups = ParameterGroups(
        rules=[ParameterGroup(name="second", patterns="second", lr_scale=0.1)]
    ).without_decay_on_norms_and_biases()
    zero = {"sub_group_size": sub} if stage == 3 else {}
    plan = DeepSpeedPlan.build(
        stage=stage,
        offload=offload,
        precision="fp32",
        optimizer={"type": optimizer, "params": {"lr": 1e-2, "weight_decay": 0.1}},
        scheduler=SCHEDULE,
        **zero,
    )
    resolver = OptimizerResolver(groups=groups)
    return build(HostileNet(scalar=False), plan, resolver=resolver, deepspeed=deepspeed)


def train(engine: Any, steps: int = 6) -> tuple[list[float], dict[str, list[float]]]:
    """Train; return losses and, for each group, the learning rate of every update."""
    losses, rates = [], {}
    generator = torch.Generator().manual_seed(engine.group.rank)
    for _ in range(steps):
        x = torch.randn(4, 7, 7, generator=generator)
        loss = (engine(x) - x).pow(2).mean()
        engine.backward(loss)
        inner = engine.deepspeed_engine.optimizer if hasattr(engine, "deepspeed_engine") else None
        held = inner or engine.optimizer
        for group in held.param_groups:
            rates.setdefault(group["name"], []).append(float(group["lr"]))
        engine.step()
        losses.append(float(loss.detach()))
    return losses, rates


@pytest.mark.deepspeed
@pytest.mark.parametrize("world_size", [2])
@ranks()
def test_groups_keep_learning_rate_and_weight_decay_under_every_stage(world_size: int) -> None:
    results = {}
    with engine_with_groups(0, "none", deepspeed=False) as engine:
        results["plain"] = (*train(engine), engine.explain())
    for stage, offload in STAGES:
        with engine_with_groups(stage, offload) as engine:
            results[f"z{stage}-{offload}"] = (*train(engine), engine.explain())
    expected_losses, _, _ = results["plain"]
    schedule = SchedulerChoice(name="WarmupLR", params=SCHEDULE["params"] | {"warmup_type": "log"})
    curve = [lr_at(schedule, step, 1e-2) for step in range(6)]
    for name, (losses, rates, text) in results.items():
        assert set(rates) == {"second, no decay", "second", "no decay", "rest"}, name
        for group, seen in rates.items():
            factor = 0.1 if group.startswith("second") else 1.0
            assert seen == pytest.approx([factor * lr for lr in curve], rel=1e-12), name
        assert losses == pytest.approx(expected_losses, rel=2e-5), name
        assert "optimizer.param_groups[0].weight_decay = 0.0, " in text, name
        assert "NOT" not in text, name


@pytest.mark.deepspeed
@ranks(1)
def test_missing_parameter_groups_are_detected(monkeypatch) -> None:
    import deepspeed

    original = deepspeed.initialize

    def initialize(**kwargs: Any) -> Any:
        groups = kwargs["model_parameters"]
        kwargs["model_parameters"] = [p for group in groups for p in group["params"]]
        return original(**kwargs)

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    with pytest.raises(VerificationError) as noticed:
        engine_with_groups(2, "none")
    assert "optimizer.param_groups should be 4 but is 1" in str(noticed.value)
    assert "weight_decay should be 0.0 but is 0.1" in str(noticed.value)


def choice_of(*names: str) -> OptimizerChoice:
    return OptimizerChoice(
        name="AdamW",
        params={"lr": 1e-3},
        implementation="AdamW",
        source="torch",
        groups=(GroupChoice(name="g", params={"lr": 1.0}, parameters=names, numel=1),),
    )


def test_groups_of_another_model_are_refused() -> None:
    named = list(torch.nn.Linear(2, 2).named_parameters())
    assert [
        len(group["params"]) for group in parameter_groups(choice_of("bias", "weight"), named)
    ] == [2]
    with pytest.raises(EngineError, match="the model does not train"):
        parameter_groups(choice_of("weight", "bias", "gone"), named)
    with pytest.raises(EngineError, match="is in no group"):
        parameter_groups(choice_of("weight"), named)


def test_a_groups_rate_is_a_constant_multiple_of_the_curve() -> None:
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=2.0)
    schedule = SchedulerChoice(
        name="WarmupLR",
        params={
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 2.0,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
        },
    )
    curve = CurveScheduler(optimizer=optimizer, choice=schedule, base_lr=2.0)
    for _ in range(4):
        curve.step()
    assert curve.get_lr() == [1.5, 0.375]
    curve.load_state_dict({"last_batch_iteration": 1})
    assert curve.get_lr() == [0.5, 0.125]
    assert curve.state_dict() == {"last_batch_iteration": 1}


def test_a_tensor_learning_rate_stays_the_same_tensor():
    rate = torch.tensor(2.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    schedule = SchedulerChoice(
        name="linear", params={"num_warmup_steps": 0, "num_training_steps": 4}
    )
    curve = CurveScheduler(optimizer=optimizer, choice=schedule, base_lr=2.0)
    curve.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert curve.get_lr() == [1.5]


def test_muon_refuses_to_train_with_a_plan_that_was_resolved_without_the_model():
    plan = DeepSpeedPlan.build(
        stage=0, precision="fp32", optimizer={"type": "Muon", "params": {"lr": 1e-2}}
    )
    with pytest.raises(EngineError, match="have not been chosen"):
        build_engine(model=HostileNet(scalar=False), plan=plan.resolve(deepspeed=False))
