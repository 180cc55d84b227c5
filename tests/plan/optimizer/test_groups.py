"""Ordered patterns over parameter names: the first match wins, and no parameter is lost."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.errors import InvalidValueError, OptimizerError, UnknownKeyError
from zerotune.optim import OptimizerResolver, ParameterGroup, ParameterGroups
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.facts import ModelFacts, ParameterFacts
from zerotune.plan.optimizer.groups import matches
from zerotune.platform import Platform

SHAPES = [
    ("unet.conv_in.weight", (8, 4, 3, 3)),
    ("unet.conv_in.bias", (8,)),
    ("unet.norm.weight", (8,)),
    ("unet.attn.to_q.weight", (8, 8)),
    ("text.embed.weight", (16, 8)),
    ("text.head.bias", (3,)),
]


@pytest.fixture
def resolve(make_plan):
    def run(groups, *, shapes=SHAPES, frozen=(), optimizer="AdamW", params=None, **situation):
        facts = ModelFacts(
            parameters=[
                ParameterFacts(name=name, shape=shape, trainable=name not in frozen)
                for name, shape in shapes
            ]
        )
        plan = attrs.evolve(
            make_plan(optimizer, {"lr": 1e-3, "weight_decay": 0.1} | (params or {}), **situation),
            model=facts,
        )
        return OptimizerResolver(groups=groups).resolve(plan)

    return run


def members(resolution):
    return {group.name: list(group.parameters) for group in resolution.optimizer.groups}


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("unet", "unet.conv_in.weight", True),
        ("unet", "unet2.conv_in.weight", False),
        ("unet.conv_in", "unet.conv_in.bias", True),
        ("unet.conv_in.bias", "unet.conv_in.bias", True),
        ("*.bias", "a.b.bias", True),
        ("*.bias", "bias", False),
        ("unet.*.weight", "unet.a.b.weight", True),
        ("re:lora_[AB]", "x.lora_A.default.weight", True),
        (r"re:^attn", "x.attn", False),
    ],
)
def test_a_pattern_may_be_a_subtree_a_glob_or_a_regular_expression(pattern, name, expected):
    assert matches(pattern, name) is expected


def test_no_decay_finds_norms_and_biases_by_their_dimension(resolve):
    groups = resolve(ParameterGroups.no_decay()).optimizer.groups
    assert [group.name for group in groups] == ["no decay", "rest"]
    first, rest = groups
    assert first.parameters == ("unet.conv_in.bias", "unet.norm.weight", "text.head.bias")
    assert (first.numel, rest.numel) == (19, 288 + 64 + 128)
    assert first.params == {"lr": 1e-3, "weight_decay": 0.0}
    assert rest.params == {"lr": 1e-3, "weight_decay": 0.1}


def test_two_parts_have_their_own_rates_and_no_decay_on_norms(resolve):
    groups = ParameterGroups.per_part(
        {"unet": {"lr": 1e-5}, "text": {"lr": 1e-6, "weight_decay": 0.3}}
    ).without_decay_on_norms_and_biases()
    chosen = {group.name: group for group in resolve(groups).optimizer.groups}
    assert {name: group.params for name, group in chosen.items()} == {
        "unet, no decay": {"lr": 1e-5, "weight_decay": 0.0},
        "unet": {"lr": 1e-5, "weight_decay": 0.1},
        "text, no decay": {"lr": 1e-6, "weight_decay": 0.0},
        "text": {"lr": 1e-6, "weight_decay": 0.3},
    }
    assert chosen["text"].parameters == ("text.embed.weight",)


def test_a_group_may_scale_the_learning_rate(resolve):
    shapes = [("q.lora_A.default.weight", (4, 8)), ("q.lora_B.default.weight", (8, 4))]
    up = ParameterGroup(name="up", patterns="re:lora_B", lr_scale=16)
    chosen = resolve(ParameterGroups(rules=[up]), shapes=shapes).optimizer.groups
    assert [(group.name, group.params["lr"]) for group in chosen] == [("up", 16e-3), ("rest", 1e-3)]


def test_the_first_matching_rule_wins(resolve):
    rules = [
        ParameterGroup(name="biases", patterns="*.bias", params={"lr": 1.0}),
        ParameterGroup(name="unet", patterns="unet", params={"lr": 2.0}),
    ]
    assert members(resolve(ParameterGroups(rules=rules))) == {
        "biases": ["unet.conv_in.bias", "text.head.bias"],
        "unet": ["unet.conv_in.weight", "unet.norm.weight", "unet.attn.to_q.weight"],
        "rest": ["text.embed.weight"],
    }
    swapped = members(resolve(ParameterGroups(rules=rules[::-1])))
    assert swapped["biases"] == ["text.head.bias"]
    assert "unet.conv_in.bias" in swapped["unet"]


@given(st.lists(st.sampled_from(["unet", "text", "*.bias", "*norm*", "re:q"]), unique=True))
def test_every_trainable_parameter_is_in_exactly_one_group(patterns):
    from tests.plan.optimizer.conftest import resolved_plan

    plan = attrs.evolve(
        resolved_plan("AdamW", {"lr": 1e-3}),
        model=ModelFacts.from_shapes(SHAPES),
    )
    rules = [ParameterGroup(name=p, patterns=p, optional=True) for p in patterns]
    chosen = OptimizerResolver(groups=ParameterGroups(rules=rules)).resolve(plan).optimizer.groups
    found = [name for group in chosen for name in group.parameters]
    assert sorted(found) == sorted(name for name, _ in SHAPES)
    assert sum(group.numel for group in chosen) == plan.model.numel


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        ({"patterns": "unet.attn.to_k"}, OptimizerError, r"did you mean unet\.attn\.to_q"),
        ({"patterns": "unet.attn", "max_ndim": 1}, OptimizerError, "max_ndim excludes"),
        ({"params": {"weight_decai": 0.0}}, UnknownKeyError, "did you mean weight_decay"),
        ({"params": {"bias_correction": False}}, InvalidValueError, "one value .* for all groups"),
    ],
)
def test_a_rule_that_does_not_fit_the_model_or_optimizer_is_refused(resolve, rule, error, message):
    with pytest.raises(error, match=message):
        resolve(ParameterGroups(rules=[ParameterGroup(name="g", **({"patterns": "unet"} | rule))]))


def test_a_group_whose_parameters_earlier_rules_took_is_an_error(resolve):
    rules = [ParameterGroup(name="all"), ParameterGroup(name="late", patterns="unet")]
    with pytest.raises(OptimizerError, match="earlier groups match all"):
        resolve(ParameterGroups(rules=rules))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patterns": "re:("}, "not a valid regular expression"),
        ({"patterns": ()}, "matches no parameter"),
        ({"name": " "}, "needs a name"),
        ({"lr_scale": 0}, "must be a number above 0"),
        ({"use_muon": "yes"}, "not a boolean"),
        ({"lr_scale": 2.0, "params": {"lr": 1.0}}, "are both set"),
    ],
)
def test_an_invalid_rule_is_refused(change, message):
    with pytest.raises(InvalidValueError, match=message):
        ParameterGroup(**{"name": "g"} | change)


def test_group_names_must_differ():
    for names in (("a", "a"), ("rest",)):
        with pytest.raises(InvalidValueError, match="group"):
            ParameterGroups(rules=[ParameterGroup(name=name) for name in names])


def test_groups_require_the_model(make_plan):
    plan = attrs.evolve(make_plan("AdamW", {"lr": 1e-3}), model=None)
    with pytest.raises(OptimizerError, match="from_module"):
        OptimizerResolver(groups=ParameterGroups.no_decay()).resolve(plan)


def test_muon_without_a_model_leaves_its_groups_open_and_does_not_start():
    plan = DeepSpeedPlan.build(optimizer="Muon", lr=1e-3).resolve(
        platform=Platform.synthetic("cuda")
    )
    assert (plan.optimizer.name, plan.optimizer.groups) == ("Muon", ())
    (decision,) = [one for one in plan.decisions if one.key == "optimizer.groups"]
    assert decision.after == "open"
    for start in (OptimizerResolver().resolve, lambda plan: plan.for_run(None)):
        with pytest.raises(OptimizerError, match="from_module"):
            start(plan)


def test_explain_and_the_decision_show_sizes_and_arguments(resolve, decisions_for):
    resolution = resolve(ParameterGroups.no_decay())
    line = "no decay: 3 parameters, 19 elements, lr 0.001, weight_decay 0"
    assert line in resolution.explain()
    (decision,) = decisions_for(resolution, "optimizer.groups")
    assert decision.after == ("no decay", "rest")
    assert line in decision.reason


def test_different_learning_rates_require_a_schedule_that_supports_groups(resolve, decisions_for):
    same = resolve(ParameterGroups.no_decay(), scheduler="auto")
    assert same.scheduler.source == "deepspeed"
    parts = resolve(ParameterGroups.per_part({"unet": {"lr": 1e-5}}), scheduler="auto")
    assert parts.scheduler.source == "zerotune"
    assert "scaled for each group" in decisions_for(parts, "scheduler.type")[-1].reason


def test_prodigy_refuses_groups(resolve, monkeypatch):
    monkeypatch.setattr("zerotune.plan.optimizer.capability.find_spec", lambda _name: True)
    with pytest.raises(OptimizerError, match="one rate from all weights"):
        resolve(ParameterGroups.no_decay(), optimizer="Prodigy", params={"lr": 1.0})
