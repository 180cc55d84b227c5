"""All optimizers by name: arguments, states, requirements and aliases.

The plan, its rules and its estimates use ``canonical`` instead of comparing spellings. This module
contains only facts. ``capability`` decides whether an optimizer can run *here* and
which class implements it; ``choose`` checks values.

The facts come from DeepSpeed 0.19.8 (``runtime/engine.py``, ``ops/``), ``torch.optim`` of torch
2.13, and the packages' constructors. They are copied here so that reading a plan imports none of
these packages; a test compares the entries with the real constructors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from zerotune.plan.optimizer.entries import (
    OptimizerEntry,
    Parameter,
    flag,
    integer,
    number,
    numbers,
)
from zerotune.plan.values import Text

ADAM_LR: Final = 1e-4
"""Default peak learning rate for Adam and its relatives, as in diffusers' examples; other
optimizers use the default of their class."""

FUSED_ADAM: Final = frozenset({"FusedAdam"})
CPU_ADAM: Final = frozenset({"DeepSpeedCPUAdam", "ZenFlowCPUAdam"})
DEEPSPEED_ADAM: Final = FUSED_ADAM | CPU_ADAM
ADAM: Final = frozenset({"AdamW", "Adam"})
"""Optimizers whose decay mode is set by a DeepSpeed switch; torch has classes of the same names."""


def lr(default: float) -> Parameter:
    """Create the learning rate argument."""
    return number("lr", default, above=0)


def betas(default: tuple[float, float] = (0.9, 0.999), **kwargs: Any) -> Parameter:
    """Create the argument for the moments' decay rates."""
    return numbers("betas", default, below=1, **kwargs)


def eps(default: float = 1e-8, **kwargs: Any) -> Parameter:
    """Create the argument that keeps the denominator above zero."""
    return number("eps", default, above=0, **kwargs)


def weight_decay(default: float = 0.0, **kwargs: Any) -> Parameter:
    """Create the weight decay argument."""
    return number("weight_decay", default, **kwargs)


def torch_switches(*names: str, **kwargs: Any) -> tuple[Parameter, ...]:
    """Create arguments for ``torch.optim``'s switches, with torch's defaults."""
    return tuple(
        flag(name, optional=True, nullable=name in {"foreach", "fused"}, **kwargs) for name in names
    )


_ADAM_SWITCHES: Final = (
    flag("bias_correction", default=True, only=DEEPSPEED_ADAM),
    # `adam_w_mode` and `torch_adam` are keys of DeepSpeed's configuration, not of a constructor.
    flag("adam_w_mode", default=True),
    flag("torch_adam"),
    flag("fp32_optimizer_states", default=True, only=CPU_ADAM),
    flag("set_grad_none", optional=True, default=True, only=FUSED_ADAM),
    flag("amsgrad", only=ADAM),
    *torch_switches("foreach", "fused", "maximize", "capturable", only=ADAM),
)

_LAMB_COEFFICIENTS: Final = (number("max_coeff", 10.0), number("min_coeff", 0.01))


_ADAM_FAMILY: Final = (
    OptimizerEntry(
        name="AdamW",
        family="deepspeed",
        summary="Adam with decoupled weight decay",
        # The default decay is 0.01 in torch and 0 in DeepSpeed's classes.
        parameters=(
            lr(ADAM_LR),
            betas(),
            eps(),
            weight_decay(0.01, native=0.0),
            *_ADAM_SWITCHES,
        ),
        states=("exp_avg", "exp_avg_sq"),
        conditional_states={"amsgrad": "max_exp_avg_sq"},
        adam_like=True,
        streams=True,
    ),
    OptimizerEntry(
        name="Adam",
        family="deepspeed",
        summary="Adam; DeepSpeed applies decoupled decay unless adam_w_mode is false",
        parameters=(lr(ADAM_LR), betas(), eps(), weight_decay(), *_ADAM_SWITCHES),
        states=("exp_avg", "exp_avg_sq"),
        conditional_states={"amsgrad": "max_exp_avg_sq"},
        adam_like=True,
        streams=True,
    ),
)

