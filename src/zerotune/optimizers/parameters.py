"""What an optimizer or a schedule takes, keeps and asks for: the entries of the catalogue, as data.

What a value may hold is said by numbers and words here; ``zerotune.optim.settle`` checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import attrs

from zerotune.errors import UNSET

ParameterType = Literal["float", "int", "bool", "floats", "str", "any"]


@attrs.frozen(kw_only=True)
class Parameter:
    """One argument, described by data so that a page or a table can be made of it."""

    name: str
    """Key under ``params``, as DeepSpeed or torch spells it."""
    type: ParameterType = "float"
    """``"floats"`` is a fixed number of floats (``betas``); ``"any"`` is passed on unchecked."""
    default: Any = UNSET
    """Value for ``"auto"``; ``UNSET`` when there is none and it must be given."""
    native: Any = UNSET
    """What DeepSpeed's class uses when the key is not written, where that is not ``default``."""
    low: float | None = None
    """Smallest value allowed (of each element)."""
    high: float | None = None
    """Largest value allowed (of each element)."""
    low_open: bool = False
    """Whether ``low`` itself is refused."""
    high_open: bool = False
    """Whether ``high`` itself is refused."""
    length: int | None = None
    """Number of elements of ``"floats"``."""
    choices: tuple[str, ...] = ()
    """Allowed words of a ``"str"``."""
    nullable: bool = False
    """Whether ``None`` is a value."""
    optional: bool = False
    """Whether it is left out unless somebody writes it (a switch without effect on results)."""
    only: frozenset[str] = frozenset()
    """Classes whose constructor takes it; empty means all of them."""

    @property
    def unwritten(self) -> Any:
        """The value it has when nobody writes the key."""
        return self.default if self.native is UNSET else self.native

    @property
    def range(self) -> str:
        """The allowed values in short, for a table."""
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
        """Whether the class called ``implementation`` takes this argument."""
        return not self.only or implementation in self.only


def number(name: str, default: float, *, low: float | None = 0, **kwargs: Any) -> Parameter:
    """A float, not negative unless said otherwise."""
    return Parameter(name=name, default=default, low=low, **kwargs)


def integer(name: str, default: Any = UNSET, *, low: int = 1, **kwargs: Any) -> Parameter:
    """A whole number, positive unless said otherwise."""
    return Parameter(name=name, type="int", default=default, low=low, **kwargs)


def flag(name: str, default: bool = False, **kwargs: Any) -> Parameter:
    """A switch."""
    return Parameter(name=name, type="bool", default=default, **kwargs)


# -- Entries of the catalogue.


Family = Literal["deepspeed", "torch", "package", "zerotune"]


@attrs.frozen(kw_only=True)
class Entry:
    """An optimizer or a schedule that has a name and takes arguments."""

    name: str
    """Canonical name (``"AdamW"``, ``"WarmupLR"``)."""
    summary: str
    """One line for a table."""
    parameters: tuple[Parameter, ...]
    """All arguments a configuration may write."""

    def parameter(self, name: str) -> Parameter | None:
        """The argument called ``name``, or ``None``."""
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
    """One optimizer: its arguments, its states, and what it asks for."""

    family: Family
    """``"deepspeed"`` for the names of DeepSpeed's configuration, ``"torch"`` for the classes
    of ``torch.optim`` that DeepSpeed only knows by lookup, ``"package"`` for those of optional
    packages, ``"zerotune"`` for those that nobody else has."""
    states: tuple[str, ...] = ()
    """Tensors kept per parameter, each of the parameter's size; fp32 unless ``summary`` says."""
    conditional_states: Mapping[str, str] = attrs.field(factory=dict)
    """Further states, by the argument that asks for each when it is not zero or false."""
    fp32_per_weight: float | None = None
    """fp32 numbers that the states take per weight, where that is not one for each of them."""
    refusal: str | None = None
    """Why it runs nowhere; AdamW does in its place, or nothing."""
    instead: str | None = None
    """What comes closest to one that runs nowhere."""
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

    def states_for(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the fp32 states per parameter that ``params`` lead to.

        Args:
            params: The optimizer's arguments (``{"momentum": 0.9}``).
        """
        extra = tuple(state for key, state in self.conditional_states.items() if params.get(key))
        return self.states + extra

    def states_per_weight(self, params: Mapping[str, Any] | None = None) -> float:
        """fp32 numbers (4 bytes each) that the states take per weight.

        Args:
            params: The optimizer's arguments; momentum and AMSGrad need more.
        """
        if self.fp32_per_weight is not None:
            return self.fp32_per_weight
        return float(len(self.states_for(params or {})))
