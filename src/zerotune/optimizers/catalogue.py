"""Every optimizer by name: the entries, other spellings, and where a written name comes from.

``canonical`` is what the plan, its rules and its estimates ask; nobody compares spellings. Facts
only: whether one can run *here*, and which class does the work, is said by
``zerotune.optim.capability``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs

from zerotune._util.text import did_you_mean, squash
from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.optimizers.entries import (
    DEEPSPEED_ENTRIES,
    OWN_ENTRIES,
    PACKAGE_ENTRIES,
    TORCH_ENTRIES,
)
from zerotune.optimizers.parameters import OptimizerEntry

OPTIMIZER_TYPE: Final = "optimizer.type"

DEFAULT_OPTIMIZER: Final = "AdamW"

DECAY_SPELLINGS: Final = ("adam_w_mode", "adamw_mode", "decoupled_weight_decay")
"""Adam's switch in DeepSpeed's configuration, and as DeepSpeed's classes and torch spell it."""

OPTIMIZERS: Final[Mapping[str, OptimizerEntry]] = MappingProxyType(
    {
        entry.name: entry
        for entry in (*DEEPSPEED_ENTRIES, *TORCH_ENTRIES, *PACKAGE_ENTRIES, *OWN_ENTRIES)
    }
)
"""All entries by canonical name."""

ONE_BIT: Final = frozenset({entry.name for entry in DEEPSPEED_ENTRIES if entry.refusal is not None})
"""Those of DeepSpeed's that send what they have compressed to one bit."""

TORCH_NAMES: Final[frozenset[str]] = frozenset(
    {entry.name for entry in TORCH_ENTRIES} | {"Adam", "AdamW", "Adagrad", "Muon"}
)
"""Public optimizer classes of ``torch.optim``; the last four share a name with DeepSpeed's."""

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
"""Other spellings of a name, as ``squash`` leaves them; they mean exactly the same."""

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
"""Names of classes: DeepSpeed picks the class itself, so they stand for an optimizer name."""


BY_WORD: Final[Mapping[str, str]] = {
    **{squash(name): name for name in OPTIMIZERS},
    **SPELLINGS,
    **IMPLEMENTATION_NAMES,
}
"""Canonical names by everything that stands for them, as ``squash`` leaves it."""

Origin = Literal["plain", "torch", "deepspeed", "package"]

_PREFIXES: Final[Mapping[Origin, tuple[str, ...]]] = {
    "torch": ("torch.optim", "optim"),
    "package": ("bitsandbytes", "bnb", "prodigyopt", "schedulefree"),
    "deepspeed": ("deepspeed", "mup"),
}


@attrs.frozen(kw_only=True)
class OptimizerName:
    """A name and how it was written."""

    canonical: str
    """``"AdamW"``."""
    written: str
    """As given."""
    origin: Origin = "plain"
    """The prefix it carried: none, ``torch.optim.``, ``deepspeed.`` or a package's."""
    implementation: bool = False
    """Whether a class was named (``FusedAdam``) instead of an optimizer."""

    def under(self, params: Mapping[str, Any]) -> str:
        """Canonical name that it stands for with these arguments."""
        decoupled = next((params[key] for key in DECAY_SPELLINGS if key in params), True)
        if self.implementation and self.canonical == "AdamW" and decoupled is False:
            # FusedAdam(adam_w_mode=False) is L2 Adam, and AdamW would ignore the switch.
            return "Adam"
        return self.canonical


def canonical(name: str, params: Mapping[str, Any] | None = None) -> str | None:
    """Canonical name of the optimizer that a configuration asks for.

    Args:
        name: As written, in any spelling that ``normalise_optimizer_name`` takes.
        params: Its arguments: ``FusedAdam`` with ``adam_w_mode`` false is Adam.

    Returns:
        A key of ``OPTIMIZERS``; ``None`` when nobody knows the name.
    """
    parsed = _parsed(name)
    return None if parsed is None else parsed.under(params or {})


def entry_of(name: str | None) -> OptimizerEntry:
    """The entry of what runs where ``name`` is asked for: AdamW's for what never runs.

    Args:
        name: A canonical name; ``None`` for one that nobody knows.
    """
    entry = None if name is None else OPTIMIZERS.get(name)
    return OPTIMIZERS[DEFAULT_OPTIMIZER] if entry is None or entry.refusal else entry


def normalise_optimizer_name(name: str) -> str:
    """Canonical name of an optimizer.

    Args:
        name: In any case, with ``-``, ``_`` or spaces, with a ``torch.optim.`` or
            ``deepspeed.ops.`` prefix, or an alias (``"1-bit adam"``, ``"FusedAdam"``).

    Returns:
        A key of ``OPTIMIZERS``.

    Raises:
        OptimizerError: Nobody knows the name; the message suggests the closest.
        InvalidValueError: ``name`` is not text.
    """
    return parse_optimizer_name(name).canonical


def parse_optimizer_name(name: Any, *, key: str = OPTIMIZER_TYPE) -> OptimizerName:
    """``normalise_optimizer_name`` that also tells how the name was written.

    Args:
        name: The name as written.
        key: Where it was written, for the message.

    Raises:
        OptimizerError: Nobody knows the name.
        InvalidValueError: ``name`` is not text, or empty.
    """
    if not isinstance(name, str) or not name.strip():
        raise InvalidValueError(
            "an optimizer is named by text", key=key, value=name, fix='write for example "AdamW"'
        )
    parsed = _parsed(name)
    if parsed is None:
        raise _unknown(name, key)
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
    """Whether a prefix may stand before the name: torch.optim has no OneBitAdam."""
    if origin == "torch":
        return name in TORCH_NAMES
    family = OPTIMIZERS[name].family
    if family == "zerotune":
        return origin == "plain"
    return origin != "package" or family == "package"


def _unknown(name: str, key: str) -> OptimizerError:
    prefix, _, last = name.strip().rpartition(".")
    close = did_you_mean(last, OPTIMIZERS)
    known = ", ".join(sorted(OPTIMIZERS))
    where = f" in {prefix}" if prefix else ""
    fix = (
        f"did you mean {' or '.join(close)}? Known are {known}" if close else f"use one of {known}"
    )
    return OptimizerError(
        f"zerotune knows no optimizer of this name{where}, and does not guess one",
        key=key,
        value=name,
        fix=fix,
    )
