"""Memory estimates of plans, per rank and component.

The formulas come from the code of DeepSpeed 0.19.8 and from measurements; comments cite the code or
measurement behind each group of formulas.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import Any, Final, Literal, TypedDict, get_args

import attrs

from zerotune._util.table import Readable
from zerotune._util.text import format_size, is_integer
from zerotune.decisions import Decision
from zerotune.errors import InvalidValueError, UnresolvedPlanError
from zerotune.plan.context import Context, DeviceUpdate, EngineName, Streaming
from zerotune.plan.facts import ModelFacts, StreamedFacts, resident_units
from zerotune.plan.families import ModelFamily, as_facts, frozen_beside, model_family
from zerotune.plan.memory.swap_files import SwapCounter
from zerotune.plan.optimizer.names import entry_of
from zerotune.plan.resolve import gathered_together, pins_exactly, sub_groups
from zerotune.plan.resolved import Resolved
from zerotune.plan.rules import resolve
from zerotune.plan.sections import OffloadSection, ZeroSection, pins
from zerotune.plan.settings import Settings
from zerotune.platform.facts import DISCRETE

EMAPlace = Literal["none", "host", "device", "nvme"]


@attrs.frozen(kw_only=True)
class Workload:
    """Batch size, resolution, and options that affect memory, such as EMA."""

    batch: int = 1
    """Samples per forward pass and rank."""
    height: int | None = None
    """Height in pixels; if ``None``, activations are not estimated."""
    width: int | None = None
    """Width in pixels."""
    frames: int | None = None
    """Frames of a clip; ``None`` for an image."""
    gradient_checkpointing: bool = True
    """Whether blocks are recomputed in the backward pass."""
    activation_offload: bool = False
    """Whether ``ActivationOffload`` stores the inputs of recomputed blocks in host memory; needs
    gradient checkpointing."""
    ema: EMAPlace = "none"
    """Location of the fp32 copy of an ``EMAShadow``."""
    frozen_bytes: int = 0
    """Bytes of frozen models (VAE, text encoders) on the device. Every rank first loads all these
    models into host memory."""
    model_in_memory: bool = False
    """Whether each rank has the whole fp32 model in memory before the engine starts. ``False``: the
    weights are still in files, as after ``load_pretrained(folder, plan=plan)``."""
    ranks_per_machine: int | None = None
    """Number of processes that share one machine's RAM; ``None``: all processes."""
    exact_pinning: bool | None = None
    """Whether page-locked blocks keep their exact size, as with ``DS_PIN_MEMORY_BACKEND=native`` or
    torch's ``pinned_max_round_threshold_mb``; otherwise each is rounded up to a power of two.
    ``None``: exact if the platform's torch supports it."""


# -- Memory items: components, their places, and the phases in which they exist.


Place = Literal["device", "host", "nvme"]
"""Location of memory: accelerator, host RAM, or files."""
PLACES: Final[tuple[Place, ...]] = get_args(Place)

Phase = Literal["initialization", "forward and backward", "optimizer step", "checkpoint"]
"""Phase of a run in which memory is used."""
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
ALWAYS: Final[frozenset[Phase]] = frozenset(PHASES)


@attrs.frozen(kw_only=True)
class MemoryItem:
    """One component of one rank's memory."""

    component: str
    """``"weights"``, ``"gradients"``, ``"master weights"``, ``"optimizer states"``,
    ``"buckets"``, ``"activations"`` …"""
    place: Place
    nbytes: int
    """Bytes per rank."""
    phases: frozenset[Phase] = ALWAYS
    """Phases in which the memory is used."""
    pinned: bool = False
    """Whether the memory is page-locked host memory."""
    note: str = ""
    """Precision, partitioning and rounding, in words."""


@attrs.frozen(kw_only=True)
class MemoryPeak:
    """Peak use of device memory, host memory or NVMe, and the phase in which it occurs."""

    place: Place
    phase: Phase
    """Phase with the highest memory use; the first if several are equal."""
    nbytes: int
    """Bytes per rank."""
    items: tuple[MemoryItem, ...]
    """Components in this phase, largest first."""


@attrs.frozen(kw_only=True, repr=False)
class Estimate(Readable):
    """Memory that a plan needs per rank, by component; ``MemoryEstimate`` adds the verbs."""

    resolved: Resolved
    """The estimated plan."""
    workload: Workload
    """Batch size, resolution and options that the estimate assumes."""
    items: tuple[MemoryItem, ...]
    notes: tuple[str, ...] = ()
    """Components that the estimate does not include, with reasons."""

    def at(self, place: Place, phase: Phase) -> tuple[MemoryItem, ...]:
        """Return the components in ``place`` during ``phase``, largest first.

        Args:
            place: ``"device"``, ``"host"`` or ``"nvme"``.
            phase: Phase of a run, such as ``"optimizer step"``.
        """
        held = [item for item in self.items if item.place == place and phase in item.phases]
        return tuple(sorted(held, key=lambda item: -item.nbytes))

    def peak(self, place: Place) -> MemoryPeak:
        """Return the peak in ``place``: the phase with the highest use, and its components.

        Args:
            place: ``"device"``, ``"host"`` or ``"nvme"``.
        """
        phase = max(PHASES, key=lambda one: _total(self.at(place, one)))
        items = self.at(place, phase)
        return MemoryPeak(place=place, phase=phase, nbytes=_total(items), items=items)

    @property
    def device(self) -> int:
        """Peak bytes of accelerator memory per rank."""
        return self.peak("device").nbytes

    @property
    def host(self) -> int:
        """Peak bytes of host RAM per rank, including pinned memory."""
        return self.peak("host").nbytes

    @property
    def nvme(self) -> int:
        """Peak bytes of swap files per rank."""
        return self.peak("nvme").nbytes

    @property
    def pinned(self) -> int:
        """Peak bytes of page-locked host RAM per rank."""
        return max(
            _total(item for item in self.at("host", phase) if item.pinned) for phase in PHASES
        )


