"""All optimizers by name: arguments, states, requirements and aliases.

The plan, its rules and its estimates use ``canonical`` instead of comparing spellings. This module
contains only facts. ``zerotune.optim.capability`` decides whether an optimizer can run *here* and
which class implements it; ``zerotune.optim.resolver`` checks values.

The facts come from DeepSpeed 0.19.8 (``runtime/engine.py``, ``ops/``), ``torch.optim`` of torch
2.13, and the packages' constructors. They are copied here so that reading a plan imports none of
these packages; a test compares the entries with the real constructors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs

from zerotune._util.text import did_you_mean, squash
from zerotune.errors import UNSET, InvalidValueError, OptimizerError, writes

ParameterType = Literal["float", "int", "bool", "floats", "str", "any"]


@attrs.frozen(kw_only=True)
class Parameter:
    """One argument of an optimizer or schedule, described for forms and tables."""

    name: str
    """Key under ``params`` in DeepSpeed's or torch's spelling."""
    type: ParameterType = "float"
    """``"floats"`` is a fixed number of floats (``betas``); ``"any"`` is not checked."""
    default: Any = UNSET
    """Value for ``"auto"``; ``UNSET`` if the argument is required."""
    native: Any = UNSET
    """Default of DeepSpeed's class if it differs from ``default``."""
    low: float | None = None
    """Minimum (of each element)."""
    high: float | None = None
    """Maximum (of each element)."""
    low_open: bool = False
    """Whether ``low`` itself is excluded."""
    high_open: bool = False
    """Whether ``high`` itself is excluded."""
    length: int | None = None
    """Number of elements if ``type`` is ``"floats"``."""
    choices: tuple[str, ...] = ()
    """Allowed values of a ``"str"``."""
    nullable: bool = False
    """Whether ``None`` is allowed."""
    optional: bool = False
    """Whether the argument is omitted unless the configuration sets it, as for switches that do not
    affect results."""
    only: frozenset[str] = frozenset()
    """Classes whose constructor accepts the argument; empty if all do."""

    @property
    def unwritten(self) -> Any:
        """Value that applies if a configuration does not set the argument."""
        return self.default if self.native is UNSET else self.native

    @property
    def range(self) -> str:
        """Describe the allowed values briefly for a table."""
        if self.type == "bool":
            return "true or false"
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        noun = {"int": "a whole number", "floats": f"{self.length} numbers"}.get(
            self.type, "a number"
        )
        bounds = [
            f"{'>' if self.low_open else '>='} {self.low:g}" if self.low is not None else "",
            f"{'<' if self.high_open else '<='} {self.high:g}" if self.high is not None else "",
        ]
        return " ".join([noun, " and ".join(bound for bound in bounds if bound)]).strip()

    def accepts(self, implementation: str) -> bool:
        """Return whether the class named ``implementation`` accepts the argument."""
        return not self.only or implementation in self.only


def number(name: str, default: float, *, low: float | None = 0, **kwargs: Any) -> Parameter:
    """Create a float argument, non-negative by default."""
    return Parameter(name=name, default=default, low=low, **kwargs)


def integer(name: str, default: Any = UNSET, *, low: int = 1, **kwargs: Any) -> Parameter:
    """Create an integer argument, positive by default."""
    return Parameter(name=name, type="int", default=default, low=low, **kwargs)


def flag(name: str, default: bool = False, **kwargs: Any) -> Parameter:
    """Create a boolean argument."""
    return Parameter(name=name, type="bool", default=default, **kwargs)


# -- Entries of the catalogue.


Family = Literal["deepspeed", "torch", "package", "zerotune"]


