"""Every optimizer zerotune knows by name: entries, aliases, and where each name comes from.

Facts only: whether one can run *here* is decided in ``capability.py``, which class does the work
in ``implementation.py``. Sources: DeepSpeed 0.19.8 (``runtime/engine.py``, ``ops/``) and
``torch.optim`` of torch 2.13; a test compares the entries with the real constructors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from zerotune.optim.entries import (
    DEEPSPEED_ENTRIES,
    OWN_ENTRIES,
    PACKAGE_ENTRIES,
    TORCH_ENTRIES,
    OptimizerEntry,
)

DEFAULT_OPTIMIZER: Final = "AdamW"

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

DEEPSPEED_PREFIXES: Final = (
    "deepspeed.ops.adam",
    "deepspeed.ops.adagrad",
    "deepspeed.ops.lion",
    "deepspeed.ops.lamb",
    "deepspeed.runtime.fp16.onebit",
    "deepspeed.runtime.zero.muon",
    "deepspeed.ops",
    "deepspeed",
    "mup",
)
TORCH_PREFIXES: Final = ("torch.optim", "optim")
PACKAGE_PREFIXES: Final = ("bitsandbytes", "bnb", "prodigyopt", "schedulefree")