_OTHERS: Final = (
    OptimizerEntry(
        name="Adagrad",
        family="deepspeed",
        summary="Gradient divided by the root of the sum of all past squared gradients",
        parameters=(
            lr(1e-2),
            eps(1e-10),
            weight_decay(),
            number("lr_decay", 0.0, only=frozenset({"Adagrad"})),
            number("initial_accumulator_value", 0.0, only=frozenset({"Adagrad"})),
            flag("fp32_optimizer_states", default=True, only=frozenset({"DeepSpeedCPUAdagrad"})),
            *torch_switches("foreach", "fused", "maximize", only=frozenset({"Adagrad"})),
        ),
        # torch's name; DeepSpeedCPUAdagrad calls the same tensor exp_avg_sq.
        states=("sum",),
    ),
    OptimizerEntry(
        name="Lion",
        family="deepspeed",
        summary="Sign of an interpolated momentum; one state instead of Adam's two",
        parameters=(
            lr(3e-5),
            betas((0.9, 0.99), native=(0.9, 0.999)),
            weight_decay(),
            flag("fp32_optimizer_states", default=True, only=frozenset({"DeepSpeedCPULion"})),
            flag("set_grad_none", optional=True, default=True, only=frozenset({"FusedLion"})),
        ),
        states=("exp_avg",),
    ),
    OptimizerEntry(
        name="Lamb",
        family="deepspeed",
        summary="Adam with a trust ratio per parameter, for very large batches",
        parameters=(
            lr(1e-3),
            betas(),
            eps(),
            weight_decay(),
            flag("bias_correction", default=True),
            flag("eps_inside_sqrt", only=frozenset({"FusedLamb"})),
            *_LAMB_COEFFICIENTS,
        ),
        states=("exp_avg", "exp_avg_sq"),
    ),
    OptimizerEntry(
        name="Muon",
        family="deepspeed",
        summary="Orthogonalised momentum for hidden matrices, Adam for the rest",
        parameters=(
            lr(2e-2),
            # These two become the learning rates of groups.
            number("muon_lr", above=0, optional=True),
            number("adam_lr", above=0, optional=True),
            number("momentum", 0.95, below=1),
            flag("nesterov", default=True),
            integer("ns_steps", 5),
            betas(),
            eps(),
            weight_decay(),
            Parameter(
                name="ns_method",
                kind=Text(),
                optional=True,
                default="gram",
                only=frozenset({"MuonWithAuxAdam"}),
            ),
        ),
        states=("momentum_buffer",),
        # Muon's matrices have one moment, Adam's parameters two; the larger stands for both.
        fp32_per_weight=2.0,
        requires=("the names and shapes of the model's parameters",),
    ),
)

_OF_SGD: Final = (
    lr(1e-3),
    number("momentum", 0.0),
    number("dampening", 0.0),
    weight_decay(),
    flag("nesterov"),
)

_ONE_BIT_ARGUMENTS: Final = (
    "lr", "betas", "eps", "weight_decay", "bias_correction", "eps_inside_sqrt", "cuda_aware",
    "comm_backend_name", "freeze_step", "var_freeze_step", "var_update_scaler",
    "local_step_scaler", "local_step_clipper", "max_coeff", "min_coeff", "coeff_beta",
    "factor_max", "factor_min", "factor_threshold",
)  # fmt: skip

_ONE_BIT_FAMILY: Final = tuple(
    OptimizerEntry(
        name=name,
        family="deepspeed",
        summary=f"{base} with momentum compressed to one bit; removed from DeepSpeed",
        parameters=tuple(Parameter(name=each, optional=True) for each in _ONE_BIT_ARGUMENTS),
        refusal="removed in DeepSpeed 0.19 (PR #8490); available only in DeepSpeed 0.18 and older, "
        "at stage 0",
        instead="AdamW",
    )
    for name, base in (("OneBitAdam", "Adam"), ("OneBitLamb", "Lamb"), ("ZeroOneAdam", "Adam"))
)

DEEPSPEED_ENTRIES: Final[tuple[OptimizerEntry, ...]] = (
    *_ADAM_FAMILY,
    *_OTHERS,
    *_ONE_BIT_FAMILY,
)


_TORCH_SWITCHES = torch_switches("foreach", "maximize", "capturable")
_DECOUPLED = flag("decoupled_weight_decay")

