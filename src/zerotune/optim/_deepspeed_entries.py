"""The twelve optimizer names of DeepSpeed's configuration (0.19.8; the 1-bit ones 0.18)."""

from __future__ import annotations

from typing import Final

from zerotune.optim.entries import (
    ADAM_LR,
    CPU_ADAM,
    DEEPSPEED_ADAM,
    TORCH_ADAM,
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

_ADAM_SWITCHES: Final = (
    flag("bias_correction", default=True, only=DEEPSPEED_ADAM),
    # `adam_w_mode` and `torch_adam` are keys of DeepSpeed's configuration, not of a constructor.
    flag("adam_w_mode", default=True),
    flag("torch_adam"),
    flag("fp32_optimizer_states", default=True, only=CPU_ADAM),
    flag("set_grad_none", optional=True, default=True, only=frozenset({"FusedAdam"})),
    flag("amsgrad", only=TORCH_ADAM),
    *torch_switches("foreach", "fused", "maximize", "capturable", only=TORCH_ADAM),
)

_MUP = "the package mup, and base shapes set on the model before the engine starts"
_ONE_BIT = "a DeepSpeed release before 0.19, ZeRO stage 0, CUDA with cupy"

_ONE_BIT_COMMON: Final = (
    lr(ADAM_LR),
    betas(),
    eps(),
    weight_decay(),
    flag("bias_correction", default=True),
    flag("eps_inside_sqrt"),
    flag("cuda_aware"),
    Parameter(name="comm_backend_name", type="str", default="nccl"),
)

_LAMB_COEFFICIENTS: Final = (number("max_coeff", 10.0), number("min_coeff", 0.01))


def _integer(name: str, default: int) -> Parameter:
    return Parameter(name=name, type="int", default=default, low=1)


_ADAM_FAMILY: Final = (
    OptimizerEntry(
        name="AdamW",
        family="deepspeed",
        summary="Adam with decoupled weight decay",
        # torch decays by 0.01 when nothing is written, DeepSpeed's classes by nothing.
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
    ),
    OptimizerEntry(
        name="Adam",
        family="deepspeed",
        summary="Adam; DeepSpeed runs AdamW's decay unless adam_w_mode is false",
        parameters=(lr(ADAM_LR), betas(), eps(), weight_decay(), *_ADAM_SWITCHES),
        states=("exp_avg", "exp_avg_sq"),
        conditional_states={"amsgrad": "max_exp_avg_sq"},
        adam_like=True,
    ),
)

_OTHERS: Final = (
    OptimizerEntry(
        name="Adagrad",
        family="deepspeed",
        summary="Gradient divided by the root of all squared gradients so far",
        parameters=(
            lr(1e-2),
            eps(1e-10),
            weight_decay(),
            number("lr_decay", 0.0, only=frozenset({"Adagrad"})),
            number("initial_accumulator_value", 0.0, only=frozenset({"Adagrad"})),
            flag("fp32_optimizer_states", default=True, only=frozenset({"DeepSpeedCPUAdagrad"})),
            *torch_switches("foreach", "fused", "maximize", only=frozenset({"Adagrad"})),
        ),
        # As torch calls it; DeepSpeedCPUAdagrad keeps the same tensor as exp_avg_sq.
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
        lr_scale="3 to 10 times smaller",
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
        lr_scale="larger",
    ),
    OptimizerEntry(
        name="Muon",
        family="deepspeed",
        summary="Orthogonalised momentum for hidden matrices, Adam for the rest",
        parameters=(
            lr(2e-2),
            # These two become the learning rates of groups.
            Parameter(name="muon_lr", low=0, low_open=True, optional=True),
            Parameter(name="adam_lr", low=0, low_open=True, optional=True),
            number("momentum", 0.95, high=1, high_open=True),
            flag("nesterov", default=True),
            Parameter(name="ns_steps", type="int", default=5, low=1),
            betas(),
            eps(),
            weight_decay(),
            Parameter(
                name="ns_method",
                type="str",
                optional=True,
                default="gram",
                only=frozenset({"MuonWithAuxAdam"}),
            ),
        ),
        states=("momentum_buffer",),
        requires=("the names and shapes of the model's parameters",),
        renamed={"adam_lr": "lr"},
        lr_scale="about a hundred times larger",
    ),
)

_MUP_FAMILY: Final = (
    *(
        OptimizerEntry(
            name=name,
            family="deepspeed",
            summary=f"{base} with maximal-update parametrisation",
            parameters=(lr(ADAM_LR), betas(), eps(), weight_decay()),
            states=("exp_avg", "exp_avg_sq"),
            adam_like=True,
            requires=(_MUP,),
            package="mup",
            implementation=base,
            extra="mup",
        )
        for name, base in (("MuAdam", "Adam"), ("MuAdamW", "AdamW"))
    ),
    OptimizerEntry(
        name="MuSGD",
        family="deepspeed",
        summary="SGD with maximal-update parametrisation",
        parameters=(
            lr(1e-3),
            number("momentum", 0.0),
            number("dampening", 0.0),
            weight_decay(),
            flag("nesterov"),
        ),
        conditional_states={"momentum": "momentum_buffer"},
        requires=(_MUP,),
        package="mup",
        implementation="SGD",
        extra="mup",
        lr_scale="larger",
    ),
)

_ONE_BIT_FAMILY: Final = (
    OptimizerEntry(
        name="OneBitAdam",
        family="deepspeed",
        summary="Adam with momentum compressed to one bit after a warm-up",
        parameters=(*_ONE_BIT_COMMON, _integer("freeze_step", 100_000)),
        states=("exp_avg", "exp_avg_sq", "worker_error", "server_error"),
        adam_like=True,
        requires=(_ONE_BIT,),
    ),
    OptimizerEntry(
        name="OneBitLamb",
        family="deepspeed",
        summary="Lamb with momentum compressed to one bit after a warm-up",
        parameters=(
            *_ONE_BIT_COMMON,
            _integer("freeze_step", 100_000),
            *_LAMB_COEFFICIENTS,
            number("coeff_beta", 0.9, high=1, high_open=True),
            number("factor_max", 4.0),
            number("factor_min", 0.5),
            number("factor_threshold", 0.1),
        ),
        states=("exp_avg", "exp_avg_sq", "worker_error", "server_error"),
        requires=(_ONE_BIT,),
        lr_scale="larger",
    ),
    OptimizerEntry(
        name="ZeroOneAdam",
        family="deepspeed",
        summary="0/1 Adam: one-bit compression and fewer synchronisations",
        parameters=(
            *_ONE_BIT_COMMON,
            _integer("var_freeze_step", 100_000),
            _integer("var_update_scaler", 16),
            _integer("local_step_scaler", 32_678),
            _integer("local_step_clipper", 16),
        ),
        states=("exp_avg", "exp_avg_sq", "worker_error", "server_error"),
        adam_like=True,
        requires=(_ONE_BIT,),
    ),
)

DEEPSPEED_ENTRIES: Final[tuple[OptimizerEntry, ...]] = (
    *_ADAM_FAMILY,
    *_OTHERS,
    *_MUP_FAMILY,
    *_ONE_BIT_FAMILY,
)
