from __future__ import annotations

import logging

import pytest

from tests.support.needs import needs
from zerotune.errors import (
    InvalidValueError,
    OptimizerError,
    PlanConflictError,
    UnknownKeyError,
    UnresolvedPlanError,
)
from zerotune.optim import OptimizerResolver
from zerotune.plan.context import RunFacts
from zerotune.plan.optimizer.choose import BY_CHOICE
from zerotune.plan.optimizer.groups import ParameterGroups
from zerotune.plan.plan import DeepSpeedPlan

ADAMW = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


@pytest.fixture
def resolve(make_plan):
    def run(*args, **kwargs):
        return OptimizerResolver().resolve(make_plan(*args, **kwargs))

    return run


def test_a_plan_that_is_not_resolved_is_refused():
    with pytest.raises(UnresolvedPlanError, match="not resolved yet"):
        OptimizerResolver().resolve(DeepSpeedPlan.build(stage=2))


def test_the_explanation_names_class_arguments_and_decisions(make_plan):
    plan = make_plan("AdamW", {"lr": "auto"}, run=RunFacts(lr=3e-4))
    text = OptimizerResolver.explain(plan)
    optimizer, scheduler = text.splitlines()[1:3]
    assert optimizer.startswith("  optimizer       AdamW(lr=0.0003, ")
    assert optimizer.endswith(f"run by {plan.optimizer.implementation}")
    assert scheduler.endswith("the learning rate is constant")
    assert "optimizer.params.lr: 'auto' -> 0.0003" in text
    assert "zero_optimization" not in text


# --- the class that updates -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "place", "implementation", "source", "decay"),
    [
        ("AdamW", {}, {"offload": "none"}, "FusedAdam", "deepspeed", "decoupled"),
        ("AdamW", {}, {"offload": "cpu"}, "DeepSpeedCPUAdam", "deepspeed", "decoupled"),
        ("AdamW", {}, {"stage": 3, "offload": "nvme"}, "DeepSpeedCPUAdam", "deepspeed",
         "decoupled"),
        ("AdamW", {"torch_adam": True}, {"offload": "cpu"}, "AdamW", "deepspeed", "decoupled"),
        ("AdamW", {}, {"deepspeed": False}, "AdamW", "torch", "decoupled"),
        ("Adam", {}, {"offload": "none"}, "FusedAdam", "deepspeed", "decoupled"),
        ("Adam", {"adam_w_mode": False}, {"offload": "none"}, "FusedAdam", "deepspeed", "l2"),
        ("Adam", {"adam_w_mode": False}, {}, "DeepSpeedCPUAdam", "deepspeed", "l2"),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, {}, "Adam", "deepspeed", "l2"),
        ("Adam", {"torch_adam": True}, {}, "AdamW", "deepspeed", "decoupled"),
        ("Adam", {}, {"deepspeed": False}, "AdamW", "torch", "decoupled"),
        ("Adam", {"adam_w_mode": False}, {"deepspeed": False}, "Adam", "torch", "l2"),
        ("FusedAdam", {"adam_w_mode": False}, {}, "DeepSpeedCPUAdam", "deepspeed", "l2"),
        ("cpuadam", {"adamw_mode": False}, {"offload": "none"}, "FusedAdam", "deepspeed", "l2"),
        ("Adagrad", {}, {"offload": "none"}, "Adagrad", "deepspeed", None),
        ("Adagrad", {}, {}, "DeepSpeedCPUAdagrad", "deepspeed", None),
        ("Adagrad", {}, {"deepspeed": False}, "Adagrad", "torch", None),
        ("Lion", {}, {}, "DeepSpeedCPULion", "deepspeed", None),
        ("Lion", {}, {"accelerator": "cuda", "offload": "none"}, "FusedLion", "deepspeed", None),
        ("SGD", {}, {}, "SGD", "torch", None),
        ("SGD", {}, {"deepspeed": False}, "SGD", "torch", None),
        ("NAdam", {}, {}, "NAdam", "torch", "l2"),
        ("RAdam", {"decoupled_weight_decay": True}, {}, "RAdam", "torch", "decoupled"),
    ],
)  # fmt: skip
def test_each_layout_gets_its_implementation(
    resolve, name, params, place, implementation, source, decay
):
    choice = resolve(name, {"lr": 1e-3, **params}, **place).optimizer
    assert (choice.implementation, choice.source, choice.weight_decay_mode) == (
        implementation,
        source,
        decay,
    )


