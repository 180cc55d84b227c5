"""Quantities that the formulas of all engines share: counts, places and roundings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Final

import attrs

from zerotune.plan.facts import ModelFacts, StreamedFacts
from zerotune.plan.memory.items import ALWAYS, MemoryItem, Phase, Place, Workload
from zerotune.plan.optimizer.names import entry_of
from zerotune.plan.resolve.sizes import pins_exactly, sub_groups
from zerotune.plan.resolved import Resolved

MIB: Final = 1024**2


GIB: Final = 1024**3


INITIALIZATION: Final[frozenset[Phase]] = frozenset({"initialization"})


BACKWARD: Final[frozenset[Phase]] = frozenset({"forward and backward"})


STEP: Final[frozenset[Phase]] = frozenset({"optimizer step"})


CHECKPOINT: Final[frozenset[Phase]] = frozenset({"checkpoint"})


TRAINING: Final = BACKWARD | STEP | CHECKPOINT


EMA_CHUNK: Final = 16 * MIB
"""Bytes of an EMA on disk that are read or written at a time."""


EMA_CHUNKS: Final = 4
"""Maximum number of chunks of an EMA on disk that are in memory: the current one, the one that is
written, and those that are read ahead."""


_ELEMENT: Final = {"fp32": 4, "bf16": 2, "fp16": 2}


@attrs.frozen(kw_only=True)
class Costing:
    """A plan, a model and a workload, with the quantities that the formulas use."""

    resolved: Resolved
    model: ModelFacts
    workload: Workload

    @property
    def on_cpu(self) -> bool:
        """Whether the accelerator is the CPU, whose device memory is host memory."""
        return self.resolved.platform.accelerator == "cpu"

    @property
    def device(self) -> Place:
        """``"host"`` if the accelerator is the CPU, which uses host memory; else ``"device"``."""
        return "host" if self.on_cpu else "device"

    @property
    def element(self) -> int:
        """Bytes per weight in the forward pass with DeepSpeed."""
        return _ELEMENT[self.resolved.precision]

    @property
    def unit_element(self) -> int:
        """Bytes per weight of the host engine's units; without DeepSpeed, these are in fp32."""
        return _ELEMENT[self.unit_precision]

    @property
    def unit_precision(self) -> str:
        """Precision of the host engine's units."""
        return self.resolved.precision if self.resolved.uses_deepspeed else "fp32"

    @property
    def positions(self) -> int:
        """Size that activations scale with: image pixels times latent frames; 0 if unknown."""
        height, width, frames = self.workload.height, self.workload.width, self.workload.frames
        if height is None or width is None:
            return 0
        return self.model.positions(height=height, width=width, frames=frames)

    @cached_property
    def hosted(self) -> bool:
        """Whether the host engine runs the plan, whether or not weights are streamed."""
        return self.resolved.streaming is not None or self.resolved.is_hosted

    @property
    def in_place(self) -> bool:
        """Whether a model on the CPU computes with the host engine's weights in host memory."""
        # In fp32, these are the master weights.
        alone = self.on_cpu and self.ranks == 1 and self.unit_element < 4
        return alone and self.hosted and self.resolved.streaming is None

    @cached_property
    def streamed(self) -> StreamedFacts:
        """Size of each streamed unit, and of the weights that stay on the device, in elements."""
        if self.resolved.streaming is None:
            return self.model.resident
        return self.model.streamed_by(
            self.resolved.streaming.units, element_bytes=self.unit_element
        )

    @property
    def master_bytes(self) -> int:
        """Bytes per weight that the host engine stores of a master weight, beside the weight."""
        return {"fp32": 4, "split": 2, "stochastic": 0}[self.resolved.masters]

    @cached_property
    def streamed_capacity(self) -> int:
        """Bytes of device memory for streamed units."""
        if self.resolved.streaming is None:
            return 0
        return self.resolved.streaming.capacity(
            [self.unit_element * one for one in self.streamed.units]
        )

    @property
    def ranks(self) -> int:
        """World size."""
        return self.resolved.world_size

    @property
    def flat_part(self) -> int:
        """Number of elements in this rank's partition of the flattened parameters (stages 1, 2)."""
        return math.ceil(self.model.trainable_numel / self.ranks)

    @property
    def owned(self) -> int:
        """Number of elements of the master weights on this rank, with padding."""
        if self.resolved.stage == 3:
            return sum(self.model.trainable_parts(self.ranks))
        whole = self.resolved.stage == 0 and not self.hosted
        return self.model.trainable_numel if whole else self.flat_part

    @property
    def largest(self) -> int:
        """Number of elements in the largest trainable parameter."""
        return self.model.largest_trainable

    @property
    def states(self) -> float:
        """Size of the optimizer states per trained weight, as a number of fp32 values."""
        choice = self.resolved.optimizer
        if choice.name == "Adafactor":
            return self._factored
        return entry_of(choice.name).states_per_weight(choice.params)

    @cached_property
    def _factored(self) -> float:
        """Sums of rows and columns per weight, which convolutions have nearly as many as weights.

        torch reduces the last and the second to last dimension.
        """
        trained = [one for one in self.model.parameters if one.trainable]
        sums = (
            one.numel / one.shape[-1] + one.numel / one.shape[-2]
            for one in trained
            if len(one.shape) > 1 and one.numel
        )
        vectors = sum(one.numel for one in trained if len(one.shape) < 2)
        return (sum(sums) + vectors) / max(1, self.model.trainable_numel)

    @property
    def checks_gradients(self) -> bool:
        """Whether DeepSpeed checks gradients for overflow before a host optimizer uses them."""
        resolved = self.resolved
        offloads = resolved.offload_optimizer != "none"
        return resolved.uses_deepspeed and offloads and not self.hosted

    @property
    def pins_exactly(self) -> bool:
        """Whether page-locked blocks keep their exact size instead of being rounded up."""
        stated = self.workload.exact_pinning
        return pins_exactly(self.resolved.platform) if stated is None else stated

    def place(self, offload: str) -> Place:
        """Return where data is stored for offload device ``"none"``, ``"cpu"`` or ``"nvme"``."""
        places: dict[str, Place] = {"none": self.device, "cpu": "host", "nvme": "nvme"}
        return places[offload]

    def item(
        self,
        component: str,
        place: Place,
        nbytes: float,
        phases: frozenset[Phase] = ALWAYS,
        note: str = "",
        *,
        pinned: bool = False,
    ) -> MemoryItem:
        """Return a component, with its size rounded up to whole bytes."""
        return MemoryItem(
            component=component,
            place=place,
            nbytes=math.ceil(nbytes),
            phases=phases,
            pinned=pinned,
            note=note,
        )

    def locked(self, component: str, nbytes: float, note: str = "") -> MemoryItem:
        """Return the memory item of a buffer that asynchronous I/O page-locks at its exact size."""
        return self.item(component, "host", nbytes, note=note, pinned=True)

    def pinned(
        self,
        component: str,
        blocks: Iterable[float],
        phases: frozenset[Phase] = ALWAYS,
        note: str = "",
    ) -> MemoryItem:
        """Return a page-locked component, with blocks rounded up to the allocator's sizes.

        Args:
            component: Name of the component.
            blocks: Bytes of each block.
            phases: Phases in which the memory is used.
            note: Remark for reports.
        """
        sizes = [math.ceil(block) for block in blocks if block > 0]
        if self.pins_exactly:
            total = sum(sizes)
        else:
            total = sum([power_of_two(size) for size in sizes])
            if total > sum(sizes):
                note = f"{note}, " if note else ""
                note += f"{sum(sizes) / GIB:.2f} GiB rounded up to powers of two"
        return self.item(component, "host", total, phases, note, pinned=not self.on_cpu)

    def host(
        self,
        component: str,
        blocks: Iterable[float],
        pin: bool,
        phases: frozenset[Phase] = ALWAYS,
        note: str = "",
    ) -> MemoryItem:
        """Return a component in host memory, page-locked if ``pin`` is set."""
        if pin:
            return self.pinned(component, blocks, phases, note)
        return self.item(component, "host", sum(blocks), phases, note)

    @cached_property
    def stays(self) -> tuple[int, ...]:
        """Number of elements of each sub-group that stays on the device (offload ratio below 1).

        DeepSpeed keeps the first sub-groups on the device; the ratio counts sub-groups, not
        elements.
        """
        zero = self.resolved.plan.zero_optimization
        section = zero.offload_optimizer if zero is not None else None
        if zero is None or section is None or zero.stage != 3 or section.device != "cpu":
            return ()
        ratio = 1.0 if section.ratio is None else float(section.ratio)
        groups = self.sub_groups
        return groups[: int((1 - ratio) * len(groups))]

    @cached_property
    def sub_groups(self) -> tuple[int, ...]:
        """Number of elements of each stage-3 sub-group on this rank."""
        zero = self.resolved.plan.zero_optimization
        size = None if zero is None else zero.sub_group_size
        return sub_groups(
            self.model, self.ranks, self.model.trainable_numel if size is None else int(size)
        )


def power_of_two(nbytes: int) -> int:
    """Round up to a power of two; 0 stays 0."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