def _total(items: Iterable[MemoryItem]) -> int:
    return sum(item.nbytes for item in items)


# -- Quantities that all engines share: counts, places and roundings.


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
    def streaming(self) -> Streaming | None:
        """Streaming options; ``None`` if weights are not streamed."""
        return self.resolved.streaming

    @cached_property
    def hosted(self) -> bool:
        """Whether the host engine runs the plan, whether or not weights are streamed."""
        return self.streaming is not None or self.resolved.is_hosted

    @property
    def in_place(self) -> bool:
        """Whether a model on the CPU computes with the host engine's weights in host memory."""
        # In fp32, these are the master weights.
        alone = self.on_cpu and self.ranks == 1 and self.unit_element < 4
        return alone and self.hosted and self.streaming is None

    @cached_property
    def streamed(self) -> StreamedFacts:
        """Size of each streamed unit, and of the weights that stay on the device, in elements."""
        if self.streaming is None:
            return self.model.resident
        return self.model.streamed_by(self.streaming.units)

    @property
    def master_bytes(self) -> int:
        """Bytes per weight that the host engine stores of a master weight, beside the weight."""
        return {"fp32": 4, "split": 2, "stochastic": 0}[self.resolved.masters]

    @cached_property
    def streamed_capacity(self) -> int:
        """Bytes of device memory for streamed units."""
        if self.streaming is None:
            return 0
        return self.streaming.capacity([self.unit_element * one for one in self.streamed.units])

    @property
    def ranks(self) -> int:
        """World size."""
        return self.resolved.world_size

    @property
    def trained(self) -> int:
        """Number N of trainable elements."""
        return self.model.trainable_numel

    @property
    def all_elements(self) -> int:
        """Number of elements of all parameters."""
        return self.model.numel

    @property
    def flat_part(self) -> int:
        """Number of elements in this rank's partition of the flattened parameters (stages 1, 2)."""
        return math.ceil(self.trained / self.ranks)

    @property
    def owned(self) -> int:
        """Number of elements of the master weights on this rank, with padding."""
        if self.resolved.stage == 3:
            return sum(self.model.trainable_parts(self.ranks))
        whole = self.resolved.stage == 0 and not self.hosted
        return self.trained if whole else self.flat_part

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
        return (sum(sums) + vectors) / max(1, self.trained)

    @property
    def codes_moments(self) -> bool:
        """Whether the optimizer stores moments as 8-bit codes, which take longer to update."""
        return "streamed weights" in entry_of(self.resolved.optimizer.name).requires

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
    ) -> MemoryItem:
        """Return a component that is not page-locked."""
        return MemoryItem(
            component=component, place=place, nbytes=math.ceil(nbytes), phases=phases, note=note
        )

    def locked(self, component: str, nbytes: float, note: str = "") -> MemoryItem:
        """Return the memory item of a buffer that asynchronous I/O page-locks at its exact size."""
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
        return sub_groups(self.model, self.ranks, self.trained if size is None else int(size))


