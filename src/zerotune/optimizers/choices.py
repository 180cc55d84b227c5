"""The optimizer and the schedule that a resolved plan will really use, as values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

OptimizerSource = Literal["deepspeed", "torch", "zerotune", "package"]
SchedulerSource = Literal["deepspeed", "zerotune"]
WeightDecay = Literal["decoupled", "l2"]


@attrs.frozen(kw_only=True)
class GroupChoice:
    """Parameters that share arguments of their own."""

    name: str
    """What the group is called (``"no_decay"``)."""
    params: Mapping[str, Any]
    """The group's own values, explicit; arguments not named here are the optimizer's."""
    parameters: tuple[str, ...]
    """Dotted names of the model's parameters in it, in the model's order."""
    numel: int
    """Elements of these parameters."""
    until: int | None = None
    """Optimizer steps after which they are trained no more."""


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
    """``"deepspeed"``: built by DeepSpeed from the rendered configuration. The others are built
    by the engine and handed over: a class of ``torch.optim``, one of zerotune's own, or one of an
    optional package."""
    weight_decay_mode: WeightDecay | None = None
    """Decay mode of Adam-like optimizers, ``None`` for others."""
    package: str | None = None
    """Module that has the class, when ``source`` is ``"package"`` (``"prodigyopt"``)."""
    groups: tuple[GroupChoice, ...] = ()
    """Parameter groups, in order, together all trainable parameters; empty: one group."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return float(self.params["lr"])


@attrs.frozen(kw_only=True)
class SchedulerChoice:
    """The learning-rate schedule, counted in optimizer steps."""

    name: str
    """Canonical name, of DeepSpeed (``"WarmupLR"``) or diffusers (``"cosine"``)."""
    params: Mapping[str, Any]
    """Every argument, explicit, nothing ``"auto"``."""
    source: SchedulerSource = "deepspeed"
    """Who steps it: DeepSpeed's own class, or zerotune's curve, which follows the same formula
    and scales it for each parameter group."""
