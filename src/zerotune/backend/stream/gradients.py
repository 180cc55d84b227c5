"""``Gradients``: where in host memory the gradients of units lie until their passes are taken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

import attrs
import torch
from typing_extensions import override

from zerotune.backend.stream.units import HostMemory, Unit, UnitSlab


@attrs.frozen(eq=False)
class Place:
    """Host memory for the gradients of one unit in one step."""

    slabs: Mapping[UnitSlab, torch.Tensor]
    """Flat, in the dtype of the weights; what lies between the parameters is zero."""
    buffer: torch.Tensor | None = None
    """What they are parts of, where other units have it before and after."""


class Gradients(ABC):
    """Host memory for the gradients of units."""

    @abstractmethod
    def take(self, unit: Unit) -> Place:
        """A place for a unit's gradients; waits until there is one."""

    @abstractmethod
    def give_back(self, place: Place) -> None:
        """Let others have it: the pass that read it is over."""


class GradientsOfAll(Gradients):
    """Each unit has a place of its own, where its gradients may stay as long as they like.

    Args:
        units: Those that are trained.
        memory: Where the places are.
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
    """A few buffers that streamed units have in turn, for passes that begin in the backward pass.

    Who takes one waits for passes of units whose gradients came before, and these wait for nothing
    that comes after: so nobody waits for ever, whichever of them is taken first.

    Args:
        units: Those that are trained; what stays on the device has a place of its own.
        count: Buffers, each as large as the largest streamed unit.
        memory: Where the buffers are.
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
                # Another unit's gradients are there, from which moments of 8 bits would take
                # their scales.
                slabs[slab][gap].zero_()
        return Place(slabs, buffer)

    @override
    def give_back(self, place: Place) -> None:
        if place.buffer is not None:
            self._free.put(place.buffer)


def _bytes_of(slab: UnitSlab) -> int:
    return slab.numel * slab.dtype.itemsize