def power_of_two(nbytes: int) -> int:
    """Round up to a power of two; 0 stays 0."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


# -- Memory of engines that keep every weight on every rank: plain and ZeRO stages 0 to 2.
#
# From the code of DeepSpeed 0.19.8 (``runtime/engine.py``, ``runtime/fp16/fused_optimizer.py``,
# ``runtime/zero/stage_1_and_2.py``), and measured on the CPU accelerator.


_STAGE_0_BUCKET: Final = 500_000_000
"""``MEMORY_OPT_ALLREDUCE_SIZE``: elements of gradients flattened at a time at stage 0."""
_DDP_BUCKETS: Final = 4
"""Bytes per element in the buckets of torch's DistributedDataParallel, which copies every gradient
in fp32."""


def plain(case: Costing) -> Iterator[MemoryItem]:
    """Yield the memory used by the plain engine: fp32 weights, and autocast in the forward pass."""
    count = case.trained
    yield case.item("weights", case.device, case.model.weight_bytes(4), note=_kept_in(case, "fp32"))
    yield from _cast_copies(case)
    if case.ranks > 1:
        yield case.item("buckets", case.device, _DDP_BUCKETS * count, note="one copy of gradients")
    yield case.item("gradients", case.device, 4 * count, BACKWARD | STEP, "fp32")
    yield case.item("optimizer states", case.device, 4 * case.states * count, TRAINING, "fp32")
    if not case.on_cpu:
        yield case.item(
            "temporaries", case.device, 4 * count, STEP, "torch updates all tensors at once"
        )
    else:
        yield case.item("temporaries", case.device, 12 * case.largest, STEP, "of the update")


def _cast_copies(case: Costing) -> Iterator[MemoryItem]:
    """Yield the weights in half precision that autocast keeps until the end of the pass."""
    if case.resolved.precision != "fp32":
        copied = 2 * (case.all_elements - case.model.quantized_numel)
        yield case.item("weights", case.device, copied, BACKWARD, "copies that autocast keeps")


def stage_0(case: Costing) -> Iterator[MemoryItem]:
    """Yield the memory that DeepSpeed uses without ZeRO, in fp32 or with fp32 master weights."""
    count, element = case.trained, case.element
    low = element == 2
    weights = case.model.weight_bytes(element)
    yield case.item("weights", case.device, weights, note=_kept_in(case, case.resolved.precision))
    yield case.item(
        "gradients", case.device, element * count, BACKWARD | STEP, case.resolved.precision
    )
    yield case.item(
        "buckets",
        case.device,
        element * min(count, _STAGE_0_BUCKET),
        BACKWARD,
        "flattened gradients for the reduction",
    )
    states = 4 * case.states * count
    if not low:
        yield case.item("optimizer states", case.device, states, TRAINING, "fp32")
        return
    yield case.item("master weights", case.device, 4 * count, note="fp32")
    # The half-precision wrapper runs a step with zero gradients when it is created.
    yield case.item("optimizer states", case.device, states, note="fp32")
    yield case.item("temporaries", case.device, 4 * count, INITIALIZATION, "zero gradients, fp32")
    yield case.item("temporaries", case.device, 8 * count, STEP, "flattened gradients in fp32")


def stages_1_and_2(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    """Yield the memory used at ZeRO stages 1 and 2, where each rank stores the whole weights."""
    weights = case.model.weight_bytes(case.element)
    yield case.item("weights", case.device, weights, note=_kept_in(case, case.resolved.precision))
    yield from _buckets(case, zero)
    offloads = zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    if offloads:
        yield from _beside_offload(case, zero, pins(zero.offload_optimizer))
    else:
        yield from _on_device(case, zero)


def _buckets(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    bucket = int(zero.reduce_bucket_size or 0)
    copies = 1 + (zero.overlap_comm is True)
    note = "doubled by overlap_comm" if zero.overlap_comm is True else ""
    if case.ranks > 1:
        # Gradients that span two ranks' parts are flattened again; one rank has a single slice.
        copies += 1
    yield case.item("buckets", case.device, case.element * bucket * copies, BACKWARD, note)


def _on_device(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    count, part, element = case.trained, case.flat_part, case.element
    yield case.item("master weights", case.device, 4 * part, note=_share_of(case, "fp32"))
    yield case.item(
        "optimizer states",
        case.device,
        4 * case.states * part,
        TRAINING,
        _share_of(case, "fp32"),
    )
    kept = count if zero.stage == 1 else part
    yield case.item(
        "gradients", case.device, element * kept, BACKWARD | STEP, case.resolved.precision
    )
    yield case.item(
        "temporaries", case.device, element * case.largest, BACKWARD, "the largest gradient"
    )
    cast = 0 if element == 4 else 4 * part
    yield case.item(
        "temporaries", case.device, element * part + cast, STEP, "flattened gradients, in fp32"
    )
    if case.resolved.optimizer.source == "torch" and not case.on_cpu:
        yield case.item("temporaries", case.device, 4 * part, STEP, "of the torch optimizer")
    # First a flat copy of the weights exists; later, zero gradients beside the master weights.
    flattening = element * count - 4 * part
    yield case.item(
        "temporaries",
        case.device,
        max(flattening, element * part, 4 * part),
        INITIALIZATION,
        "a flat copy of the weights, and later zero gradients",
    )


def _beside_offload(case: Costing, zero: ZeroSection, pin: bool) -> Iterator[MemoryItem]:
    count, part, element, largest = case.trained, case.flat_part, case.element, case.largest
    note = _share_of(case, "fp32")
    yield case.host("master weights", [4 * part], pin, note=note)
    yield case.host("gradients", [4 * part], pin, note=note)
    yield case.host(
        "staging", [element * part], pin, note="updated weights before the copy to the device"
    )
    yield case.host("staging", [element * largest], pin, note="one gradient")
    yield case.item("optimizer states", "host", 4 * case.states * part, TRAINING, note)
    if (case.resolved.gradient_accumulation_steps or 1) > 1:
        yield case.host(
            "accumulated gradients",
            [element * parameter.numel / case.ranks for parameter in case.model.trainable],
            pin,
            TRAINING,
            "one block per parameter",
        )
    if zero.stage == 1:
        yield case.item(
            "gradients", case.device, element * count, BACKWARD, case.resolved.precision
        )
    yield case.item("temporaries", case.device, element * largest, note="one gradient")
    # One after the other: fp64 for the norm, and fp32 for the host.
    note = "copies of the largest gradient"
    yield case.item("temporaries", case.device, (element + 8) * largest, BACKWARD, note)
    moving = element * (part if case.on_cpu else count)
    yield case.item(
        "temporaries", case.device, moving, INITIALIZATION, "weights being copied to one block"
    )


def _kept_in(case: Costing, precision: str) -> str:
    """Return the storage dtypes of the weights as text."""
    return ", ".join((*case.model.storages, precision))


def _share_of(case: Costing, precision: str) -> str:
    return precision if case.ranks == 1 else f"{precision}, 1/{case.ranks} of it"


# -- Memory of ZeRO stage 3, where parameters are partitioned too.
#
# From the code of DeepSpeed 0.19.8 (``runtime/zero/stage3.py``, ``partition_parameters.py``,
# ``parameter_offload.py``, ``runtime/swap_tensor``), and measured on the CPU accelerator.


def stage_3(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    """Yield the memory used at stage 3; parameters and optimizer may be in host memory or files."""
    yield from _weights(case, zero)
    yield from _gathered(case, zero)
    yield from _reduction(case, zero)
    section = zero.offload_optimizer
    device = (section.device if section else None) or "none"
    pin = pins(section)
    gradients = case.element * case.owned
    note = f"{case.resolved.precision}, the partition's"
    if device == "none":
        yield case.item("gradients", case.device, gradients, note=note)
        yield from _optimizer_on_device(case)
    else:
        yield case.host("gradients", [gradients], pin, note=note)
        if device == "cpu":
            yield from _optimizer_on_host(case, pin)
        else:
            yield from _optimizer_in_files(case, zero, section)
    # Zero gradients of the largest sub-group, freed before the partition's gradients are created.
    freed = 4 * _largest_group(case) - gradients
    place = case.device if device == "none" else "host"
    yield case.item("temporaries", place, max(0.0, freed), INITIALIZATION, "zero gradients")


def _largest_group(case: Costing) -> int:
    return max(case.sub_groups, default=0)


def _weights(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    section = zero.offload_param
    device = (section.device if section else None) or "none"
    note = _share_of(case, _kept_in(case, case.resolved.precision))
    parts = case.model.parts(case.ranks)
    total = case.model.weight_bytes(case.element, ranks=case.ranks)
    if device == "none" or section is None:
        yield case.item("weights", case.device, total, note=note)
        # Freed before master weights are created.
        on_host = case.on_cpu or case.resolved.offload_optimizer == "cpu"
        passing = total - on_host * 4 * case.owned
        note = "partitions on their way to one buffer"
        yield case.item("temporaries", "host", max(0.0, passing), INITIALIZATION, note)
        return
    pin = section.pin_memory is True
    if device == "cpu":
        trained = case.element * case.owned
        yield case.pinned("weights", [trained], note=note)
        yield case.item("weights", "host", total - trained, note="frozen")
        if pin and not case.on_cpu:
            element = case.element
            yield case.pinned(
                "pinned cache",
                [element * part for part in parts],
                note="initial pinned copies of the partitions, cached by torch's host allocator",
            )
        return
    yield from _weights_in_files(case, section)


def _weights_in_files(case: Costing, section: OffloadSection) -> Iterator[MemoryItem]:
    files = SwapCounter(resolved=case.resolved, model=case.model).weights
    yield case.item("weights", "nvme", files.nbytes, note=case.resolved.precision)
    yield case.item("weights", "host", files.stays, note="too small to swap")
    size, count = int(section.buffer_size or 0), int(section.buffer_count or 0)
    note = f"{count} buffers of {size:,} elements"
    yield case.locked("swap buffers", case.element * size * count, note)
    yield case.locked(
        "swap buffers", case.element * _largest_group(case), "the largest sub-group's weights"
    )


def _gathered(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    device = (zero.offload_param.device if zero.offload_param is not None else None) or "none"
    if case.ranks == 1 and (device == "none" or case.on_cpu):
        return  # the partition is the whole weight, and not copied
    threshold = int(zero.stage3_param_persistence_threshold or 0)
    released = [each for each in case.model.parameters if each.numel > threshold]
    whole = case.all_elements - sum([each.numel for each in released])
    yield case.item(
        "gathered weights",
        case.device,
        case.element * whole,
        note="small weights, never partitioned",
    )
    live = int(zero.stage3_max_live_parameters or 0) + int(zero.stage3_prefetch_bucket_size or 0)
    # DeepSpeed limits only what it prefetches, not what a module or a recomputed block needs.
    blocks = case.model.units if case.workload.gradient_checkpointing else ()
    groups = gathered_together(released, blocks)
    needed = max([sum([each.numel for each in group]) for group in groups], default=0)
    yield case.item(
        "gathered weights",
        case.device,
        min(
            case.element * max(live, needed),
            case.model.weight_bytes(case.element) - case.element * whole,
        ),
        BACKWARD,
        "prefetched weights, and those of a recomputed block",
    )


def _reduction(case: Costing, zero: ZeroSection) -> Iterator[MemoryItem]:
    bucket = case.element * int(zero.reduce_bucket_size or 0)
    yield case.item("buckets", case.device, bucket, note="allocated once")
    # A single rank's sum is the flattened bucket itself. Sums copied to the host come back for
    # their norms (``partition_grads``).
    returned = not case.on_cpu and case.resolved.offload_optimizer != "none"
    parts = 1 + ((case.ranks > 1) + returned) / case.ranks
    note = "a flattened bucket, and this rank's part of the sum"
    yield case.item("buckets", case.device, bucket * parts, BACKWARD, note)
    nbytes = case.element * case.largest
    yield case.item("temporaries", case.device, nbytes, BACKWARD, "the largest gradient")


def _optimizer_on_device(case: Costing) -> Iterator[MemoryItem]:
    part = case.owned
    yield case.item("master weights", case.device, 4 * part, note="fp32")
    yield case.item("optimizer states", case.device, 4 * case.states * part, TRAINING, "fp32")
    group = _largest_group(case)
    cast = 0 if case.element == 4 else 4 * group
    yield case.item(
        "temporaries",
        case.device,
        case.element * group + cast,
        STEP,
        "fp32 gradients of the largest sub-group",
    )


def _optimizer_on_host(case: Costing, pin: bool) -> Iterator[MemoryItem]:
    part = case.owned - sum(case.stays)
    yield from _share_on_device(case)
    yield case.item("master weights", "host", 4 * part, note="fp32")
    gradients = [4 * group for group in case.sub_groups[len(case.stays) :]]
    yield case.host("gradients", gradients, pin, note="fp32, master's")
    yield case.item("optimizer states", "host", 4 * case.states * part, TRAINING, "fp32")


def _share_on_device(case: Costing) -> Iterator[MemoryItem]:
    """Yield what an offload ratio below 1 keeps on the device, in fp32."""
    stays, note = sum(case.stays), "fp32, the part that is not offloaded"
    yield case.item("master weights", case.device, 4 * stays, note=note)
    yield case.item("gradients", case.device, 4 * stays, note=note)
    yield case.item("optimizer states", case.device, 4 * case.states * stays, TRAINING, note)
    copied = 4 * max(case.stays, default=0)
    yield case.item("temporaries", case.device, copied, INITIALIZATION, "a copy of one sub-group")


def _optimizer_in_files(
    case: Costing, zero: ZeroSection, section: OffloadSection | None
) -> Iterator[MemoryItem]:
    part, files = case.owned, SwapCounter(resolved=case.resolved, model=case.model)
    for component, one in (
        ("master weights", files.masters),
        ("optimizer states", files.states),
        ("gradients", files.gradients),
    ):
        yield case.item(component, "nvme", one.nbytes, note="fp32")
        yield case.item(component, "host", one.stays, note="fp32, too small to swap")
    count = int(section.buffer_count or 0) if section is not None else 0
    group = _largest_group(case)
    yield case.locked(
        "swap buffers",
        4 * group * count,
        f"{count} buffers of {group:,} elements, the size of the largest sub-group",
    )
    bucket = max(int(zero.reduce_bucket_size or 0), case.largest) / case.ranks
    note = "a bucket's gradients in fp32, before they are written"
    yield case.item("temporaries", case.device, 4 * min(bucket, part), BACKWARD, note)
    note = "states of the largest sub-group, which the first step creates"
    yield case.item("temporaries", "host", 4 * case.states * group, STEP, note)


# -- Memory of the host engine: some or all units on the device, everything in host memory.
#
# From the code of ``zerotune.backend.host``, and counted in its passes on the CPU.


GRADIENTS_UNDER_WAY: Final = 2
"""Number of units whose gradients are copied to the host while another unit is in its backward
pass."""


WEIGHTS_AT_A_TIME: Final = 2
"""Number of weights that are on the device at a time for their update there."""
_UPDATED: Final = 18
"""Bytes per element, beside states, of a weight's update on the device: its master weight and
gradient in fp32, its bf16 gradient, and what the optimizer computes."""


def gradients_stay(resolved: Resolved) -> bool:
    """Return whether gradients of streamed weights stay on the device, where these are updated.

    Args:
        resolved: The plan.
    """
    at_once = not resolved.gradient_clipping and resolved.gradient_accumulation_steps == 1
    alone = resolved.world_size == 1 and resolved.streaming is not None
    return resolved.update is not None and at_once and alone


def gradient_buffers(resolved: Resolved, sizes: Collection[int]) -> tuple[int, str]:
    """Return the number of gradient buffers that streamed units share in host memory.

    Args:
        resolved: The plan.
        sizes: Number of gradient elements in each streamed unit.

    Returns:
        The number of buffers (0 if every unit has its own), and the reason for that number.
    """
    count = (resolved.streaming or Streaming()).gradient_buffers
    obstacles = {
        "updates start only when the norm of all gradients is known": resolved.gradient_clipping
        > 0,
        "an overflow in fp16 must leave all weights as they are": resolved.precision == "fp16",
        "host memory accumulates the gradients of "
        "all micro batches": resolved.gradient_accumulation_steps > 1,
        f"{count} buffers of the largest unit's size would not save memory": (
            count * max(sizes, default=0) >= sum(sizes)
        ),
    }
    stay = next((reason for reason, holds in obstacles.items() if holds), None)
    if stay is not None:
        return 0, stay
    return count, "each unit is updated in the backward pass, and then frees its buffer"


_LEAST_BUFFERS: Final = 3
"""Minimum number of gradient buffers; with fewer, gradients must wait for optimizer passes."""
BUFFERS_IN_BACKWARD: Final = 2
"""Number of gradient buffers in use during the backward pass: one receives gradients while a unit
is updated from the other."""
_LEFT: Final = 4
"""At most one in this many units is updated in the next forward pass, which takes at least that
share of the time of both passes."""


def with_gradients_kept(estimate: Estimate, usable: int) -> Resolved:
    """Return a streaming plan with as many gradient buffers as fit in host memory and save time.

    Args:
        estimate: Estimate of the streaming plan.
        usable: Bytes of host memory that each rank may use.
    """
    resolved = estimate.resolved
    if resolved.model is None or resolved.streaming is None:
        return resolved
    case = Costing(resolved=resolved, model=resolved.model, workload=estimate.workload)
    units = case.streamed.trained
    buffers, _ = gradient_buffers(resolved, units)
    if not buffers:
        return resolved
    room = (usable - estimate.host) // math.ceil(case.unit_element * max(units) / case.ranks)
    useful = BUFFERS_IN_BACKWARD + math.ceil(len(units) / _LEFT)
    kept = min(max(buffers + room, _LEAST_BUFFERS), max(useful, _LEAST_BUFFERS))
    decision = Decision(
        "streamed.gradient_buffers",
        buffers,
        kept,
        f"as many as fit in the {format_size(usable)} of host memory per rank; more than "
        f"{useful} buffers have no benefit for {len(units)} units",
    )
    return attrs.evolve(
        resolved,
        streamed=attrs.evolve(resolved.streaming, gradient_buffers=kept),
        decisions=(*resolved.decisions, decision),
    )


def hosted(case: Costing) -> Iterator[MemoryItem]:
    """Yield the memory used by the host engine; master weights and states are on the host."""
    if case.streaming is None:
        yield from _resident(case)
        return
    units, element, precision = case.streamed, case.unit_element, case.resolved.precision
    resident = units.resident_trained + units.resident_frozen
    yield case.item(
        "weights", case.device, element * resident, note=f"{precision}, outside of units"
    )
    capacity = case.streamed_capacity
    note = f"room for {capacity / (element * units.total or 1):.0%} of {len(units.units)} units"
    yield case.item("streamed weights", case.device, capacity, TRAINING, note)
    coming = (1 + GRADIENTS_UNDER_WAY) * max(units.trained, default=0) + units.resident_trained
    yield from _coming(case, coming)
    yield from _on_host(case, [*units.units, units.resident_trained])


def _resident(case: Costing) -> Iterator[MemoryItem]:
    element = case.unit_element
    nbytes, note = case.model.weight_bytes(element), _kept_in(case, case.unit_precision)
    if not case.resolved.uses_deepspeed:
        yield from _cast_copies(case)
    if case.in_place:
        nbytes -= element * case.trained
    yield case.item("weights", case.device, nbytes, note=note)
    count = resident_units(case.streamed.resident_trained)
    each = case.streamed.resident_trained / count
    # A unit ends with the parameter that completes its size.
    yield from _coming(case, (1 + GRADIENTS_UNDER_WAY) * (each + case.largest))
    yield from _on_host(case, [each] * count)


def _coming(case: Costing, elements: float) -> Iterator[MemoryItem]:
    """Yield the device memory of gradients that are copied to the host."""
    element = case.unit_element
    nbytes = element * min(elements, case.streamed.trained_total)
    stay = gradients_stay(case.resolved)
    note = "unit gradients before " + ("their update" if stay else "the copy to the host")
    yield case.item("gradients", case.device, nbytes, BACKWARD, note)
    if case.resolved.update is not None:
        own = WEIGHTS_AT_A_TIME * (_UPDATED + 4 * case.states) * case.largest
        # Clipped units are updated in the forward pass, when no gradient is on the device.
        more = own if stay else max(0, own - nbytes)
        note = f"of the update of {WEIGHTS_AT_A_TIME} weights, with their states"
        yield case.item("temporaries", case.device, more, BACKWARD | STEP, note)
    if (case.resolved.gradient_accumulation_steps or 1) > 1:
        note = "the largest gradient, and the sum that it is added to"
        yield case.item("temporaries", case.device, 2 * element * case.largest, BACKWARD, note)


def with_units_kept(estimate: Estimate, usable: int) -> Resolved:
    """Return a streaming plan with as many units on the device as fit.

    Args:
        estimate: Estimate of the streaming plan.
        usable: Bytes of device memory that may be used.
    """
    resolved = estimate.resolved
    if resolved.model is None or resolved.streaming is None:
        return resolved
    case = Costing(resolved=resolved, model=resolved.model, workload=estimate.workload)
    others = estimate.device - case.streamed_capacity
    total = case.unit_element * case.streamed.total
    memory = max(0, min(usable - others, total))
    decision = Decision(
        "streamed.memory",
        resolved.streaming.memory,
        memory,
        f"other components need {format_size(others)} of the {format_size(usable)} of "
        f"usable device memory; all units together need {format_size(total)}",
    )
    return attrs.evolve(
        resolved,
        streamed=attrs.evolve(resolved.streaming, memory=memory),
        decisions=(*resolved.decisions, decision),
    )


def _gradients_at_a_time(case: Costing, blocks: list[float]) -> tuple[list[float], str]:
    """Return the elements of each block of gradients in host memory, and a note."""
    units, note = case.streamed, _share_of(case, case.unit_precision)
    if gradients_stay(case.resolved):
        return [], note
    if case.streaming is None:
        return blocks, note
    buffers, _ = gradient_buffers(case.resolved, units.trained)
    if not buffers:
        return [*units.trained, units.resident_trained], note
    note += f", in {buffers} buffers that units share"
    return [*([max(units.trained)] * buffers), units.resident_trained], note


def _on_host(case: Costing, blocks: list[float]) -> Iterator[MemoryItem]:
    zero, units, element = case.resolved.plan.zero_optimization, case.streamed, case.unit_element
    pin = zero is not None and pins(zero.offload_optimizer) and not case.on_cpu
    count = units.trained_total / case.ranks

    def locked(component: str, sizes: Iterable[float], note: str) -> MemoryItem:
        wanted = [element * size / case.ranks for size in sizes]
        if not pin:
            return case.item(component, "host", sum(wanted), note=note)
        if case.ranks > 1:
            return case.locked(component, sum(wanted), note)
        return case.pinned(component, wanted, note=note)

    if case.ranks > 1:
        note = "the largest unit's gradients, summed over ranks"
        yield case.item(
            "staging", "host", element * max(units.trained, default=max(blocks)), note=note
        )
    yield locked("weights", blocks, _share_of(case, case.unit_precision))
    yield locked("gradients", *_gradients_at_a_time(case, blocks))
    master = case.master_bytes
    note = "their low halves" if master == 2 else "fp32"
    if element < 4 and master:
        # Otherwise, the weights are the master weights.
        yield case.item("master weights", "host", master * count, note=_share_of(case, note))
    nbytes = 4 * case.states * count
    yield case.item("optimizer states", "host", nbytes, TRAINING, _share_of(case, ""))


# -- Estimates from a resolved plan and a workload.


CONTEXT: Final = GIB // 2
"""Bytes of device memory that a CUDA context, cuBLAS and cuDNN use."""
RUNTIME: Final = GIB
"""Bytes of host RAM that Python, torch and DeepSpeed use; measured on the CPU."""


def estimate_plan(
    plan: Settings,
    model: ModelFacts | str | Any,
    context: Context,
    *,
    batch: int | None,
    resolution: int | tuple[int, int] | None,
    frames: int | None,
    ema: EMAPlace,
    gradient_checkpointing: bool,
    activation_offload: bool,
    frozen_bytes: int,
    model_in_memory: bool,
    lora: int | None,
    base_dtype: str | None,
    streamed: bool | Streaming | None,
    engine: EngineName | None,
    update: DeviceUpdate | None,
) -> Estimate:
    """Estimate the memory of a plan, as ``DeepSpeedPlan.estimate`` does."""
    facts = as_facts(model, lora=lora, base_dtype=base_dtype)
    if batch is not None:
        micro = count(batch, "batch")
        plan = attrs.evolve(plan, train_micro_batch_size_per_gpu=micro, train_batch_size=None)
    context = attrs.evolve(context, model=facts)
    resolved = resolve(plan, context, streamed=streamed, engine=engine, update=update)
    return estimate_resolved(
        resolved,
        Workload(
            batch=resolved.micro_batch_size,
            **sample_size(model, facts, resolution=resolution, frames=frames),
            gradient_checkpointing=gradient_checkpointing,
            activation_offload=activation_offload,
            ema=ema,
            frozen_bytes=count(frozen_bytes, "frozen_bytes", least=0) + frozen_beside(model),
            model_in_memory=model_in_memory,
        ),
    )


def estimate_resolved(resolved: Resolved, workload: Workload) -> Estimate:
    """Estimate the memory of a resolved plan by component.

    Args:
        resolved: Plan that was resolved with its model.
        workload: Batch size, resolution, and options that affect memory, such as EMA.
    """
    model = resolved.model
    if model is None:
        raise UnresolvedPlanError(
            "the estimate needs the shapes of the model's parameters",
            "pass model=ModelFacts.from_module(model) to resolve",
            "model",
        )
    case = Costing(resolved=resolved, model=model, workload=workload)
    items = [item for item in _items(case) if item.nbytes > 0]
    items.extend(item for item in _as_loaded(case, items) if item.nbytes > 0)
    return (resolved.estimated_as or Estimate)(
        resolved=resolved, workload=workload, items=tuple(items), notes=tuple(_notes(case))
    )


class SampleSize(TypedDict):
    """Size of an image or a clip."""

    height: int | None
    width: int | None
    frames: int | None


def sample_size(
    model: Any, facts: ModelFacts, *, resolution: int | tuple[int, int] | None, frames: int | None
) -> SampleSize:
    """Return the size of a sample as fields of ``Workload``.

    Args:
        model: A model, a family or a family's name; a family provides the default size.
        facts: Facts of the model.
        resolution: Side length in pixels, or height and width.
        frames: Number of frames of a clip.
    """
    if isinstance(model, str | ModelFamily):
        known = model_family(model) if isinstance(model, str) else model
        resolution = known.resolution if resolution is None else resolution
        frames = known.frames if frames is None else frames
    height, width = sides(resolution)
    if frames is not None:
        count(frames, "frames")
        if facts.frames_per_latent is None:
            raise InvalidValueError(
                f"is set, but {facts.name} is trained on images, which have no frames",
                "omit it, or choose a video model",
                "frames",
                frames,
            )
    return {"height": height, "width": width, "frames": frames}


def sides(resolution: int | tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Return a resolution's height and width in pixels."""
    if resolution is None:
        return None, None
    pair: Any = (resolution, resolution) if isinstance(resolution, int) else resolution
    shaped = isinstance(pair, tuple | list) and len(pair) == 2
    if not shaped or not all(is_integer(side) and side >= 8 for side in pair):
        raise InvalidValueError(
            "is not a valid image size",
            "write the side in pixels, such as 1024, or (height, width)",
            "resolution",
            resolution,
        )
    return int(pair[0]), int(pair[1])


