"""What one optimizer of the catalogue is made of, and shorthands to write it down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from zerotune.optim.parameters import Parameter

Family = Literal["deepspeed", "torch", "package", "zerotune"]

ADAM_LR: Final = 1e-4
"""Peak learning rate for Adam's relatives on diffusion models, as diffusers' examples use it."""

FUSED_ADAM: Final = frozenset({"FusedAdam"})
CPU_ADAM: Final = frozenset({"DeepSpeedCPUAdam", "ZenFlowCPUAdam"})
DEEPSPEED_ADAM: Final = FUSED_ADAM | CPU_ADAM
TORCH_ADAM: Final = frozenset({"AdamW", "Adam"})


@attrs.frozen(kw_only=True)
class OptimizerEntry:
    """One optimizer: its arguments, its states, and what it asks for."""

    name: str
    """Canonical name (``"AdamW"``)."""
    family: Family
    """``"deepspeed"`` for the names of DeepSpeed's configuration, ``"torch"`` for the classes
    of ``torch.optim`` that DeepSpeed only knows by lookup, ``"package"`` for those of optional
    packages, ``"zerotune"`` for those that nobody else has."""
    summary: str
    """One line for a table."""
    parameters: tuple[Parameter, ...]
    """All arguments a configuration may write."""
    states: tuple[str, ...] = ()
    """Tensors kept per parameter, each of the parameter's size; fp32 unless ``summary`` says."""
    conditional_states: Mapping[str, str] = attrs.field(factory=dict)
    """Further states, by the argument that asks for each when it is not zero or false."""
    adam_like: bool = False
    """Whether it keeps Adam's two moments, and decay can be decoupled or L2."""
    requires: tuple[str, ...] = ()
    """What it needs, in words."""
    package: str | None = None
    """Module of an optional package that has it (``"prodigyopt"``, ``"mup"``)."""
    implementation: str | None = None
    """Its class there, where that is not ``name``."""
    extra: str | None = None
    """Extra of zerotune that installs the package."""
    own_schedule: bool = False
    """Whether it sets its own pace, so that no schedule is the right default."""
    renamed: Mapping[str, str] = attrs.field(factory=dict)
    """Its own arguments that mean one of AdamW's, for a fallback."""
    lr_scale: str | None = None
    """How its usual learning rate differs from AdamW's; ``None`` when it does not."""

    def parameter(self, name: str) -> Parameter | None:
        """The argument called ``name``, or ``None``."""
        return next((item for item in self.parameters if item.name == name), None)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of all arguments."""
        return tuple(item.name for item in self.parameters)

    def states_for(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the fp32 states per parameter that ``params`` lead to.

        Args:
            params: The optimizer's arguments (``{"momentum": 0.9}``).
        """
        extra = tuple(state for key, state in self.conditional_states.items() if params.get(key))
        return self.states + extra


def lr(default: float) -> Parameter:
    """The learning rate."""
    return Parameter(name="lr", default=default, low=0, low_open=True)


def betas(default: tuple[float, float] = (0.9, 0.999), **kwargs: Any) -> Parameter:
    """Decay rates of the moments."""
    return Parameter(
        name="betas", type="floats", default=default, length=2, low=0, high=1, high_open=True,
        **kwargs,
    )  # fmt: skip


def eps(default: float = 1e-8, **kwargs: Any) -> Parameter:
    """Term that keeps the denominator off zero."""
    return Parameter(name="eps", default=default, low=0, low_open=True, **kwargs)


def weight_decay(default: float = 0.0, **kwargs: Any) -> Parameter:
    """Weight decay."""
    return Parameter(name="weight_decay", default=default, low=0, **kwargs)


def flag(name: str, default: bool = False, **kwargs: Any) -> Parameter:
    """A switch."""
    return Parameter(name=name, type="bool", default=default, **kwargs)


def number(name: str, default: float, *, low: float | None = 0, **kwargs: Any) -> Parameter:
    """A float, not negative unless said otherwise."""
    return Parameter(name=name, default=default, low=low, **kwargs)


def torch_switches(*names: str, **kwargs: Any) -> tuple[Parameter, ...]:
    """Switches of ``torch.optim`` that are left to torch unless somebody writes them."""
    return tuple(
        flag(name, optional=True, nullable=name in {"foreach", "fused"}, **kwargs) for name in names
    )