def test_zenflow_replaces_the_cpu_optimizer(resolve):
    zero = {"zenflow": {"topk_ratio": 0.1}}
    choice = resolve("AdamW", ADAMW, zero=zero).optimizer
    assert choice.implementation == "ZenFlowCPUAdam"


def test_arguments_are_complete_and_unchanged(resolve):
    assert dict(resolve("AdamW", ADAMW, offload="none").optimizer.params) == {
        "lr": 1e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "bias_correction": True,
        "adam_w_mode": True,
        "torch_adam": False,
    }
    offloaded = resolve("AdamW", ADAMW).optimizer.params
    assert offloaded["fp32_optimizer_states"] is True
    assert dict(resolve("AdamW", ADAMW, deepspeed=False).optimizer.params) == {
        "lr": 1e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "amsgrad": False,
    }
    assert dict(resolve("Adagrad", {"lr": 0.01}).optimizer.params) == {
        "lr": 0.01,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "fp32_optimizer_states": True,
    }


def test_a_complete_adamw_is_settled_without_a_warning(resolve):
    resolution = resolve("AdamW", ADAMW, run=RunFacts(lr=1e-4, total_steps=2000))
    assert [item for item in resolution.decisions if item.severity == "warning"] == []


# --- defaults and automatic values ------------------------------------------------------------


WARMUP = {"warmup_max_lr": 2e-5, "warmup_num_steps": 10}
LR, MODE = "optimizer.params.lr", "optimizer.params.adam_w_mode"


@pytest.mark.parametrize(
    ("chosen", "more", "key", "change", "severity", "words"),
    [
        ((), {}, "optimizer.type", (None, "AdamW"), "note", ""),
        ((), {}, LR, (None, 1e-4), "note", ""),
        (("AdamW", {"lr": "auto"}), {}, LR, ("auto", 1e-4), "note", ""),
        (
            ("AdamW", {"weight_decay": "Auto"}), {},
            "optimizer.params.weight_decay", ("auto", 0.01), "note", "",
        ),
        (("AdamW", {"weight_decay": 0.1}), {}, LR, (None, 1e-4), "warning", ""),
        # The peak of the schedule takes the place of a missing learning rate.
        (
            ("AdamW", {"weight_decay": 0.1}),
            {"scheduler": "WarmupLR", "scheduler_params": WARMUP},
            LR, (None, 2e-5), "note", "scheduler.params.warmup_max_lr",
        ),
        # A value wins over the run's.
        (("AdamW", ADAMW), {"run": RunFacts(lr=5e-5)}, LR, (5e-5, 1e-4), "warning", ""),
        (("AdamW", {"lr": "1e-4"}), {}, LR, ("1e-4", 1e-4), "note", ""),
        *(
            (
                (written, ADAMW), {"offload": offload},
                "optimizer.type", (written, "AdamW"), "warning", f"runs as {cls} here",
            )
            for written in ("fusedadam", "cpuadam")
            for offload, cls in (("none", "FusedAdam"), ("cpu", "DeepSpeedCPUAdam"))
        ),
        (("adam_w", ADAMW), {}, "optimizer.type", ("adam_w", "AdamW"), "note", ""),
        # Adam's weight decay is decoupled in DeepSpeed, and always that of AdamW.
        (("Adam", ADAMW), {}, MODE, (None, True), "warning", "adam_w_mode false"),
        (("Adam", {"lr": 1e-4}), {}, MODE, (None, True), "note", ""),
        (("AdamW", {**ADAMW, "adam_w_mode": False}), {}, MODE, (False, True), "warning", ""),
    ],
)  # fmt: skip
def test_a_value_that_the_file_does_not_state_so_is_recorded(
    resolve, decisions_for, chosen, more, key, change, severity, words
):
    resolution = resolve(*chosen, **more)
    (decision,) = decisions_for(resolution, key)
    assert (decision.before, decision.after) == change
    assert decision.severity == severity
    assert words in decision.reason
    section, _, name = key.rpartition(".params.")
    if section:
        assert getattr(resolution, section).params[name] == change[1]
    else:
        assert resolution.optimizer.name == change[1]


def test_what_the_file_states_needs_no_decision(resolve, decisions_for):
    resolution = resolve("AdamW", ADAMW, run=RunFacts(lr=5e-5, betas=(0.9, 0.999)))
    for key in ("optimizer.type", "optimizer.params.betas"):
        assert decisions_for(resolution, key) == []


