"""Which class does the update, how it decays weights, and which arguments it takes.

Mirrors ``DeepSpeedEngine._configure_basic_optimizer`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune.optim.entries import OptimizerEntry
from zerotune.optim.situation import Situation
from zerotune.plan.choices import OptimizerSource, WeightDecay

CONFIGURATION_ONLY: Final = frozenset({"adam_w_mode", "torch_adam"})
"""Keys of DeepSpeed's configuration that no constructor of torch has."""

GROUP_RATES: Final = frozenset({"muon_lr", "adam_lr"})
"""Keys that become the learning rates of Muon's two kinds of groups."""


@attrs.frozen(kw_only=True)
class Implementation:
    """The class that does the update."""

    name: str
    """``type(optimizer).__name__`` of the basic optimizer."""
    source: OptimizerSource
    """Who builds it."""
    weight_decay_mode: WeightDecay | None
    """How it decays weights; ``None`` when it is not Adam-like."""
    package: str | None = None
    """Module of an optional package that has the class."""

    def takes(self, entry: OptimizerEntry, key: str) -> bool:
        """Whether ``key`` of ``entry`` may be handed to it."""
        if key in CONFIGURATION_ONLY:
            return self.source == "deepspeed"
        if key in GROUP_RATES:
            return False
        parameter = entry.parameter(key)
        return parameter is not None and parameter.accepts(self.name)


def implementation_of(
    entry: OptimizerEntry, params: Mapping[str, Any], situation: Situation
) -> Implementation:
    """The class that ``entry`` with ``params`` becomes in ``situation``.

    Args:
        entry: An optimizer that can run there.
        params: Its arguments; of these ``adam_w_mode``, ``torch_adam`` and
            ``decoupled_weight_decay`` matter.
        situation: Where it runs.
    """
    decay = decay_mode(entry, params)
    if entry.package is not None:
        return Implementation(
            name=entry.implementation or entry.name,
            source="package",
            package=entry.package,
            weight_decay_mode=decay,
        )
    if entry.name in _OWN and not _has_kernel(entry, situation):
        return Implementation(name=entry.name, source="zerotune", weight_decay_mode=decay)
    if entry.family == "torch" or not situation.uses_deepspeed:
        return Implementation(
            name=_torch_class(entry, decay), source="torch", weight_decay_mode=decay
        )
    return Implementation(
        name=_deepspeed_class(entry, params, situation, decay),
        source="deepspeed",
        weight_decay_mode=decay,
    )


_OWN: Final = frozenset({"AdamWBF16States", "Lion", "Lamb", "Muon"})
"""Those of which zerotune has a torch implementation."""

HAS_CPU_KERNEL: Final[Mapping[str, frozenset[str]]] = {
    # `op_builder/{mps,xpu}` of DeepSpeed 0.19.8; CUDA and ROCm share the CPU accelerator's ops.
    "Adagrad": frozenset({"cuda", "cpu", "xpu"}),
    "Lion": frozenset({"cuda", "cpu"}),
}


def _has_kernel(entry: OptimizerEntry, situation: Situation) -> bool:
    """Whether DeepSpeed's own kernel of it is used: only Lion's is.

    Lamb's asks for fp16, Muon's is not the same algorithm at every stage (docs/optimizers.md).
    """
    if entry.name != "Lion" or not situation.uses_deepspeed:
        return False
    if situation.offloaded:
        return situation.accelerator in HAS_CPU_KERNEL["Lion"]
    return situation.accelerator == "cuda"


def decay_mode(entry: OptimizerEntry, params: Mapping[str, Any]) -> WeightDecay | None:
    """How ``entry`` with ``params`` decays weights; ``None`` when it is not Adam-like."""
    # The classes of packages do not tell, so it could not be verified.
    if not entry.adam_like or entry.family == "package":
        return None
    always: dict[str, WeightDecay] = {
        "AdamW": "decoupled",
        "AdamWBF16States": "decoupled",
        "MuAdamW": "decoupled",
        "MuAdam": "l2",
    }
    if entry.name in always:
        return always[entry.name]
    switch, default = ("adam_w_mode", True) if entry.name == "Adam" else _DECOUPLED
    return "decoupled" if params.get(switch, default) else "l2"


_DECOUPLED: Final = ("decoupled_weight_decay", False)


def _torch_class(entry: OptimizerEntry, decay: WeightDecay | None) -> str:
    if entry.name in {"Adam", "AdamW"}:
        return "AdamW" if decay == "decoupled" else "Adam"
    return entry.name


def _deepspeed_class(
    entry: OptimizerEntry,
    params: Mapping[str, Any],
    situation: Situation,
    decay: WeightDecay | None,
) -> str:
    if entry.name in {"Adam", "AdamW"}:
        if params.get("torch_adam"):
            return _torch_class(entry, decay)
        if situation.offloaded:
            return "ZenFlowCPUAdam" if situation.zenflow else "DeepSpeedCPUAdam"
        return "FusedAdam"
    offloaded = {"Adagrad": "DeepSpeedCPUAdagrad", "Lion": "DeepSpeedCPULion"}
    resident = {
        "Adagrad": "Adagrad",
        "Lion": "FusedLion",
        "OneBitAdam": "OnebitAdam",
        "OneBitLamb": "OnebitLamb",
        "ZeroOneAdam": "ZeroOneAdam",
    }
    return (offloaded if situation.offloaded else resident)[entry.name]
