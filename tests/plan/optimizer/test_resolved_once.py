"""A resolved plan names its optimizer and schedule; only a run's length is left to the start."""

from __future__ import annotations

import attrs
import pytest

from zerotune import DeepSpeedPlan, OptimizerResolver, Platform, RunFacts
from zerotune.errors import MissingDependencyError, OptimizerError, UnresolvedPlanError
from zerotune.plan.facts import ModelFacts
from zerotune.plan.optimizer.capability import OPTIONAL_PACKAGES
from zerotune.plan.optimizer.choices import BY_RUN
from zerotune.plan.optimizer.groups import ParameterGroups

CUDA = Platform.synthetic("cuda")
LENGTH = "scheduler.params.total_num_steps"


def decaying(**params):
    return DeepSpeedPlan.build(
        lr=1e-4, scheduler={"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, **params}}
    )


@pytest.mark.parametrize("written", [{}, {"total_num_steps": "auto"}])
def test_the_length_of_an_unknown_run_is_left_to_the_start(written):
    resolved = decaying(**written).resolve(platform=CUDA)
    assert resolved.scheduler.params["total_num_steps"] == BY_RUN
    assert [each.after for each in resolved.decisions if each.key == LENGTH] == [BY_RUN]
    for start in (lambda: resolved.for_run(None), lambda: OptimizerResolver().resolve(resolved)):
        with pytest.raises(OptimizerError, match="total_steps") as caught:
            start()
        assert caught.value.key == LENGTH
    with pytest.raises(UnresolvedPlanError, match="total_steps") as caught:
        resolved.to_deepspeed()
    assert caught.value.key == LENGTH


def test_the_start_fills_in_the_length_of_the_run():
    run = RunFacts(total_steps=100)
    plan = decaying(total_num_steps="auto")
    started = plan.resolve(platform=CUDA).for_run(run)
    known = plan.resolve(platform=CUDA, run=run)
    assert started.scheduler == known.scheduler
    assert started.to_deepspeed() == known.to_deepspeed()
    assert known.for_run(None) == known
    short = plan.resolve(platform=CUDA).for_run(RunFacts(total_steps=5))
    assert [each.severity for each in short.decisions if each.key == LENGTH][-1] == "warning"


def test_a_written_length_is_not_replaced_by_that_of_the_run():
    resolved = decaying(total_num_steps=50).resolve(platform=CUDA)
    assert resolved.for_run(RunFacts(total_steps=100)) == resolved


def test_a_missing_package_is_a_warning_of_the_plan_and_an_error_of_the_start(monkeypatch):
    here = "zerotune.plan.optimizer.capability.find_spec"
    monkeypatch.setattr(here, lambda name: None if name in OPTIONAL_PACKAGES else object())
    plan = DeepSpeedPlan.build(stage=2, optimizer="AdamW8bit", lr=1e-4)
    resolved = plan.resolve(platform=CUDA)
    assert resolved.optimizer.implementation == "AdamW8bit"
    (decision,) = [each for each in resolved.decisions if each.key == "optimizer.type"]
    assert (decision.severity, "bitsandbytes" in decision.reason) == ("warning", True)
    with pytest.raises(MissingDependencyError, match="pip install"):
        resolved.for_run(None)


def test_errors_of_rules_optimizer_and_schedule_are_found_together():
    config = {
        "optimizer": {"type": "AdaBelief"},
        "scheduler": {"type": "WarmupLR", "params": {"warm": 3}},
    }
    with pytest.raises(OptimizerError) as caught:
        DeepSpeedPlan.from_dict(config).resolve(platform=CUDA)
    assert [each.key for each in caught.value.each()] == ["optimizer.type", "scheduler.params.warm"]


def test_a_resolver_chooses_while_a_plan_is_resolved():
    model = ModelFacts.from_shapes([("a.weight", (4, 4)), ("a.bias", (4,))])
    resolver = OptimizerResolver(groups=ParameterGroups.no_decay())
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", optimizer="Lion")
    resolved = plan.resolve(platform=CUDA, model=model, resolver=resolver)
    assert [group.name for group in resolved.optimizer.groups] == ["no decay", "rest"]
    assert resolver.resolve(resolved) == attrs.evolve(resolved)


def test_an_optimizer_that_the_host_engine_cannot_run_is_known_when_the_engine_is_chosen():
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", optimizer="SGD", lr=1e-2)
    resolved = plan.resolve(platform=CUDA, engine="host")
    assert resolved.engine == "deepspeed"
    (decision,) = [each for each in resolved.decisions if each.key == "engine"]
    assert "cannot run SGD" in decision.reason


def test_the_optimizer_follows_where_the_update_can_run():
    plan = DeepSpeedPlan.build(stage=2, offload="cpu", precision="bf16", optimizer="Adafactor")
    assert plan.resolve(platform=CUDA, update="device").optimizer.name == "Adafactor"
    other = DeepSpeedPlan.build(stage=2, offload="cpu", precision="fp32", optimizer="Adafactor")
    with pytest.raises(OptimizerError, match="whole matrices"):
        other.resolve(platform=CUDA, update="device")