@attrs.frozen(kw_only=True)
class Entry:
    """Catalogue entry of an optimizer or a schedule: name and arguments."""

    name: str
    """Canonical name (``"AdamW"``, ``"WarmupLR"``)."""
    summary: str
    """One-line description for a table."""
    parameters: tuple[Parameter, ...]
    """All arguments that a configuration may contain."""

    def parameter(self, name: str) -> Parameter | None:
        """Return the argument with this ``name``, or ``None``."""
        return self._by_name.get(name)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of all arguments."""
        return tuple(self._by_name)

    @cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {item.name: item for item in self.parameters}


@attrs.frozen(kw_only=True)
class OptimizerEntry(Entry):
    """Catalogue entry of an optimizer: arguments, states and requirements."""

    family: Family
    """``"deepspeed"`` for names in DeepSpeed's configuration, ``"torch"`` for classes of
    ``torch.optim`` that DeepSpeed looks up by name, ``"package"`` for optional packages,
    ``"zerotune"`` for zerotune's own."""
    states: tuple[str, ...] = ()
    """Names of the state tensors for each parameter, each of the parameter's size; in fp32 unless
    ``summary`` says otherwise."""
    conditional_states: Mapping[str, str] = attrs.field(factory=dict)
    """Additional states, by the argument that enables them if it is true or nonzero."""
    fp32_per_weight: float | None = None
    """Size of all states per weight, counted in fp32 numbers; ``None`` means one for each state."""
    refusal: str | None = None
    """Why the optimizer can never run; ``None`` if it can."""
    instead: str | None = None
    """The closest alternative to an optimizer that cannot run anywhere."""
    adam_like: bool = False
    """Whether it keeps Adam's two moments and supports decoupled and L2 decay."""
    requires: tuple[str, ...] = ()
    """Its requirements in words."""
    package: str | None = None
    """Module of the optional package that provides it (``"prodigyopt"``, ``"mup"``)."""
    implementation: str | None = None
    """Class name in the package, if it differs from ``name``."""
    extra: str | None = None
    """The zerotune extra that installs the package."""
    own_schedule: bool = False
    """Whether it adapts its own learning rate; if so, no schedule is used by default."""
    renamed: Mapping[str, str] = attrs.field(factory=dict)
    """Maps this optimizer's argument names to AdamW's where they differ, for a fallback to
    AdamW."""
    lr_scale: str | None = None
    """How its usual learning rate differs from AdamW's; ``None`` if it does not."""
    streams: bool = False
    """Whether it can update streamed weights in host memory, one unit (such as a block) at a
    time."""

    def states_for(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of each parameter's fp32 states, given the arguments ``params``."""
        extra = tuple(state for key, state in self.conditional_states.items() if params.get(key))
        return self.states + extra

    def states_per_weight(self, params: Mapping[str, Any] | None = None) -> float:
        """Return the size of the states per weight, counted in fp32 numbers of 4 bytes.

        Args:
            params: The optimizer's arguments; momentum and AMSGrad add states.
        """
        if self.fp32_per_weight is not None:
            return self.fp32_per_weight
        return float(len(self.states_for(params or {})))

    def streamed_bytes_per_weight(
        self,
        params: Mapping[str, Any] | None = None,
        *,
        split_masters: bool = False,
        gradients: bool = True,
    ) -> float:
        """Return the bytes of host memory per trained weight if bf16 weights are streamed.

        Args:
            params: The optimizer's arguments.
            split_masters: Whether each fp32 master weight is stored as its bf16 weight and the low
                16 bits.
            gradients: Whether host memory stores the bf16 gradients of all weights at the same
                time.
        """
        masters = 2 if split_masters else 4
        return 2 + masters + 4 * self.states_per_weight(params) + (2 if gradients else 0)


# -- The optimizers themselves.


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
    return Parameter(name="lr", default=default, low=0, low_open=True)


def betas(default: tuple[float, float] = (0.9, 0.999), **kwargs: Any) -> Parameter:
    """Create the argument for the moments' decay rates."""
    return Parameter(
        name="betas", type="floats", default=default, length=2, low=0, high=1, high_open=True,
        **kwargs,
    )  # fmt: skip


def eps(default: float = 1e-8, **kwargs: Any) -> Parameter:
    """Create the argument that keeps the denominator above zero."""
    return Parameter(name="eps", default=default, low=0, low_open=True, **kwargs)


def weight_decay(default: float = 0.0, **kwargs: Any) -> Parameter:
    """Create the weight decay argument."""
    return Parameter(name="weight_decay", default=default, low=0, **kwargs)


def torch_switches(*names: str, **kwargs: Any) -> tuple[Parameter, ...]:
    """Create arguments for ``torch.optim``'s switches, with torch's defaults."""
    return tuple(
        flag(name, optional=True, nullable=name in {"foreach", "fused"}, **kwargs) for name in names
    )


# -- The twelve names of DeepSpeed's configuration.


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

_MUP = "the package mup, and base shapes set on the model before the engine starts"
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
            integer("ns_steps", 5),
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
        # Muon's matrices have one moment, Adam's parameters two; the larger stands for both.
        fp32_per_weight=2.0,
        requires=("the names and shapes of the model's parameters",),
        renamed={"adam_lr": "lr"},
        lr_scale="about a hundred times larger",
    ),
)

