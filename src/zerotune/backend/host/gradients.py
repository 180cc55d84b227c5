"""``Gradients``: memory that holds the gradients of units until the units are updated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from queue import SimpleQueue
from typing import ClassVar

import attrs
import torch
from typing_extensions import override

from zerotune.backend.host.units import HostMemory, Unit, UnitSlab


@attrs.frozen(eq=False)
class Place:
    """Host memory for the gradients of one unit in one step."""

    slabs: dict[UnitSlab, torch.Tensor]
    """Flat gradients in the dtype of the weights, with zeros between the parameters."""
    buffer: torch.Tensor | None = None
    """Buffer of a ``GradientPool`` that contains ``slabs``; ``None`` if the unit has its own
    memory."""


class Gradients(ABC):
    """Memory for the gradients of units."""

    on_host: ClassVar[bool] = True
    """Whether gradients are copied to host memory."""

    @abstractmethod
    def take(self, unit: Unit) -> Place:
        """Return host memory for ``unit``'s gradients, waiting until some is free."""

    @abstractmethod
    def give_back(self, place: Place) -> None:
        """Release host memory after the unit's update.

        Args:
            place: Result of ``take``.
        """


class GradientsOfAll(Gradients):
    """Private host memory for the gradients of each unit.

    Args:
        units: The trained units.
        memory: Host memory to allocate from.
    """

    def __init__(self, units: Sequence[Unit], *, memory: HostMemory) -> None:
        self._places = {
            unit: Place({slab: memory.zeros(slab.numel, unit.host.dtype) for slab in unit.slabs})
            for unit in units
        }

    @override
    def take(self, unit: Unit) -> Place:
        return self._places[unit]

    @override
    def give_back(self, place: Place) -> None:
        pass


class GradientPool(Gradients):
    """Pool of buffers that streamed units share when updates begin in the backward pass.

    ``take`` cannot deadlock: it waits only for updates whose gradients already occupy a buffer, and
    no update waits for a later one.

    Args:
        units: The trained units; units that stay on the device have private memory.
        count: Number of buffers, each as large as the largest streamed unit.
        memory: Host memory to allocate from.
    """

    def __init__(self, units: Sequence[Unit], *, count: int, memory: HostMemory) -> None:
        self._own = GradientsOfAll([unit for unit in units if unit.resident], memory=memory)
        largest = max(sum(map(_bytes_of, unit.slabs)) for unit in units if not unit.resident)
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(count):
            self._free.put(memory.zeros(largest, torch.uint8))

    @override
    def take(self, unit: Unit) -> Place:
        if unit.resident:
            return self._own.take(unit)
        buffer, at, slabs = self._free.get(), 0, {}
        for slab in unit.slabs:
            slabs[slab] = buffer[at : at + _bytes_of(slab)].view(slab.dtype)
            at += _bytes_of(slab)
            for gap in slab.gaps():
                # The buffer contains a previous unit's gradients; 8-bit moments would derive scales
                # from them.
                slabs[slab][gap].zero_()
        return Place(slabs, buffer)

    @override
    def give_back(self, place: Place) -> None:
        if place.buffer is not None:
            self._free.put(place.buffer)


class GradientsOnDevice(Gradients):
    """Gradients that stay on the device, where units are updated in the backward pass.

    ``take`` waits until fewer than ``count`` units have gradients, as in ``GradientPool``.

    Args:
        count: Number of units whose gradients may be on the device.
    """

    on_host = False

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    @override
    def take(self, unit: Unit) -> Place:
        self._free.get()
        return Place({})

    @override
    def give_back(self, place: Place) -> None:
        place.slabs.clear()
        self._free.put(None)


def _bytes_of(slab: UnitSlab) -> int:
    return slab.numel * slab.dtype.itemsize