def count(value: Any, key: str, *, least: int = 1) -> int:
    """Return ``value`` if it is an integer of at least ``least``; otherwise raise an error."""
    if not is_integer(value) or value < least:
        raise InvalidValueError("must be a whole number", f"write at least {least}", key, value)
    return int(value)


_BEFORE_THE_MODEL: Final = ("runtime", "frozen parts")


def _items(case: Costing) -> Iterator[MemoryItem]:
    yield from _engine_items(case)
    note = "buffers, such as tables of positions"
    yield case.item("weights", case.device, case.model.buffers, note=note)
    # Quantized weights are dequantized one at a time.
    nbytes = case.element * case.model.largest_quantized
    note = "the largest quantized weight, dequantized"
    yield case.item("temporaries", case.device, nbytes, BACKWARD, note)
    yield from _activation_items(case)
    yield from _around_the_engine(case)
    yield case.item("runtime", "host", RUNTIME, note="Python, torch and DeepSpeed")
    if case.resolved.platform.accelerator in DISCRETE:
        yield case.item("context", "device", CONTEXT, note="driver and libraries")


def _engine_items(case: Costing) -> Iterator[MemoryItem]:
    plan = case.resolved.plan
    zero = plan.zero_optimization
    if case.hosted:
        yield from hosted(case)
    elif not case.resolved.uses_deepspeed or zero is None:
        yield from plain(case)
    elif zero.stage == 0:
        yield from stage_0(case)
    elif zero.stage == 3:
        yield from stage_3(case, zero)
    else:
        yield from stages_1_and_2(case, zero)