_OF_SGD: Final = (
    lr(1e-3),
    number("momentum", 0.0),
    number("dampening", 0.0),
    weight_decay(),
    flag("nesterov"),
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
        parameters=_OF_SGD,
        conditional_states={"momentum": "momentum_buffer"},
        requires=(_MUP,),
        package="mup",
        implementation="SGD",
        extra="mup",
        lr_scale="larger",
    ),
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
        lr_scale="larger" if base == "Lamb" else None,
        refusal="removed in DeepSpeed 0.19 (PR #8490); available only in DeepSpeed 0.18 and older, "
        "at stage 0",
        instead="AdamW",
    )
    for name, base in (("OneBitAdam", "Adam"), ("OneBitLamb", "Lamb"), ("ZeroOneAdam", "Adam"))
)

DEEPSPEED_ENTRIES: Final[tuple[OptimizerEntry, ...]] = (
    *_ADAM_FAMILY,
    *_OTHERS,
    *_MUP_FAMILY,
    *_ONE_BIT_FAMILY,
)


# -- The public classes of ``torch.optim`` that share no name with DeepSpeed's.


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
            Parameter(name="etas", type="floats", default=(0.5, 1.2), length=2, low=0),
            Parameter(name="step_sizes", type="floats", default=(1e-6, 50.0), length=2, low=0),
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
            number("beta2_decay", -0.8, low=None, high=0),
            Parameter(name="eps", type="any", default=(None, 1e-3)),
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


# -- Optimizers of optional packages that users of diffusion trainers ask for.


_EXTRA: Final = "optimizers"


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
        requires=(
            "the package bitsandbytes",
            "bitsandbytes 0.50 or later without CUDA or with offload",
        ),
        package="bitsandbytes.optim",
        extra=_EXTRA,
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
            extra=_EXTRA,
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
            Parameter(name="beta3", optional=True, default=None, nullable=True, low=0),
            eps(),
            weight_decay(),
            flag("decouple", default=True),
            flag("use_bias_correction"),
            flag("safeguard_warmup"),
            number("d0", 1e-6, low_open=True),
            number("d_coef", 1.0, low_open=True),
            Parameter(name="growth_rate", optional=True, low=1),
            integer("slice_p", 1),
        ),
        states=("exp_avg", "exp_avg_sq", "s", "p0"),
        requires=("the package prodigyopt", "one parameter group"),
        package="prodigyopt",
        extra=_EXTRA,
        own_schedule=True,
        lr_scale="1 (a multiplier for the estimated rate), thousands of times larger",
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
        extra=_EXTRA,
        own_schedule=True,
        lr_scale="1 to 10 times larger",
    ),
)


# -- Optimizers that only zerotune has.


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
    ),
)


# -- Their names.


OPTIMIZER_TYPE: Final = "optimizer.type"

DEFAULT_OPTIMIZER: Final = "AdamW"

DECAY_SPELLINGS: Final = ("adam_w_mode", "adamw_mode", "decoupled_weight_decay")
"""Names of Adam's decay switch in DeepSpeed's configuration, DeepSpeed's classes and torch."""

OPTIMIZERS: Final[Mapping[str, OptimizerEntry]] = MappingProxyType(
    {
        entry.name: entry
        for entry in (*DEEPSPEED_ENTRIES, *TORCH_ENTRIES, *PACKAGE_ENTRIES, *OWN_ENTRIES)
    }
)
"""Entries of all optimizers, by canonical name."""

ONE_BIT: Final = frozenset({entry.name for entry in DEEPSPEED_ENTRIES if entry.refusal is not None})
"""DeepSpeed's optimizers that compress communication to one bit."""

TORCH_NAMES: Final[frozenset[str]] = frozenset(
    {entry.name for entry in TORCH_ENTRIES} | {"Adam", "AdamW", "Adagrad", "Muon"}
)
"""Public optimizer classes of ``torch.optim``; the last four share names with DeepSpeed's."""

SPELLINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "adamwtorch": "AdamW",
        "adamwtorchfused": "AdamW",
        "adamwhf": "AdamW",
        "1bitadam": "OneBitAdam",
        "1bitlamb": "OneBitLamb",
        "01adam": "ZeroOneAdam",
        "zerooneadamw": "ZeroOneAdam",
        "adamw8bitbnb": "AdamW8bit",
        "bnbadamw8bit": "AdamW8bit",
        "schedulefree": "AdamWScheduleFree",
        "schedulefreeadamw": "AdamWScheduleFree",
        "aoadamw8bit": "TorchAOAdamW8bit",
        "aoadamw4bit": "TorchAOAdamW4bit",
    }
)
"""Exact aliases of optimizer names, normalised by ``squash``."""

