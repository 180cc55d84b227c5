"""The optimizer and schedule of a resolved plan, as values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from zerotune.plan.optimizer.entries import OptimizerSource, SchedulerSource, WeightDecay

BY_RUN: Final = "decided by the run"
"""Value of a schedule's length in a plan that was resolved without it; the start fills it in."""


@attrs.frozen(kw_only=True)
class GroupChoice:
    """Parameters that share optimizer arguments."""

    name: str
    """Name of the group (``"no_decay"``)."""
    params: Mapping[str, Any]
    """The group's explicit arguments; all others come from the optimizer."""
    parameters: tuple[str, ...]
    """Dotted names of its parameters, in the model's order."""
    numel: int
    """Total number of elements of the group's parameters."""
    until: int | None = None
    """Number of optimizer steps after which the group is no longer trained."""


@attrs.frozen(kw_only=True)
class OptimizerChoice:
    """The optimizer chosen by ``OptimizerResolver``; an engine must run exactly this optimizer."""

    name: str
    """Canonical name (``"AdamW"``)."""
    params: Mapping[str, Any]
    """Explicit values of all arguments, never ``"auto"``; always includes ``lr``."""
    implementation: str
    """Class that performs the update: ``"FusedAdam"``, ``"DeepSpeedCPUAdam"``, ``"AdamW"`` …
    (``type(optimizer).__name__``)."""
    source: OptimizerSource = "deepspeed"
    """``"deepspeed"``: DeepSpeed builds it from the rendered configuration. Otherwise, the engine
    builds it from a class of ``torch.optim``, zerotune or an optional package, and passes it to
    DeepSpeed."""
    weight_decay_mode: WeightDecay | None = None
    """Decay mode of Adam-like optimizers, ``None`` for others."""
    package: str | None = None
    """Module of the class if ``source`` is ``"package"`` (``"prodigyopt"``)."""
    groups: tuple[GroupChoice, ...] = ()
    """Parameter groups, in order, which together contain all trainable parameters; empty if there
    is only one group."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return float(self.params["lr"])


@attrs.frozen(kw_only=True)
class SchedulerChoice:
    """The learning-rate schedule, counted in optimizer steps."""

    name: str
    """Canonical name from DeepSpeed (``"WarmupLR"``) or diffusers (``"cosine"``)."""
    params: Mapping[str, Any]
    """Explicit values of all arguments, never ``"auto"``; only the schedule's length may be
    ``BY_RUN``."""
    source: SchedulerSource = "deepspeed"
    """``"deepspeed"`` if DeepSpeed's class sets the learning rate; ``"zerotune"`` if zerotune does,
    with the same formula scaled for each parameter group."""
