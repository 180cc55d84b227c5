"""The optimizer and scheduler a resolved plan will really use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

OptimizerSource = Literal["deepspeed", "torch"]
WeightDecay = Literal["decoupled", "l2"]


@attrs.frozen(kw_only=True)
class OptimizerChoice:
    """What ``OptimizerResolver`` settled on; the engine verifies itself against it."""

    name: str
    """Canonical name (``"AdamW"``)."""
    params: Mapping[str, Any]
    """Every argument, explicit, nothing ``"auto"``: at least ``lr``."""
    implementation: str
    """Class that will do the update: ``"FusedAdam"``, ``"DeepSpeedCPUAdam"``, ``"AdamW"`` …
    (``type(optimizer).__name__``)."""
    source: OptimizerSource = "deepspeed"
    """``"deepspeed"``: built by DeepSpeed from the rendered configuration. ``"torch"``: a
    ``torch.optim`` class built by the engine and handed over."""
    weight_decay_mode: WeightDecay | None = None
    """Decay mode of Adam-like optimizers, ``None`` for others."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return float(self.params["lr"])


@attrs.frozen(kw_only=True)
class SchedulerChoice:
    """The learning-rate schedule, counted in optimizer steps."""

    name: str
    """Canonical DeepSpeed name (``"WarmupLR"``)."""
    params: Mapping[str, Any]
    """Every argument, explicit, nothing ``"auto"``."""
