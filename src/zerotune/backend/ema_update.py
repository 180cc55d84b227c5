"""``EMAUpdate``: an EMA as an optimizer step updates it, wherever its tensors lie."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import attrs
import torch
from typing_extensions import override

if TYPE_CHECKING:
    from zerotune.backend.fragments import Fragment


class EMATensors(Mapping[str, torch.Tensor]):
    """One rank's EMA: a tensor per fragment (fp32, 1-D), by ``FragmentAddress.key``.

    An EMA on disk is opened range by range. Reading an item copies the whole fragment to memory.
    """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device on which ranges are opened."""

    @abstractmethod
    def edges(self, key: str) -> Sequence[int]:
        """Return the edges of a fragment's ranges, from 0 to the number of elements.

        Args:
            key: Key of the fragment.
        """

    @abstractmethod
    def open(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return elements of a fragment for reading and writing, until the next call.

        Args:
            key: Key of the fragment.
            start: First element.
            stop: Index one past the last element; no edge lies between the two.
        """

    def ranges(self, key: str) -> Iterator[tuple[slice, torch.Tensor]]:
        """Open all ranges of a fragment, one after the other.

        Args:
            key: Key of the fragment.

        Yields:
            Range of elements in the fragment, and the elements.
        """
        for start, stop in pairwise(self.edges(key)):
            yield slice(start, stop), self.open(key, start, stop)


class EMAInMemory(dict[str, torch.Tensor], EMATensors):
    """An EMA in host memory or on a device; every fragment is one range."""

    @property
    @override
    def device(self) -> torch.device:
        return next((tensor.device for tensor in self.values()), torch.device("cpu"))

    @override
    def edges(self, key: str) -> Sequence[int]:
        return 0, self[key].numel()

    @override
    def open(self, key: str, start: int, stop: int) -> torch.Tensor:
        return self[key][start:stop]


@attrs.define(kw_only=True, eq=False)
class EMAUpdate:
    """One update of an EMA: ``ema.lerp_(weights, weight)``."""

    tensors: EMATensors
    """The EMA."""
    weight: float
    """Weight of the master weights; 1 minus the decay."""

    @property
    def joins_steps(self) -> bool:
        """Whether an optimizer step in host memory can run the update."""
        return self.tensors.device.type == "cpu"

    def apply(self, fragments: Sequence[Fragment]) -> None:
        """Update the parts of the EMA that belong to fragments of the weights.

        Args:
            fragments: The fragments, on one device.
        """
        tensors = self.tensors
        if isinstance(tensors, EMAInMemory) and fragments[0].value.device == tensors.device:
            emas = [tensors[each.address.key] for each in fragments]
            self.update(emas, [each.value for each in fragments])
            return
        for fragment in fragments:
            for part, ema in tensors.ranges(fragment.address.key):
                # Weights on the device are copied one by one to an EMA in host memory, and each
                # copy makes the host wait. Such an EMA is limited by the copies' bytes, not by
                # their number; if the device has room for 4 bytes per weight, a DeviceStore avoids
                # both.
                self.update([ema], [fragment.value[part].to(ema.device)])

    def update(self, emas: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        """Update elements of the EMA.

        Args:
            emas: Elements of the EMA, 1-D tensors.
            weights: The same elements of the weights, on the same device.
        """
        torch._foreach_lerp_(emas, weights, self.weight)


class EMA(Protocol):
    """A named EMA of the weights."""

    name: str

    @property
    def swapped(self) -> bool:
        """Whether the model currently uses the EMA weights."""
        ...

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the full EMA tensor of every trained parameter. Collective."""
        ...
