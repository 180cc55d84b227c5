"""Parameters of Muon: hidden matrices, unless an earlier pattern matches."""

from __future__ import annotations

import pytest

from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.optim import OptimizerResolver, ParameterGroup, ParameterGroups
from zerotune.plan.facts import ModelFacts, ParameterFacts
from zerotune.plan.optimizer.muon import hidden_matrices

SHAPES = [
    ("conv_in.weight", (8, 3, 3, 3)),
    ("time_embedding.linear_1.weight", (32, 8)),
    ("down.resnet.norm1.weight", (8,)),
    ("down.resnet.conv1.weight", (8, 8, 3, 3)),
    ("down.attn.to_q.weight", (8, 8)),
    ("down.attn.to_q.bias", (8,)),
    ("conv_out.weight", (3, 8, 3, 3)),
]
HIDDEN = {"down.resnet.conv1.weight", "down.attn.to_q.weight"}


@pytest.fixture
def resolve(make_plan):
    def run(params=None, *, shapes=SHAPES, **resolver):
        model = ModelFacts.from_shapes(shapes) if shapes else None
        plan = make_plan("Muon", {"lr": 0.02} | (params or {}), model=model)
        return OptimizerResolver(**resolver).resolve(plan)

    return run


def groups_of(resolution):
    return {group.name: group for group in resolution.optimizer.groups}


def test_muon_gets_the_hidden_matrices_and_adam_the_rest(resolve, decisions_for):
    resolution = resolve()
    groups = groups_of(resolution)
    assert set(groups["muon"].parameters) == HIDDEN
    assert set(groups["adam"].parameters) == {name for name, _ in SHAPES} - HIDDEN
    assert groups["muon"].params == {"lr": 0.02, "use_muon": True}
    (decision,) = decisions_for(resolution, "optimizer.params.adam_lr")
    assert (decision.after, decision.severity) == (3e-4, "warning")
    assert groups["adam"].params == {"lr": 3e-4, "use_muon": False}


def test_using_muon_for_a_convolution_is_a_recorded_decision(resolve, decisions_for):
    (decision,) = decisions_for(resolve(), "use_muon")
    assert decision.after == "1 convolutions"


def test_groups_choose_between_muon_and_adam(resolve):
    rules = [
        ParameterGroup(name="first", patterns="*conv1*", use_muon=False),
        ParameterGroup(name="last", patterns="conv_out", use_muon=True),
    ]
    groups = groups_of(resolve(groups=ParameterGroups(rules=rules)))
    assert groups["rest, muon"].parameters == ("down.attn.to_q.weight",)
    assert groups["last, muon"].parameters == ("conv_out.weight",)
    assert groups["first, adam"].parameters == ("down.resnet.conv1.weight",)


def test_with_numeric_names_the_first_and_last_matrix_are_found_by_position():
    shapes = [("0.weight", (4, 4)), ("1.weight", (4, 4)), ("1.bias", (4,)), ("2.weight", (4, 4))]
    facts = [ParameterFacts(name=name, shape=shape) for name, shape in shapes]
    assert hidden_matrices(facts) == {"1.weight"}


def test_both_learning_rates_can_be_set(resolve):
    groups = groups_of(resolve({"muon_lr": 0.05, "adam_lr": 1e-3}))
    assert groups["muon"].params["lr"] == 0.05
    assert groups["adam"].params["lr"] == 1e-3


def test_custom_groups_are_split_too(resolve):
    groups = groups_of(resolve({"weight_decay": 0.1}, groups=ParameterGroups.no_decay()))
    assert set(groups) == {"no decay, adam", "rest, muon", "rest, adam"}
    assert groups["no decay, adam"].params["weight_decay"] == 0.0
    assert groups["rest, muon"].params["weight_decay"] == 0.1


def test_vectors_are_always_adams(resolve):
    every = ParameterGroup(name="every", use_muon=True)
    groups = groups_of(resolve(groups=ParameterGroups(rules=[every])))
    assert set(groups["every, adam"].parameters) == {
        name for name, shape in SHAPES if len(shape) < 2
    }


def test_other_optimizers_refuse_muons_switch(make_plan):
    group = ParameterGroup(name="every", use_muon=True)
    with pytest.raises(InvalidValueError) as caught:
        OptimizerResolver(groups=ParameterGroups(rules=[group])).resolve(make_plan("AdamW"))
    assert caught.value.key == "optimizer.groups.every.use_muon"


def test_a_model_without_hidden_matrices_is_an_error(resolve):
    with pytest.raises(OptimizerError, match="no parameter of this model is selected for Muon"):
        resolve(shapes=SHAPES[:1])