def _as_loaded(case: Costing, items: Iterable[MemoryItem]) -> Iterator[MemoryItem]:
    """Yield host memory for loading the model, beyond that of later phases.

    Weights in files are read one at a time to their final place; at stage 3 each rank reads only
    its part.
    """
    later = sum(
        item.nbytes
        for item in items
        if item.place == "host"
        and "initialization" in item.phases
        and item.component not in _BEFORE_THE_MODEL
    )
    if case.workload.model_in_memory:
        excess = case.model.weight_bytes(4) + case.model.buffers - later
        note = f"{_kept_in(case, 'fp32')}, whole"
        yield case.item("model as loaded", "host", max(0, excess), INITIALIZATION, note)


def _activation_items(case: Costing) -> Iterator[MemoryItem]:
    work, known = case.workload, case.model.activations
    if known is None or work.height is None or work.width is None:
        return
    size = {"batch": work.batch, "pixels": case.positions, "element_bytes": case.element}
    if offloads_activations(case) and known.offloaded is not None:
        note = "recomputed blocks, with inputs on the host"
        yield case.item("activations", case.device, known.offloaded.nbytes(**size), BACKWARD, note)
        if known.offloaded_host is not None:
            waiting = known.offloaded_host.nbytes(**size)
            # Blocks are reused, so they stay allocated from the first step on.
            yield case.pinned("activations", [waiting], TRAINING, "inputs of recomputed blocks")
        return
    checkpoints = work.gradient_checkpointing and known.checkpointed is not None
    cost = known.checkpointed if checkpoints else known.full
    if cost is not None:
        note = "blocks recomputed" if checkpoints else "all kept"
        yield case.item("activations", case.device, cost.nbytes(**size), BACKWARD, note)


