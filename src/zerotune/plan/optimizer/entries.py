"""Entries of the tables of optimizers and schedules, and their arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, Literal

import attrs

from zerotune.errors import UNSET
from zerotune.plan.values import Anything, Boolean, Choice, Integer, Kind, Numbers, Real

_SWITCH: Final = {"true": True, "false": False}


@attrs.frozen(kw_only=True)
class Parameter:
    """One argument of an optimizer or schedule, described for forms and tables."""

    name: str
    """Key under ``params`` in DeepSpeed's or torch's spelling."""
    kind: Kind = attrs.field(factory=Anything)
    """What the argument accepts; it never accepts ``"auto"``."""
    default: Any = UNSET
    """Value for ``"auto"``; ``UNSET`` if the argument is required."""
    native: Any = UNSET
    """Default of DeepSpeed's class if it differs from ``default``."""
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
    def words(self) -> tuple[str, ...]:
        """Words from which a form lets the user choose; empty for other kinds of values."""
        if isinstance(self.kind, Boolean):
            return tuple(_SWITCH)
        return self.kind.choices if isinstance(self.kind, Choice) else ()

    def accepts(self, implementation: str) -> bool:
        """Return whether the class named ``implementation`` accepts the argument."""
        return not self.only or implementation in self.only


def number(
    name: str,
    default: Any = UNSET,
    *,
    low: float = 0,
    above: float | None = None,
    high: float = math.inf,
    below: float | None = None,
    **kwargs: Any,
) -> Parameter:
    """Create a float argument, non-negative by default."""
    kind = Real(auto=False, minimum=low, maximum=high, above=above, below=below)
    return Parameter(name=name, kind=kind, default=default, **kwargs)


def numbers(
    name: str, default: tuple[float, ...], *, below: float | None = None, **kwargs: Any
) -> Parameter:
    """Create an argument of several non-negative floats."""
    kind = Numbers(each=Real(auto=False, below=below), length=len(default))
    return Parameter(name=name, kind=kind, default=default, **kwargs)


def integer(name: str, default: Any = UNSET, *, low: int = 1, **kwargs: Any) -> Parameter:
    """Create an integer argument, positive by default."""
    kind = Integer(auto=False, minimum=low)
    return Parameter(name=name, kind=kind, default=default, **kwargs)


def flag(name: str, default: bool = False, **kwargs: Any) -> Parameter:
    """Create a boolean argument."""
    kind = Boolean(auto=False, spellings=_SWITCH)
    return Parameter(name=name, kind=kind, default=default, **kwargs)


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
    """Module of the optional package that provides it (``"prodigyopt"``)."""
    implementation: str | None = None
    """Class name in the package, if it differs from ``name``."""
    own_schedule: bool = False
    """Whether it adapts its own learning rate; if so, no schedule is used by default."""
    streams: bool = False
    """Whether it can update streamed weights in host memory, one unit (such as a block) at a
    time."""
    must_stream: bool = False
    """Whether it updates nothing but streamed weights."""

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


OptimizerSource = Literal["deepspeed", "torch", "zerotune", "package"]
SchedulerSource = Literal["deepspeed", "zerotune"]
WeightDecay = Literal["decoupled", "l2"]
