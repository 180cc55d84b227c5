"""What the arithmetic of every engine has in common: counts, places and roundings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import attrs

from zerotune.plan import sizing
from zerotune.plan.facts import ModelFacts
from zerotune.plan.memory.values import ALWAYS, MemoryItem, Phase, Place
from zerotune.plan.memory.workload import Workload
from zerotune.plan.optimizer_states import states_per_element
from zerotune.plan.pinning import pins_exactly
from zerotune.plan.resolved import ResolvedPlan

MIB: Final = 1024**2
GIB: Final = 1024**3

INITIALIZATION: Final[frozenset[Phase]] = frozenset({"initialization"})
BACKWARD: Final[frozenset[Phase]] = frozenset({"forward and backward"})
STEP: Final[frozenset[Phase]] = frozenset({"optimizer step"})
CHECKPOINT: Final[frozenset[Phase]] = frozenset({"checkpoint"})
TRAINING: Final = BACKWARD | STEP | CHECKPOINT

_ELEMENT: Final = {"fp32": 4, "bf16": 2, "fp16": 2}


@attrs.frozen(kw_only=True)
class Costing:
    """One plan, model and workload, and the quantities every formula is written in."""

    resolved: ResolvedPlan
    model: ModelFacts
    workload: Workload

    @property
    def on_cpu(self) -> bool:
        """Whether the accelerator is the CPU, so that the device's memory is the host's."""
        return self.resolved.platform.accelerator == "cpu"

    @property
    def device(self) -> Place:
        """Where the accelerator's memory counts."""
        return "host" if self.on_cpu else "device"

    @property
    def element(self) -> int:
        """Bytes of a weight of the forward pass under DeepSpeed."""
        return _ELEMENT[self.resolved.precision]

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return self.resolved.world_size

    @property
    def trained(self) -> int:
        """Trainable elements, N."""
        return self.model.trainable_numel

    @property
    def all_elements(self) -> int:
        """Elements of all parameters."""
        return self.model.numel

    @property
    def flat_part(self) -> int:
        """Elements of this rank's part of the flattened trainable parameters, stages 1 and 2."""
        return math.ceil(self.trained / self.ranks)

    @property
    def largest(self) -> int:
        """Elements of the largest trainable parameter, P."""
        return max((parameter.numel for parameter in self.model.trainable), default=0)

    @property
    def states(self) -> float:
        """fp32 numbers per element that the optimizer keeps."""
        choice = self.resolved.optimizer
        if choice is not None:
            return states_per_element(choice.name, choice.params)
        written = self.resolved.plan.optimizer
        if written is None:
            return states_per_element(None)
        return states_per_element(written.type, written.params)

    @property
    def master_bytes(self) -> int:
        """Bytes of a master weight and of its gradient beside an offloaded optimizer."""
        return 2 if self._low_precision("master_weights_and_grads") else 4

    @property
    def state_bytes(self) -> int:
        """Bytes of one number of the optimizer's states."""
        bf16 = self.resolved.plan.bf16
        return 2 if bf16 is not None and bf16.bf16_optimizer_states is True else 4

    def _low_precision(self, what: str) -> bool:
        bf16, fp16 = self.resolved.plan.bf16, self.resolved.plan.fp16
        return (
            bf16 is not None and bf16.enabled is True and getattr(bf16, f"bf16_{what}") is True
        ) or (fp16 is not None and fp16.enabled is True and getattr(fp16, f"fp16_{what}") is True)

    @property
    def pins_exactly(self) -> bool:
        """Whether page-locked blocks keep their size."""
        stated = self.workload.exact_pinning
        return pins_exactly(self.resolved.platform) if stated is None else stated

    def place(self, offload: str) -> Place:
        """Where something offloaded to ``"none"``, ``"cpu"`` or ``"nvme"`` lies."""
        places: dict[str, Place] = {"none": self.device, "cpu": "host", "nvme": "nvme"}
        return places[offload]

    def item(
        self,
        component: str,
        place: Place,
        nbytes: float,
        phases: frozenset[Phase] = ALWAYS,
        note: str = "",
    ) -> MemoryItem:
        """One component."""
        return MemoryItem(
            component=component, place=place, nbytes=math.ceil(nbytes), phases=phases, note=note
        )

    def locked(self, component: str, nbytes: float, note: str = "") -> MemoryItem:
        """Host memory that asynchronous I/O page-locks itself, to the byte."""
        return MemoryItem(
            component=component, place="host", nbytes=math.ceil(nbytes), pinned=True, note=note
        )

    def pinned(
        self,
        component: str,
        blocks: Iterable[float],
        phases: frozenset[Phase] = ALWAYS,
        note: str = "",
    ) -> MemoryItem:
        """Page-locked host memory, block by block, rounded as torch's allocator does."""
        sizes = [math.ceil(block) for block in blocks if block > 0]
        if self.pins_exactly:
            total = sum(sizes)
        else:
            total = sum(power_of_two(size) for size in sizes)
            if total > sum(sizes):
                note = f"{note}, " if note else ""
                note += f"{sum(sizes) / GIB:.2f} GiB rounded up to powers of two"
        return MemoryItem(
            component=component,
            place="host",
            nbytes=total,
            phases=phases,
            pinned=not self.on_cpu,
            note=note,
        )

    def host(
        self,
        component: str,
        blocks: Iterable[float],
        pin: bool,
        phases: frozenset[Phase] = ALWAYS,
        note: str = "",
    ) -> MemoryItem:
        """Host memory that is page-locked where the plan says so."""
        if pin:
            return self.pinned(component, blocks, phases, note)
        return self.item(component, "host", sum(blocks), phases, note)

    @property
    def sub_groups(self) -> tuple[int, ...]:
        """Elements of this rank's part of each of stage 3's sub-groups."""
        zero = self.resolved.plan.zero_optimization
        size = int(zero.sub_group_size or 0) if zero is not None else 0
        return sizing.sub_groups(self.model, self.ranks, size or self.trained)


def power_of_two(nbytes: int) -> int:
    """The smallest power of two that is not smaller; 0 for nothing."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
