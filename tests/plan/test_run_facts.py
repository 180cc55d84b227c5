"""Facts of a run from a script's flags."""

from __future__ import annotations

from argparse import Namespace

import pytest

from zerotune.errors import InvalidValueError
from zerotune.optim import OptimizerResolver
from zerotune.plan import DeepSpeedPlan
from zerotune.plan.context import RunFacts
from zerotune.platform import Platform

# Names and types as in diffusers' training scripts.
FLAGS = {
    "learning_rate": 3e-5,
    "adam_beta1": 0.95,
    "adam_beta2": 0.98,
    "adam_weight_decay": 1e-6,
    "adam_epsilon": 1e-7,
    "train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "mixed_precision": "bf16",
    "max_train_steps": 900,
    "lr_warmup_steps": 40,
    "output_dir": "runs",
}


def test_script_arguments_fill_auto_values_of_a_plan():
    plan = DeepSpeedPlan.from_dict(
        {
            "zero_optimization": {"stage": 2},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"},
            },
        }
    )
    resolved = plan.resolve(
        run=RunFacts.from_arguments(Namespace(**FLAGS)),
        platform=Platform.synthetic("cuda", vram=2**35, ram=2**36),
    )
    assert resolved.micro_batch_size == 3
    assert resolved.gradient_accumulation_steps == 2
    assert resolved.precision == "bf16"
    assert resolved.plan.gradient_clipping == 0.5
    applied = OptimizerResolver().resolve(resolved)
    params = applied.optimizer.params
    assert (params["lr"], params["eps"], params["weight_decay"]) == (3e-5, 1e-7, 1e-6)
    assert tuple(params["betas"]) == (0.95, 0.98)
    schedule = applied.scheduler.params
    assert (schedule["warmup_num_steps"], schedule["total_num_steps"]) == (40, 900)


def test_missing_script_arguments_leave_facts_unset():
    assert RunFacts.from_arguments(Namespace(adam_beta1=0.9, max_train_steps=None)) == RunFacts()
    assert RunFacts.from_arguments(Namespace(mixed_precision="no")).mixed_precision == "fp32"


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", "1e-4"), ("train_batch_size", 2.5), ("max_train_steps", True)],
)
def test_an_argument_with_another_meaning_is_named(name, value):
    with pytest.raises(InvalidValueError, match=rf"arguments\.{name}"):
        RunFacts.from_arguments(Namespace(**{name: value}))
