"""Optimizers of optional packages, as users of diffusion trainers ask for them."""

from __future__ import annotations

from typing import Final

from zerotune.optim.entries import (
    ADAM_LR,
    OptimizerEntry,
    betas,
    eps,
    flag,
    lr,
    number,
    torch_switches,
    weight_decay,
)
from zerotune.optim.parameters import Parameter

_EXTRA: Final = "optimizers"


def _optional(name: str) -> Parameter:
    return Parameter(name=name, optional=True, default=None, nullable=True, low=0)


PACKAGE_ENTRIES: Final[tuple[OptimizerEntry, ...]] = (
    OptimizerEntry(
        name="AdamW8bit",
        family="package",
        summary="AdamW with its moments in 8 bits, by blocks (bitsandbytes)",
        parameters=(
            lr(ADAM_LR),
            betas(),
            eps(),
            weight_decay(1e-2),
            Parameter(name="min_8bit_size", type="int", default=4096, low=0, optional=True),
            flag("is_paged", optional=True),
        ),
        states=("state1", "state2"),
        adam_like=True,
        requires=("the package bitsandbytes", "from 0.50 on without CUDA or with offload"),
        package="bitsandbytes.optim",
        extra=_EXTRA,
    ),
    *(
        OptimizerEntry(
            name=f"TorchAO{kind}",
            family="package",
            summary=f"AdamW with its moments in {bits} bits, by blocks (torchao)",
            parameters=(
                lr(ADAM_LR),
                betas(),
                eps(),
                weight_decay(1e-2),
                flag("amsgrad", optional=True),
                Parameter(name="block_size", type="int", low=1, optional=True),
                flag("bf16_stochastic_round", optional=True),
            ),
            states=("exp_avg", "exp_avg_sq"),
            adam_like=True,
            requires=("the package torchao",),
            package="torchao.optim",
            implementation=kind,
            extra=_EXTRA,
        )
        for kind, bits in (("AdamW8bit", 8), ("AdamW4bit", 4))
    ),
    OptimizerEntry(
        name="Prodigy",
        family="package",
        summary="Adam that finds its own learning rate; lr is a multiple of it",
        parameters=(
            lr(1.0),
            betas(),
            _optional("beta3"),
            eps(),
            weight_decay(),
            flag("decouple", default=True),
            flag("use_bias_correction"),
            flag("safeguard_warmup"),
            number("d0", 1e-6, low_open=True),
            number("d_coef", 1.0, low_open=True),
            Parameter(name="growth_rate", optional=True, low=1),
            Parameter(name="slice_p", type="int", default=1, low=1),
        ),
        states=("exp_avg", "exp_avg_sq", "s", "p0"),
        requires=("the package prodigyopt", "one parameter group"),
        package="prodigyopt",
        extra=_EXTRA,
        own_schedule=True,
        lr_scale="1, a multiple of what it finds, thousands of times larger",
    ),
    OptimizerEntry(
        name="AdamWScheduleFree",
        family="package",
        summary="AdamW that averages its weights instead of following a schedule",
        parameters=(
            lr(2.5e-3),
            betas(),
            eps(),
            weight_decay(),
            Parameter(name="warmup_steps", type="int", default=0, low=0),
            number("r", 0.0),
            number("weight_lr_power", 2.0),
            *torch_switches("foreach"),
        ),
        states=("z", "exp_avg_sq"),
        requires=("the package schedulefree",),
        package="schedulefree",
        extra=_EXTRA,
        own_schedule=True,
        lr_scale="1 to 10 times larger",
    ),
)
