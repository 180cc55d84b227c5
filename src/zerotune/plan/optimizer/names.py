"""Names of optimizers: every accepted spelling, and the optimizer that it means."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from zerotune._util.text import did_you_mean, squash
from zerotune.errors import InvalidValueError, OptimizerError, writes
from zerotune.plan.optimizer.catalogue import OPTIMIZERS
from zerotune.plan.optimizer.entries import OptimizerEntry

OPTIMIZER_TYPE: Final = "optimizer.type"

DEFAULT_OPTIMIZER: Final = "AdamW"

DECAY_SPELLINGS: Final = ("adam_w_mode", "adamw_mode", "decoupled_weight_decay")
"""Names of Adam's decay switch in DeepSpeed's configuration, DeepSpeed's classes and torch."""

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


@attrs.frozen(kw_only=True)
class OptimizerName:
    """A canonical optimizer name and its original spelling."""

    canonical: str
    """``"AdamW"``."""
    written: str
    """As given."""
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
        name: Name in upper or lower case, with ``-``, ``_`` or spaces, or an alias
            (``"1-bit adam"``, ``"FusedAdam"``).

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
            "an optimizer name must be text", 'write for example "AdamW"', key, name
        )
    parsed = _parsed(name)
    if parsed is None:
        raise _unknown_optimizer(name, key)
    return parsed


def _parsed(name: str) -> OptimizerName | None:
    word = name.strip()
    found = word if word in OPTIMIZERS else BY_WORD.get(squash(word))
    if found is None:
        return None
    is_class = word != found and squash(word) in IMPLEMENTATION_NAMES
    return OptimizerName(canonical=found, written=name, implementation=is_class)


def _unknown_optimizer(name: str, key: str) -> OptimizerError:
    close = did_you_mean(name.strip().rpartition(".")[2], OPTIMIZERS)
    known = ", ".join(sorted(OPTIMIZERS))
    fix = (
        f"did you mean {' or '.join(close)}? Known names: {known}"
        if close
        else f"use one of {known}"
    )
    return OptimizerError(
        "zerotune knows no optimizer with this name", fix, key, name, edits=writes(*close)
    )
