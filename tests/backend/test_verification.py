"""The running configuration is compared with the requested one; a difference stops the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.ranks import ranks
from tests.support.runs import Case, start
from zerotune.backend.checks import Checks, weight_decay_mode
from zerotune.errors import EngineError, VerificationError
from zerotune.plan.optimizer.choices import OptimizerChoice, SchedulerChoice


def choice(**changes: Any) -> OptimizerChoice:
    params = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    return OptimizerChoice(
        name="AdamW",
        params=params | changes.pop("params", {}),
        implementation="AdamW",
        **{"source": "torch", "weight_decay_mode": "decoupled"} | changes,
    )


def adamw(**changes: Any) -> torch.optim.Optimizer:
    arguments = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], **arguments | changes)


def failures(optimizer: torch.optim.Optimizer, **kwargs: Any) -> set[str]:
    checks = Checks()
    checks.optimizer(choice(), optimizer, **{"scheduler": None} | kwargs)
    return {check.key for check in checks.failed}


def test_the_requested_optimizer_passes() -> None:
    assert failures(adamw()) == set()


def test_a_tensor_learning_rate_is_compared_in_fp32() -> None:
    assert failures(adamw(lr=torch.tensor(1e-3))) == set()
    assert failures(adamw(lr=torch.tensor(1.00001e-3))) == {"optimizer.lr"}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"lr": 1.1e-3}, "optimizer.lr"),
        ({"betas": (0.9, 0.99)}, "optimizer.betas"),
        ({"eps": 1e-7}, "optimizer.eps"),
        ({"weight_decay": 0.0}, "optimizer.weight_decay"),
    ],
)
def test_each_optimizer_argument_is_compared(change: dict[str, Any], key: str) -> None:
    assert failures(adamw(**change)) == {key}


def test_adam_with_l2_decay_does_not_pass_for_adamw() -> None:
    adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=1e-3, weight_decay=0.01)
    assert failures(adam) == {"optimizer.type", "optimizer.weight_decay_mode"}
    assert weight_decay_mode(adam) == "l2"


def test_the_learning_rate_is_compared_with_the_schedules_first_one() -> None:
    schedule = SchedulerChoice(
        name="WarmupLR",
        params={
            "warmup_min_lr": 1e-5,
            "warmup_max_lr": 1e-3,
            "warmup_num_steps": 10,
            "warmup_type": "linear",
        },
    )
    assert failures(adamw(lr=1e-5), scheduler=schedule) == set()
    assert failures(adamw(lr=1e-3), scheduler=schedule) == {"optimizer.lr"}


def test_one_error_names_every_difference() -> None:
    checks = Checks()
    checks.equal("zero_optimization.stage", 2, 1)
    checks.equal("precision", "bf16", "bf16")
    checks.equal("gradient_clipping", 1.0, 0.0)
    with pytest.raises(VerificationError) as caught:
        checks.raise_if_failed(engine="DeepSpeed")
    message = str(caught.value)
    assert "zero_optimization.stage should be 2 but is 1" in message
    assert "gradient_clipping should be 1.0 but is 0.0" in message
    assert "precision" not in message
    assert "Fix:" in message


def swap_behind_the_back(what: str) -> str:
    """Start a real engine while something replaces a part of the plan."""
    import deepspeed

    original = deepspeed.initialize

    def initialize(**kwargs: Any) -> Any:
        config = kwargs["config"]
        if what == "optimizer":
            config["optimizer"] = {"type": "Adagrad", "params": {"lr": 1e-3}}
        elif what == "decay mode":
            config["optimizer"]["type"] = "Adam"
            config["optimizer"]["params"]["adam_w_mode"] = False
        elif what == "stage":
            config["zero_optimization"]["stage"] = 1
        elif what == "offload":
            del config["zero_optimization"]["offload_optimizer"]
        elif what == "precision":
            config["bf16"] = {"enabled": True}
        elif what == "clipping":
            config["gradient_clipping"] = 0.5
        elif what == "scheduler":
            del config["scheduler"]
        return original(**kwargs)

    deepspeed.initialize = initialize
    try:
        start(Case(stage=2, offload="cpu", engine="deepspeed"), torch.nn.Linear(3, 3))
    except VerificationError as error:
        return str(error)
    finally:
        deepspeed.initialize = original
    return "not noticed"


@pytest.mark.deepspeed
@ranks(1)
def test_a_setting_replaced_in_the_running_engine_is_detected() -> None:
    expected = {
        "optimizer": "optimizer.type should be 'DeepSpeedCPUAdam' but is 'DeepSpeedCPUAdagrad'",
        "decay mode": "optimizer.weight_decay_mode should be 'decoupled' but is 'l2'",
        "stage": "zero_optimization.stage should be 2 but is 1",
        "offload": "offload_optimizer.device should be 'cpu' but is 'none'",
        "precision": "precision should be 'fp32' but is 'bf16'",
        "clipping": "gradient_clipping should be 1.0 but is 0.5",
        "scheduler": "scheduler.type should be 'WarmupLR' but is None",
    }
    for name, sentence in expected.items():
        assert sentence in swap_behind_the_back(name), name


@pytest.mark.deepspeed
@pytest.mark.parametrize("trained", [False, True])
@ranks(1)
def test_half_precision_weights_are_refused_under_an_fp32_plan(trained: bool) -> None:
    cast = [Case(stage=3), Case(stage=2, precision="bf16")]
    places = [Case(deepspeed=False), Case(stage=0), Case(stage=2), *cast]
    found = []
    for case in places:
        base = torch.nn.Linear(3, 3, dtype=torch.bfloat16).requires_grad_(trained)
        try:
            with start(case, torch.nn.Sequential(base, torch.nn.Linear(3, 3))):
                found.append("started")
        except EngineError as error:
            found.append(str(error))
    (*refused, third, rounded) = found
    assert (third, rounded) == ("started", "started")
    for message in refused:
        assert "model.0.weight = torch.bfloat16" in message
        assert "load the model in float32" in message
        assert 'precision="bf16"' in message