IMPLEMENTATION_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fusedadam": "AdamW",
        "fusedadamw": "AdamW",
        "cpuadam": "AdamW",
        "cpuadamw": "AdamW",
        "deepspeedcpuadam": "AdamW",
        "deepspeedcpuadamw": "AdamW",
        "deepspeedcpuadagrad": "Adagrad",
        "cpuadagrad": "Adagrad",
        "fusedlion": "Lion",
        "cpulion": "Lion",
        "deepspeedcpulion": "Lion",
        "fusedlamb": "Lamb",
        "muonwithauxadam": "Muon",
    }
)
"""Class names that are read as optimizer names, because DeepSpeed chooses the class itself."""


BY_WORD: Final[Mapping[str, str]] = {
    **{squash(name): name for name in OPTIMIZERS},
    **SPELLINGS,
    **IMPLEMENTATION_NAMES,
}
"""Canonical name for each spelling; spellings are normalised by ``squash``."""

Origin = Literal["plain", "torch", "deepspeed", "package"]

_PREFIXES: Final[Mapping[Origin, tuple[str, ...]]] = {
    "torch": ("torch.optim", "optim"),
    "package": ("bitsandbytes", "bnb", "prodigyopt", "schedulefree"),
    "deepspeed": ("deepspeed", "mup"),
}


@attrs.frozen(kw_only=True)
class OptimizerName:
    """A canonical optimizer name and its original spelling."""

    canonical: str
    """``"AdamW"``."""
    written: str
    """As given."""
    origin: Origin = "plain"
    """Kind of prefix: none, ``torch.optim.``, ``deepspeed.`` or the name of a package."""
    implementation: bool = False
    """Whether the spelling is a class name (``FusedAdam``) instead of an optimizer name."""

    def under(self, params: Mapping[str, Any]) -> str:
        """Return the canonical name of the optimizer, given its arguments ``params``."""
        decoupled = next((params[key] for key in DECAY_SPELLINGS if key in params), True)
        if self.implementation and self.canonical == "AdamW" and decoupled is False:
            # FusedAdam(adam_w_mode=False) is L2 Adam, and AdamW would ignore the switch.
            return "Adam"
        return self.canonical


def canonical(name: str, params: Mapping[str, Any] | None = None) -> str | None:
    """Return the canonical name of the optimizer that a configuration requests.

    Args:
        name: Any spelling accepted by ``normalise_optimizer_name``.
        params: Arguments of the optimizer; for example ``FusedAdam`` with ``adam_w_mode`` false is
            Adam.

    Returns:
        A key of ``OPTIMIZERS``; ``None`` if the name is unknown.
    """
    parsed = _parsed(name)
    return None if parsed is None else parsed.under(params or {})


def clipping_in_optimizer(params: Mapping[str, Any]) -> InvalidValueError | None:
    """Return the error for gradient clipping among the optimizer's arguments, or ``None``."""
    if "max_grad_norm" not in params:
        return None
    return InvalidValueError(
        "clipping is not an argument of the optimizer in DeepSpeed",
        key="optimizer.params.max_grad_norm",
        value=params["max_grad_norm"],
        fix="move it to gradient_clipping at the top level",
        edits=[{"": UNSET, "gradient_clipping": params["max_grad_norm"]}],
    )


def entry_of(name: str | None) -> OptimizerEntry:
    """Return the entry for ``name``, or AdamW's entry if the named optimizer can never run.

    Args:
        name: A canonical name; ``None`` if it is unknown.
    """
    entry = None if name is None else OPTIMIZERS.get(name)
    return OPTIMIZERS[DEFAULT_OPTIMIZER] if entry is None or entry.refusal else entry


def normalise_optimizer_name(name: str) -> str:
    """Return the canonical name of an optimizer.

    Args:
        name: Name in upper or lower case, with ``-``, ``_`` or spaces, with a ``torch.optim.`` or
            ``deepspeed.ops.`` prefix, or an alias (``"1-bit adam"``, ``"FusedAdam"``).

    Returns:
        A key of ``OPTIMIZERS``.

    Raises:
        OptimizerError: The name is unknown; the message suggests the closest name.
        InvalidValueError: ``name`` is not text.
    """
    return parse_optimizer_name(name).canonical


