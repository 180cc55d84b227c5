"""Every optimizer by name: the entries, other spellings, and where a written name comes from.

Facts only: whether one can run *here*, and which class does the work, is said by
``capability.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs

from zerotune._util.text import did_you_mean, squash
from zerotune.errors import InvalidValueError, OptimizerError
from zerotune.optim.entries import DEEPSPEED_ENTRIES, OWN_ENTRIES, PACKAGE_ENTRIES, TORCH_ENTRIES
from zerotune.optim.parameters import OptimizerEntry

OPTIMIZER_TYPE: Final = "optimizer.type"

DEFAULT_OPTIMIZER: Final = "AdamW"

ADAM: Final = frozenset({"Adam", "AdamW"})
"""The two whose decay one of DeepSpeed's switches decides."""

OPTIMIZERS: Final[Mapping[str, OptimizerEntry]] = MappingProxyType(
    {
        entry.name: entry
        for entry in (*DEEPSPEED_ENTRIES, *TORCH_ENTRIES, *PACKAGE_ENTRIES, *OWN_ENTRIES)
    }
)
"""All entries by canonical name."""

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


_BY_WORD: Final[Mapping[str, str]] = {
    **{squash(name): name for name in OPTIMIZERS},
    **SPELLINGS,
    **IMPLEMENTATION_NAMES,
}

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
    prefix, _, last = name.strip().rpartition(".")
    origin = _origin(prefix)
    canonical = last if last in OPTIMIZERS else _BY_WORD.get(squash(last))
    known = canonical is not None and _belongs(canonical, origin)
    if origin is None or canonical is None or not known:
        raise _unknown(name, last, prefix, key)
    return OptimizerName(
        canonical=canonical,
        written=name,
        origin=origin,
        implementation=last != canonical and squash(last) in IMPLEMENTATION_NAMES,
    )


def _origin(prefix: str) -> Origin | None:
    path = prefix.strip().lower()
    if not path:
        return "plain"
    for origin, modules in _PREFIXES.items():
        if any(path == module or path.startswith(f"{module}.") for module in modules):
            return origin
    return None


def _belongs(canonical: str, origin: str | None) -> bool:
    """Whether a prefix may stand before the name: torch.optim has no OneBitAdam."""
    if origin == "torch":
        return canonical in TORCH_NAMES
    family = OPTIMIZERS[canonical].family
    if family == "zerotune":
        return origin == "plain"
    return origin != "package" or family == "package"


def _unknown(name: str, last: str, prefix: str, key: str) -> OptimizerError:
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
