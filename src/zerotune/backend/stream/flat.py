"""``FlatOrder``: how ZeRO-2 lays trained parameters out, which its roundings depend on.

It joins the parameters of a group, pads them, and gives each rank an equal part. Norms are added up
by part, and the last few elements of a part, which fill no vector, are stepped one by one, where
the compiler of DeepSpeed's Adam chose the roundings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_VECTOR: Final = 16
_ALIGNMENT: Final = 2
"""Elements to a multiple of which DeepSpeed pads a group for each rank."""


class FlatOrder:
    """Where ZeRO-2 would have each parameter.

    Args:
        groups: Names of the parameters, by the optimizer's group and in its order.
        sizes: Elements of each parameter.
        world_size: Number of ranks.
    """

    def __init__(
        self, groups: Sequence[Sequence[str]], *, sizes: Mapping[str, int], world_size: int = 1
    ) -> None:
        self.groups, self.world_size = groups, world_size
        self._places: dict[str, tuple[int, slice]] = {}
        self._parts: list[int] = []
        for group, names in enumerate(groups):
            at = 0
            for name in names:
                self._places[name] = group, slice(at, at + sizes[name])
                at += sizes[name]
            self._parts.append(-(-at // (_ALIGNMENT * world_size)) * _ALIGNMENT)

    def group_of(self, name: str) -> int | None:
        """Index of the optimizer's group; ``None``: frozen."""
        place = self._places.get(name)
        return None if place is None else place[0]

    def place_of(self, name: str, element: int) -> int:
        """Where an element of the flattened parameter is in its group."""
        return int(self._places[name][1].start) + element

    def fragments(self, name: str) -> Iterator[tuple[int, slice]]:
        """Ranks, and which elements of the flattened parameter lie in their parts."""
        group, place = self._places[name]
        size = self._parts[group]
        for rank in range(self.world_size):
            start, stop = max(place.start, rank * size), min(place.stop, (rank + 1) * size)
            if start < stop:
                yield rank, slice(start - place.start, stop - place.start)

    def singles(self, name: str) -> Iterator[slice]:
        """Elements of the flattened parameter that are stepped one by one."""
        group, place = self._places[name]
        size = self._parts[group]
        for rank in range(self.world_size):
            stop = min(place.stop, (rank + 1) * size)
            start = max(place.start, (rank + 1) * size - size % _VECTOR)
            if start < stop:
                yield slice(start - place.start, stop - place.start)