def parse_optimizer_name(name: Any, *, key: str = OPTIMIZER_TYPE) -> OptimizerName:
    """Return the canonical name of an optimizer together with its original spelling.

    Args:
        name: The name as written.
        key: Path of the setting that contains the name, for messages.
    """
    if not isinstance(name, str) or not name.strip():
        raise InvalidValueError(
            "an optimizer name must be text", key=key, value=name, fix='write for example "AdamW"'
        )
    parsed = _parsed(name)
    if parsed is None:
        raise _unknown_optimizer(name, key)
    return parsed


def _parsed(name: str) -> OptimizerName | None:
    prefix, _, last = name.strip().rpartition(".")
    origin = _origin(prefix)
    found = last if last in OPTIMIZERS else BY_WORD.get(squash(last))
    if origin is None or found is None or not _belongs(found, origin):
        return None
    return OptimizerName(
        canonical=found,
        written=name,
        origin=origin,
        implementation=last != found and squash(last) in IMPLEMENTATION_NAMES,
    )


def _origin(prefix: str) -> Origin | None:
    path = prefix.strip().lower()
    if not path:
        return "plain"
    for origin, modules in _PREFIXES.items():
        if any(path == module or path.startswith(f"{module}.") for module in modules):
            return origin
    return None


def _belongs(name: str, origin: Origin) -> bool:
    """Return whether the name may have this prefix: torch.optim has no OneBitAdam."""
    if origin == "torch":
        return name in TORCH_NAMES
    family = OPTIMIZERS[name].family
    if family == "zerotune":
        return origin == "plain"
    return origin != "package" or family == "package"


def _unknown_optimizer(name: str, key: str) -> OptimizerError:
    prefix, _, last = name.strip().rpartition(".")
    close = did_you_mean(last, OPTIMIZERS)
    known = ", ".join(sorted(OPTIMIZERS))
    where = f" in {prefix}" if prefix else ""
    fix = (
        f"did you mean {' or '.join(close)}? Known names: {known}"
        if close
        else f"use one of {known}"
    )
    return OptimizerError(
        f"zerotune knows no optimizer with this name{where}",
        key=key,
        value=name,
        fix=fix,
        edits=writes(*close),
    )


# -- The optimizer and schedule of a resolved plan, as values.


OptimizerSource = Literal["deepspeed", "torch", "zerotune", "package"]
SchedulerSource = Literal["deepspeed", "zerotune"]
WeightDecay = Literal["decoupled", "l2"]


@attrs.frozen(kw_only=True)
class GroupChoice:
    """Parameters that share optimizer arguments."""

    name: str
    """Name of the group (``"no_decay"``)."""
    params: Mapping[str, Any]
    """The group's explicit arguments; all others come from the optimizer."""
    parameters: tuple[str, ...]
    """Dotted names of its parameters, in the model's order."""
    numel: int
    """Total number of elements of the group's parameters."""
    until: int | None = None
    """Number of optimizer steps after which the group is no longer trained."""


@attrs.frozen(kw_only=True)
class OptimizerChoice:
    """The optimizer chosen by ``OptimizerResolver``; an engine must run exactly this optimizer."""

    name: str
    """Canonical name (``"AdamW"``)."""
    params: Mapping[str, Any]
    """Explicit values of all arguments, never ``"auto"``; always includes ``lr``."""
    implementation: str
    """Class that performs the update: ``"FusedAdam"``, ``"DeepSpeedCPUAdam"``, ``"AdamW"`` …
    (``type(optimizer).__name__``)."""
    source: OptimizerSource = "deepspeed"
    """``"deepspeed"``: DeepSpeed builds it from the rendered configuration. Otherwise, the engine
    builds it from a class of ``torch.optim``, zerotune or an optional package, and passes it to
    DeepSpeed."""
    weight_decay_mode: WeightDecay | None = None
    """Decay mode of Adam-like optimizers, ``None`` for others."""
    package: str | None = None
    """Module of the class if ``source`` is ``"package"`` (``"prodigyopt"``)."""
    groups: tuple[GroupChoice, ...] = ()
    """Parameter groups, in order, which together contain all trainable parameters; empty if there
    is only one group."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return float(self.params["lr"])


@attrs.frozen(kw_only=True)
class SchedulerChoice:
    """The learning-rate schedule, counted in optimizer steps."""

    name: str
    """Canonical name from DeepSpeed (``"WarmupLR"``) or diffusers (``"cosine"``)."""
    params: Mapping[str, Any]
    """Explicit values of all arguments, never ``"auto"``."""
    source: SchedulerSource = "deepspeed"
    """``"deepspeed"`` if DeepSpeed's class sets the learning rate; ``"zerotune"`` if zerotune does,
    with the same formula scaled for each parameter group."""