TORCH_ENTRIES: Final[tuple[OptimizerEntry, ...]] = (
    OptimizerEntry(
        name="SGD",
        family="torch",
        summary="Stochastic gradient descent, with or without momentum",
        parameters=(
            *_OF_SGD,
            *torch_switches("maximize", "foreach", "fused"),
        ),
        conditional_states={"momentum": "momentum_buffer"},
    ),
    OptimizerEntry(
        name="Adamax",
        family="torch",
        summary="Adam with the infinity norm",
        parameters=(lr(ADAM_LR), betas(), eps(), weight_decay(), *_TORCH_SWITCHES),
        states=("exp_avg", "exp_inf"),
        adam_like=True,
    ),
    OptimizerEntry(
        name="NAdam",
        family="torch",
        summary="Adam with Nesterov momentum",
        parameters=(
            lr(ADAM_LR),
            betas(),
            eps(),
            weight_decay(),
            number("momentum_decay", 4e-3),
            _DECOUPLED,
            *_TORCH_SWITCHES,
        ),
        states=("exp_avg", "exp_avg_sq"),
        adam_like=True,
    ),
    OptimizerEntry(
        name="RAdam",
        family="torch",
        summary="Adam with rectified variance",
        parameters=(lr(ADAM_LR), betas(), eps(), weight_decay(), _DECOUPLED, *_TORCH_SWITCHES),
        states=("exp_avg", "exp_avg_sq"),
        adam_like=True,
    ),
    OptimizerEntry(
        name="RMSprop",
        family="torch",
        summary="Gradient divided by its running root mean square",
        parameters=(
            lr(1e-2),
            number("alpha", 0.99),
            eps(),
            weight_decay(),
            number("momentum", 0.0),
            flag("centered"),
            *_TORCH_SWITCHES,
        ),
        states=("square_avg",),
        conditional_states={"momentum": "momentum_buffer", "centered": "grad_avg"},
    ),
    OptimizerEntry(
        name="Adadelta",
        family="torch",
        summary="Step sizes from running averages of squared gradients and squared steps",
        parameters=(
            lr(1.0),
            number("rho", 0.9, high=1),
            eps(1e-6),
            weight_decay(),
            *_TORCH_SWITCHES,
        ),
        states=("square_avg", "acc_delta"),
    ),
    OptimizerEntry(
        name="ASGD",
        family="torch",
        summary="Averaged stochastic gradient descent",
        parameters=(
            lr(1e-2),
            number("lambd", 1e-4),
            number("alpha", 0.75),
            number("t0", 1e6),
            weight_decay(),
            *_TORCH_SWITCHES,
        ),
        states=("ax",),
    ),
    OptimizerEntry(
        name="Rprop",
        family="torch",
        summary="Sign of the gradient with per-element step sizes, for full batches",
        parameters=(
            lr(1e-2),
            numbers("etas", (0.5, 1.2)),
            numbers("step_sizes", (1e-6, 50.0)),
            *_TORCH_SWITCHES,
        ),
        states=("prev", "step_size"),
    ),
    OptimizerEntry(
        name="Adafactor",
        family="torch",
        summary="Second moment factored into rows and columns",
        parameters=(
            lr(1e-2),
            number("beta2_decay", -0.8, low=-math.inf, high=0),
            Parameter(name="eps", default=(None, 1e-3)),
            number("d", 1.0),
            weight_decay(),
            *torch_switches("foreach", "maximize"),
        ),
        fp32_per_weight=0.01,
        requires=("whole matrices instead of ZeRO's flat partitions",),
    ),
    OptimizerEntry(
        name="LBFGS",
        family="torch",
        summary="Quasi-Newton method that evaluates the loss several times per step",
        parameters=(lr(1.0),),
        refusal="the optimizer needs a closure that recomputes the loss, which no engine provides",
        instead="SGD",
    ),
    OptimizerEntry(
        name="SparseAdam",
        family="torch",
        summary="Adam for sparse gradients",
        parameters=(lr(ADAM_LR), betas(), eps(), *torch_switches("maximize")),
        refusal="the optimizer accepts only sparse gradients, which diffusion models do not have",
        instead="Adam",
    ),
)


