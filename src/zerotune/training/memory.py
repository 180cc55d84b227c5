"""What lies where: the memory of a plan, part by part, and what was measured.

Plain bookkeeping of weights, gradients and states. Buckets, activations and temporaries are not
in it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import attrs
import psutil
import torch

from zerotune.errors import InvalidValueError
from zerotune.optim import OPTIMIZERS

if TYPE_CHECKING:
    from zerotune.plan.facts import ModelFacts
    from zerotune.plan.resolved import ResolvedPlan

Place = Literal["GPU", "host", "NVMe"]

_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
_MASTER: Final = 4


@attrs.frozen(kw_only=True)
class MemoryPart:
    """One component of one rank's memory."""

    component: str
    """``"weights"``, ``"gradients"``, ``"master weights"``, ``"optimizer states"``, ``"EMA"``."""
    place: Place
    """Where it lies between steps."""
    nbytes: int
    """Bytes per rank."""
    note: str = ""
    """Precision and how it is split, in words."""


def expected_memory(plan: ResolvedPlan, *, ema: bool = False) -> tuple[MemoryPart, ...]:
    """What each component of a plan takes per rank, and where.

    Args:
        plan: A resolved plan with its model known and its optimizer settled.
        ema: Whether an ``EMAShadow`` runs along.

    Raises:
        InvalidValueError: The plan was resolved without a model or has no optimizer.
    """
    if plan.model is None or plan.optimizer is None:
        raise InvalidValueError(
            "memory is counted from the model's shapes and the optimizer's states",
            key="plan",
            value=plan,
            fix="resolve it with model= and apply an OptimizerResolver",
        )
    return _Count(plan=plan, model=plan.model).parts(ema=ema)


@attrs.frozen(kw_only=True)
class _Count:
    plan: ResolvedPlan
    model: ModelFacts

    def parts(self, *, ema: bool) -> tuple[MemoryPart, ...]:
        parts = [self._weights(), self._gradients(), self._master(), self._states()]
        if ema:
            parts.append(self._part("EMA", "host", _MASTER * self._owned, f"fp32{self._split(1)}"))
        return tuple(parts)

    @property
    def _device(self) -> Place:
        return "host" if self.plan.platform.accelerator == "cpu" else "GPU"

    @property
    def _element(self) -> int:
        """Bytes of a weight in the forward pass; the plain engine casts on the fly."""
        return _BYTES[self.plan.precision] if self.plan.uses_deepspeed else 4

    @property
    def _owned(self) -> int:
        """Trainable elements whose master weights are this rank's."""
        return self._shard(trainable_only=True, from_stage=1)

    def _shard(self, *, trainable_only: bool, from_stage: int) -> int:
        ranks, stage = self.plan.world_size, self.plan.stage
        chosen = self.model.trainable if trainable_only else self.model.parameters
        if stage < from_stage:
            return sum(parameter.numel for parameter in chosen)
        if stage == 3:
            # Every parameter is split on its own; the other stages split one flat tensor.
            return sum(-(-parameter.numel // ranks) for parameter in chosen)
        return -(-sum(parameter.numel for parameter in chosen) // ranks)

    def _place(self, device: str) -> Place:
        places: dict[str, Place] = {"none": self._device, "cpu": "host", "nvme": "NVMe"}
        return places[device]

    def _split(self, from_stage: int) -> str:
        ranks = self.plan.world_size
        return f", 1/{ranks} of it" if self.plan.stage >= from_stage and ranks > 1 else ""

    @staticmethod
    def _part(component: str, place: Place, nbytes: int, note: str) -> MemoryPart:
        return MemoryPart(component=component, place=place, nbytes=nbytes, note=note)

    def _precision(self) -> str:
        return self.plan.precision if self.plan.uses_deepspeed else "fp32"

    def _weights(self) -> MemoryPart:
        elements = self._shard(trainable_only=False, from_stage=3)
        place = self._place(self.plan.offload_param)
        note = f"{self._precision()}{self._split(3)}"
        return self._part("weights", place, elements * self._element, note)

    def _gradients(self) -> MemoryPart:
        elements = self._shard(trainable_only=True, from_stage=2)
        where = self.plan.offload_optimizer
        if where != "none":
            # Offloaded optimizers keep their part of the gradient beside them, in fp32.
            note = f"fp32{self._split(1)}"
            return self._part("gradients", self._place(where), self._owned * _MASTER, note)
        note = f"{self._precision()}{self._split(2)}"
        return self._part("gradients", self._device, elements * self._element, note)

    def _master(self) -> MemoryPart:
        if self.plan.stage == 0 and self._precision() == "fp32":
            return self._part("master weights", self._device, 0, "the weights themselves")
        place = self._place(self.plan.offload_optimizer)
        return self._part("master weights", place, self._owned * _MASTER, f"fp32{self._split(1)}")

    def _states(self) -> MemoryPart:
        choice = self.plan.optimizer
        names = () if choice is None else OPTIMIZERS[choice.name].states_for(choice.params)
        place = self._place(self.plan.offload_optimizer)
        note = f"fp32 {', '.join(names)}{self._split(1)}" if names else "none"
        nbytes = self._owned * _MASTER * len(names)
        return self._part("optimizer states", place, nbytes, note)


def host_peak() -> int:
    """Most RAM this process has ever held, bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would report the peak of the process this one was forked from.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_now() -> int:
    """RAM this process holds now, bytes."""
    return int(psutil.Process().memory_info().rss)


def device_peak(device: torch.device) -> int | None:
    """Most GPU memory torch has allocated in this process, bytes; ``None`` without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
