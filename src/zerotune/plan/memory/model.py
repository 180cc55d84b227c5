"""What one training step works on, as far as memory is concerned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import attrs
from typing_extensions import override

from zerotune._util.table import Page, Readable
from zerotune.plan.model import ResolvedPlan

if TYPE_CHECKING:
    from zerotune.plan.memory.rates import Rates
    from zerotune.plan.memory.time import StepTime
    from zerotune.plan.memory.traffic import SwapTraffic

EMAPlace = Literal["none", "host", "device", "nvme"]


@attrs.frozen(kw_only=True)
class Workload:
    """Batch, resolution and what runs beside the optimizer."""

    batch: int = 1
    """Samples per forward pass and rank."""
    height: int | None = None
    """Pixels; ``None``: the activations are not estimated."""
    width: int | None = None
    """Pixels."""
    frames: int | None = None
    """Of a clip; ``None``: an image."""
    gradient_checkpointing: bool = True
    """Whether blocks are recomputed in the backward pass."""
    activation_offload: bool = False
    """Whether the inputs of recomputed blocks wait in host memory, as ``ActivationOffload`` does
    it; without gradient checkpointing it has no effect."""
    ema: EMAPlace = "none"
    """Where an ``EMAShadow`` keeps its fp32 copy."""
    frozen_bytes: int = 0
    """Bytes of frozen parts (VAE, text encoders) that stay on the device. Every rank loads them
    whole, into host memory first."""
    model_in_memory: bool = False
    """Whether each rank has the whole model in its memory, in fp32, before the engine takes it, as
    one that is made there; else its weights wait in their files, as
    ``load_pretrained(folder, plan=plan)`` leaves them."""
    ranks_per_machine: int | None = None
    """Processes that share the host RAM; ``None``: all of them."""
    exact_pinning: bool | None = None
    """Whether page-locked blocks keep their size, as with ``DS_PIN_MEMORY_BACKEND=native`` or
    torch's ``pinned_max_round_threshold_mb``; else each is rounded up to a power of two.
    ``None``: as the platform's torch can, since the backend asks it to."""


# -- What a plan costs, as values: parts of memory, where they lie and when they are held.


Place = Literal["device", "host", "nvme"]
"""Where bytes lie: on the accelerator, in host RAM, in files."""
PLACES: Final[tuple[Place, ...]] = get_args(Place)

Phase = Literal["initialization", "forward and backward", "optimizer step", "checkpoint"]
"""When bytes are held."""
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
    """When it is held."""
    pinned: bool = False
    """Whether it is page-locked host memory."""
    note: str = ""
    """Precision, and how it is split or rounded, in words."""


@attrs.frozen(kw_only=True)
class MemoryPeak:
    """The moment at which one place holds most."""

    place: Place
    phase: Phase
    """The phase that needs most; the first of them when several do."""
    nbytes: int
    """Bytes per rank."""
    items: tuple[MemoryItem, ...]
    """What is held at that moment, largest first."""


@attrs.frozen(kw_only=True, repr=False)
class MemoryEstimate(Readable):
    """What a resolved plan needs, per rank, by component. Made by ``DeepSpeedPlan.estimate``."""

    resolved: ResolvedPlan
    """The plan that was costed."""
    workload: Workload
    """What it was costed for."""
    items: tuple[MemoryItem, ...]
    notes: tuple[str, ...] = ()
    """What is not in the numbers, and why."""

    def at(self, place: Place, phase: Phase) -> tuple[MemoryItem, ...]:
        """What ``place`` holds during ``phase``, largest first."""
        held = [item for item in self.items if item.place == place and phase in item.phases]
        return tuple(sorted(held, key=lambda item: -item.nbytes))

    def peak(self, place: Place) -> MemoryPeak:
        """The moment at which ``place`` holds most."""
        phase = max(PHASES, key=lambda one: _total(self.at(place, one)))
        items = self.at(place, phase)
        return MemoryPeak(place=place, phase=phase, nbytes=_total(items), items=items)

    @property
    def device(self) -> int:
        """Peak bytes of accelerator memory per rank."""
        return self.peak("device").nbytes

    @property
    def host(self) -> int:
        """Peak bytes of host RAM per rank, pinned memory included."""
        return self.peak("host").nbytes

    @property
    def nvme(self) -> int:
        """Peak bytes of swap files per rank."""
        return self.peak("nvme").nbytes

    @property
    def pinned(self) -> int:
        """Most bytes of page-locked host RAM held at a time, per rank."""
        return max(
            _total(item for item in self.at("host", phase) if item.pinned) for phase in PHASES
        )

    @property
    def swap_traffic(self) -> SwapTraffic:
        """What one optimizer step of one rank reads from and writes to swap files."""
        from zerotune.plan.memory import traffic

        return traffic.swap_traffic(self)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain data that JSON can hold; every number in bytes per rank."""
        from zerotune.plan import text

        return text.estimate_data(self)

    @override
    def brief(self) -> str:
        """The peak of each place, in one line."""
        from zerotune.plan import text

        return text.describe_estimate(self)

    @override
    def page(self) -> Page:
        """One bar per place, then its components, as a report."""
        from zerotune.plan import text

        return text.estimate_page(self)

    def explain(self) -> str:
        """The estimate as text: one bar per place, then its components."""
        from zerotune.plan import text

        return text.estimate_page(self).text(text.WIDTH)

    def step_time(self, rates: Rates | None = None) -> StepTime | None:
        """What an optimizer step is predicted to take.

        Args:
            rates: How fast the machine is; as measured by ``zerotune doctor --rates``, or
                catalogued.

        Returns:
            ``None`` where the arithmetic of the model or the size of images is not known.
        """
        from zerotune.plan.memory.rates import known_rates
        from zerotune.plan.memory.time import step_time

        return step_time(self, rates or known_rates(self.resolved.platform))


def _total(items: Iterable[MemoryItem]) -> int:
    return sum(item.nbytes for item in items)