def test_a_name_alone_uses_zerotunes_defaults(resolve):
    params = resolve("AdamW").optimizer.params
    assert params == resolve().optimizer.params
    assert params["weight_decay"] == 0.01


def test_omitted_arguments_keep_deepspeeds_defaults(resolve, decisions_for):
    """DeepSpeed's AdamW has no weight decay by default, unlike torch's."""
    resolution = resolve("AdamW", {"lr": 1e-4})
    assert resolution.optimizer.params["weight_decay"] == 0.0
    (decision,) = decisions_for(resolution, "optimizer.params")
    assert decision.after["weight_decay"] == 0.0


def test_auto_is_filled_from_the_run(resolve, decisions_for):
    run = RunFacts(lr=3e-5, betas=(0.95, 0.98), eps=1e-7, weight_decay=0.1)
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    resolution = resolve("AdamW", auto, run=run)
    params = resolution.optimizer.params
    assert params["lr"] == 3e-5
    assert params["betas"] == (0.95, 0.98)
    assert params["eps"] == 1e-7
    assert params["weight_decay"] == 0.1
    for key in auto:
        (decision,) = decisions_for(resolution, f"optimizer.params.{key}")
        assert (decision.before, decision.after) == ("auto", params[key])
        assert f"the run ({key})" in decision.reason


# --- names -------------------------------------------------------------------------------------


# --- Adam's decay ------------------------------------------------------------------------------


def test_the_plain_engine_keeps_adams_decay_mode(resolve, decisions_for):
    resolution = resolve("Adam", ADAMW, deepspeed=False)
    assert resolution.optimizer.implementation == "AdamW"
    assert "adam_w_mode" not in resolution.optimizer.params
    (decision,) = decisions_for(resolution, "optimizer.params.adam_w_mode")
    assert decision.severity == "warning"


# --- optimizers that cannot run --------------------------------------------------------------


REFUSED = {"zero_allow_untested_optimizer": False}
"""Restricts ZeRO to the optimizers that DeepSpeed has tested."""


@pytest.mark.parametrize(
    ("name", "place", "why"),
    [
        ("Lion", {"offload": "none", **REFUSED}, "zero_allow_untested_optimizer"),
        ("Adafactor", {}, "whole matrices"),
        ("Lamb", {}, "norms of whole parameters"),
    ],
)
def test_an_optimizer_that_cannot_run_is_refused_with_an_alternative(resolve, name, place, why):
    with pytest.raises(OptimizerError, match=why) as error:
        resolve(name, {"lr": 1e-5}, **place)
    assert (error.value.key, error.value.value) == ("optimizer.type", name)
    assert error.value.edits == ({"": "AdamW"},)


def test_a_one_bit_optimizer_is_refused_by_a_rule(resolve):
    with pytest.raises(PlanConflictError) as error:
        resolve("OneBitAdam", {"lr": 1e-5}, offload="none")
    assert (error.value.key, error.value.value) == ("optimizer.type", "OneBitAdam")
    assert "AdamW" in error.value.fix


def test_an_optional_package_is_never_replaced_by_adamw(resolve):
    needs("prodigyopt", may_lack="an extra, which stands on torch")
    with pytest.raises(OptimizerError, match="Prodigy at stage 2"):
        resolve("Prodigy", {"lr": 1.0}, stage=3)


def test_a_missing_optional_package_names_the_extra(resolve, monkeypatch):
    from zerotune.errors import MissingDependencyError

    monkeypatch.setattr("zerotune.plan.optimizer.capability.find_spec", lambda _name: None)
    with pytest.raises(MissingDependencyError, match=r"zerotune\[optimizers\]"):
        resolve("prodigy", {"lr": 1.0})


def test_using_zerotunes_own_implementation_is_a_recorded_decision(resolve, decisions_for):
    resolution = resolve("Lion", {"lr": 1e-5}, offload="none")
    assert (resolution.optimizer.implementation, resolution.optimizer.source) == (
        "Lion",
        "zerotune",
    )
    (decision,) = decisions_for(resolution, "optimizer.implementation")
    assert decision.after == "zerotune's Lion"
    (owner,) = decisions_for(resolution, decision.reason.split()[-1])
    assert "has only a CUDA kernel" in owner.reason


def test_an_optimizer_that_sets_its_own_rate_gets_no_schedule_unless_asked(resolve, monkeypatch):
    monkeypatch.setattr("zerotune.plan.optimizer.capability.find_spec", lambda _name: True)
    assert resolve("Prodigy", {"lr": 1.0}).scheduler is None
    assert resolve("Prodigy", {"lr": 1.0}, scheduler="constant").scheduler.name == "constant"