def offloads_activations(case: Costing) -> bool:
    """Whether the inputs of recomputed blocks are offloaded to host memory."""
    work, known = case.workload, case.model.activations
    asked = work.activation_offload and work.gradient_checkpointing and not case.on_cpu
    return asked and known is not None and known.offloaded is not None


def _around_the_engine(case: Costing) -> Iterator[MemoryItem]:
    work = case.workload
    yield case.item("frozen parts", case.device, work.frozen_bytes, note="VAE, text encoders")
    if not case.on_cpu:
        note = "during loading, in full on every rank"
        yield case.item("frozen parts", "host", work.frozen_bytes, INITIALIZATION, note)
    if work.ema != "none":
        place = case.device if work.ema == "device" else work.ema
        yield case.item("EMA", place, 4 * case.owned, TRAINING, "fp32, this rank's part")
        if place == "nvme":
            nbytes = min(EMA_CHUNK * EMA_CHUNKS, 4 * case.owned)
            yield case.item("EMA", "host", nbytes, TRAINING, "chunks read, updated or written")
    yield case.item(
        "checkpoint", "host", 4 * case.largest, CHECKPOINT, "the largest fragment during writing"
    )


def _notes(case: Costing) -> Iterator[str]:
    work = case.workload
    if case.streaming is not None and not case.streamed.units:
        yield "streamed units are unknown: the model's class does not define them"
    if case.resolved.waits_for_proof:
        yield (
            "for the host engine, which runs once `zerotune doctor --prove` has passed on the "
            'device; until then, DeepSpeed runs, and resolve(engine="deepspeed") estimates it'
        )
    if work.height is None:
        yield "activations are not included: no resolution was given"
    elif case.model.activations is None:
        yield "activations are not included: they are unknown for this model (see model_facts)"
    elif case.model.frames_per_latent is not None and work.frames is None:
        yield "activations are for one frame: no frame count was given for this video model"
    elif work.gradient_checkpointing and case.model.activations.checkpointed is None:
        yield "this model has no gradient checkpointing, so all activations are kept"
    elif work.activation_offload and not offloads_activations(case):
        yield "activations are not offloaded: the model or the device does not support offload"