PACKAGE_ENTRIES: Final[tuple[OptimizerEntry, ...]] = (
    OptimizerEntry(
        name="AdamW8bit",
        family="package",
        summary="AdamW with 8-bit moments, quantised in blocks (bitsandbytes)",
        parameters=(
            lr(ADAM_LR),
            betas(),
            eps(),
            weight_decay(1e-2),
            integer("min_8bit_size", 4096, low=0, optional=True),
            flag("is_paged", optional=True),
        ),
        states=("state1", "state2"),
        fp32_per_weight=0.52,
        adam_like=True,
        requires=("the package bitsandbytes",),
        package="bitsandbytes.optim",
    ),
    *(
        OptimizerEntry(
            name=f"TorchAO{kind}",
            family="package",
            summary=f"AdamW with {bits}-bit moments, quantised in blocks (torchao)",
            parameters=(
                lr(ADAM_LR),
                betas(),
                eps(),
                weight_decay(1e-2),
                flag("amsgrad", optional=True),
                integer("block_size", optional=True),
                flag("bf16_stochastic_round", optional=True),
            ),
            # torchao quantises only tensors of whole blocks, which a ZeRO partition rarely is.
            states=("exp_avg", "exp_avg_sq"),
            adam_like=True,
            requires=("the package torchao",),
            package="torchao.optim",
            implementation=kind,
        )
        for kind, bits in (("AdamW8bit", 8), ("AdamW4bit", 4))
    ),
    OptimizerEntry(
        name="Prodigy",
        family="package",
        summary="Adam that estimates the learning rate; lr multiplies the estimate",
        parameters=(
            lr(1.0),
            betas(),
            number("beta3", None, optional=True, nullable=True),
            eps(),
            weight_decay(),
            flag("decouple", default=True),
            flag("use_bias_correction"),
            flag("safeguard_warmup"),
            number("d0", 1e-6, above=0),
            number("d_coef", 1.0, above=0),
            number("growth_rate", low=1, optional=True),
            integer("slice_p", 1),
        ),
        states=("exp_avg", "exp_avg_sq", "s", "p0"),
        requires=("the package prodigyopt", "one parameter group"),
        package="prodigyopt",
        own_schedule=True,
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
            integer("warmup_steps", 0, low=0),
            number("r", 0.0),
            number("weight_lr_power", 2.0),
            *torch_switches("foreach"),
        ),
        states=("z", "exp_avg_sq"),
        requires=("the package schedulefree",),
        package="schedulefree",
        own_schedule=True,
    ),
)


OWN_ENTRIES: Final[tuple[OptimizerEntry, ...]] = (
    OptimizerEntry(
        name="AdamWBF16States",
        family="zerotune",
        summary="AdamW with fp32 master weights and stochastically rounded bf16 moments",
        parameters=(lr(ADAM_LR), betas(), eps(), weight_decay(1e-2)),
        states=("exp_avg", "exp_avg_sq"),
        fp32_per_weight=1.0,
        adam_like=True,
        streams=True,
    ),
    OptimizerEntry(
        name="AdamW8BitStates",
        family="zerotune",
        summary="AdamW with fp32 master weights and 8-bit moments, quantised in blocks of 256",
        parameters=(lr(ADAM_LR), betas(), eps(), weight_decay(1e-2)),
        states=("exp_avg", "exp_avg_sq"),
        # Two 1-byte codes per weight, and an fp32 scale per block of 256 for each.
        fp32_per_weight=(2 + 2 * 4 / 256) / 4,
        adam_like=True,
        requires=("streamed weights",),
        streams=True,
        must_stream=True,
    ),
)

OPTIMIZERS: Final[Mapping[str, OptimizerEntry]] = MappingProxyType(
    {
        entry.name: entry
        for entry in (*DEEPSPEED_ENTRIES, *TORCH_ENTRIES, *PACKAGE_ENTRIES, *OWN_ENTRIES)
    }
)
"""Entries of all optimizers, by canonical name."""

ONE_BIT: Final = frozenset({entry.name for entry in DEEPSPEED_ENTRIES if entry.refusal is not None})
"""DeepSpeed's optimizers that compress communication to one bit."""