def test_a_torch_optimizer_under_zero_records_the_changed_keys(resolve, decisions_for):
    resolution = resolve("SGD", {"lr": 0.1, "momentum": 0.9})
    (decision,) = decisions_for(resolution, "zero_allow_untested_optimizer")
    assert (decision.after, decision.severity) == (True, "warning")
    (decision,) = decisions_for(resolution, "zero_force_ds_cpu_optimizer")
    assert decision.after is False
    asked = resolve("SGD", {"lr": 0.1}, zero_allow_untested_optimizer=True, offload="none")
    assert decisions_for(asked, "zero_allow_untested_optimizer") == []


# --- arguments that do not belong ---------------------------------------------------------------


def test_arguments_that_the_optimizer_does_not_have_are_refused(resolve):
    for name, key in (("Adagrad", "betas"), ("AdamW", "wieght_decay")):
        with pytest.raises(UnknownKeyError) as error:
            resolve(name, {"lr": 1e-4, key: 0.1})
        assert error.value.key == f"optimizer.params.{key}"
    assert "did you mean weight_decay" in error.value.fix


def test_gradient_clipping_in_the_optimizer_is_refused_with_the_right_key(resolve):
    with pytest.raises(PlanConflictError, match="gradient_clipping"):
        resolve("AdamW", {"lr": 1e-4, "max_grad_norm": 1.0})


def test_an_argument_that_the_actual_class_lacks_is_dropped_with_a_warning(resolve, decisions_for):
    params = {"lr": 1e-4, "amsgrad": True}
    resolution = resolve("AdamW", params)
    assert "amsgrad" not in resolution.optimizer.params
    (decision,) = decisions_for(resolution, "optimizer.params.amsgrad")
    assert (decision.after, decision.severity) == (None, "warning")
    kept = resolve("AdamW", {**params, "torch_adam": True})
    assert kept.optimizer.params["amsgrad"] is True
    assert resolve("AdamW", params, deepspeed=False).optimizer.params["amsgrad"] is True


def test_maximize_runs_or_is_refused(resolve):
    params = {"lr": 1e-4, "maximize": True}
    with pytest.raises(OptimizerError, match="torch_adam"):
        resolve("AdamW", params)
    kept = resolve("AdamW", {**params, "torch_adam": True})
    assert kept.optimizer.params["maximize"] is True
    assert resolve("AdamW", params, deepspeed=False).optimizer.params["maximize"] is True
    assert "maximize" not in resolve("AdamW", {**params, "maximize": False}).optimizer.params


def test_conflicting_values_are_refused(resolve):
    with pytest.raises(InvalidValueError, match="nesterov"):
        resolve("SGD", {"lr": 0.1, "nesterov": True})
    assert resolve("SGD", {"lr": 0.1, "nesterov": True, "momentum": 0.9}).optimizer.params[
        "nesterov"
    ]
    with pytest.raises(InvalidValueError, match="etas"):
        resolve("Rprop", {"lr": 0.1, "etas": [1.2, 0.5]})


# --- a plan that is resolved already -------------------------------------------------------------


def test_a_second_choice_replaces_only_the_decisions_of_the_first(make_plan, caplog):
    plan = make_plan("Adam", ADAMW, scheduler="auto")
    resolver = OptimizerResolver(groups=ParameterGroups.no_decay())
    with caplog.at_level(logging.WARNING, logger="zerotune"):
        changed = resolver.resolve(plan)
    assert "adam_w_mode" in caplog.text
    of_choice, others = (
        [[d for d in one.decisions if (d.rule == BY_CHOICE) is chosen] for one in (plan, changed)]
        for chosen in (True, False)
    )
    assert others[0] == others[1]
    assert of_choice[0] != of_choice[1]


def test_decisions_survive_a_second_resolution(make_plan):
    """A settled choice that is written back as a configuration resolves to itself."""
    first = OptimizerResolver().resolve(make_plan("Adam", ADAMW, scheduler="auto"))
    again = OptimizerResolver().resolve(
        make_plan(
            first.optimizer.name,
            dict(first.optimizer.params),
            scheduler=first.scheduler.name,
            scheduler_params=dict(first.scheduler.params),
        )
    )
    assert again.optimizer == first.optimizer
    assert again.scheduler == first.scheduler
    assert [each for each in again.decisions if each.rule == BY_CHOICE] == []
