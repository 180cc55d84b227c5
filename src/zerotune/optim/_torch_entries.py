"""The public classes of ``torch.optim`` (torch 2.13), written down so that no torch is needed."""

from __future__ import annotations

from typing import Final

from zerotune.optim.entries import (
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

# Adam's relatives start from the learning rate that suits Adam on diffusion models; the others
# keep torch's own default.
ADAM_LR: Final = 1e-4

_SWITCHES = torch_switches("foreach", "maximize", "capturable")
_DECOUPLED = flag("decoupled_weight_decay")

TORCH_ENTRIES: Final[tuple[OptimizerEntry, ...]] = (
    OptimizerEntry(
        name="SGD",
        family="torch",
        summary="Stochastic gradient descent, with or without momentum",
        parameters=(
            lr(1e-3),
            number("momentum", 0.0),
            number("dampening", 0.0),
            weight_decay(),
            flag("nesterov"),
            *torch_switches("maximize", "foreach", "fused"),
        ),
        conditional_states={"momentum": "momentum_buffer"},
    ),
    OptimizerEntry(
        name="Adamax",
        family="torch",
        summary="Adam with the infinity norm",
        parameters=(lr(ADAM_LR), betas(), eps(), weight_decay(), *_SWITCHES),
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
            *_SWITCHES,
        ),
        states=("exp_avg", "exp_avg_sq"),
        adam_like=True,
    ),
    OptimizerEntry(
        name="RAdam",
        family="torch",
        summary="Adam with rectified variance",
        parameters=(lr(ADAM_LR), betas(), eps(), weight_decay(), _DECOUPLED, *_SWITCHES),
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
            *_SWITCHES,
        ),
        states=("square_avg",),
        conditional_states={"momentum": "momentum_buffer", "centered": "grad_avg"},
    ),
    OptimizerEntry(
        name="Adadelta",
        family="torch",
        summary="Step sizes from running averages of squared steps",
        parameters=(
            lr(1.0),
            number("rho", 0.9, high=1),
            eps(1e-6),
            weight_decay(),
            *_SWITCHES,
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
            *_SWITCHES,
        ),
        states=("ax",),
    ),
    OptimizerEntry(
        name="Rprop",
        family="torch",
        summary="Sign of the gradient with per-element step sizes, for full batches",
        parameters=(
            lr(1e-2),
            Parameter(name="etas", type="floats", default=(0.5, 1.2), length=2, low=0),
            Parameter(name="step_sizes", type="floats", default=(1e-6, 50.0), length=2, low=0),
            *_SWITCHES,
        ),
        states=("prev", "step_size"),
    ),
    OptimizerEntry(
        name="Adafactor",
        family="torch",
        summary="Second moment factored into rows and columns",
        parameters=(
            lr(1e-2),
            number("beta2_decay", -0.8, low=None, high=0),
            Parameter(name="eps", type="any", default=(None, 1e-3)),
            number("d", 1.0),
            weight_decay(),
            *torch_switches("foreach", "maximize"),
        ),
        requires=("whole matrices, which ZeRO's flat partitions are not",),
    ),
    OptimizerEntry(
        name="LBFGS",
        family="torch",
        summary="Quasi-Newton method that evaluates the loss several times per step",
        parameters=(lr(1.0),),
        requires=("a closure that recomputes the loss",),
    ),
    OptimizerEntry(
        name="SparseAdam",
        family="torch",
        summary="Adam for sparse gradients",
        parameters=(lr(ADAM_LR), betas(), eps(), *torch_switches("maximize")),
        states=("exp_avg", "exp_avg_sq"),
        requires=("sparse gradients",),
    ),
)
