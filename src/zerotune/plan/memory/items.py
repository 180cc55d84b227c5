"""A memory estimate as a value: components, their places, and the phases in which they exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, get_args

import attrs

from zerotune._util.table import Readable
from zerotune.plan.resolved import Resolved

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


DURING: Final[Mapping[Phase, str]] = {
    "initialization": "during set-up",
    "forward and backward": "in the forward and backward pass",
    "optimizer step": "in the optimizer step",
    "checkpoint": "while a checkpoint is written",
}
"""For each phase, a phrase that can end a sentence."""


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
