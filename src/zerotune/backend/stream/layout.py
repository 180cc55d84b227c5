"""``StreamLayout``: the master weights of streamed units, one slab for each unit and group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from typing_extensions import override

from zerotune.backend.master_weights import (
    Follower,
    FragmentAddress,
    MasterLayout,
    OptimizerStates,
    Slab,
)
from zerotune.backend.step.adams import SplitMasters
from zerotune.backend.stream.steps import StreamedSteps
from zerotune.backend.stream.units import Member, Unit


class StreamLayout(MasterLayout):
    """fp32 slabs in host memory, beside the weights that the model computes with.

    Args:
        units: Those that are trained.
        optimizer: What steps the slabs.
        steps: What takes the steps.
    """

    def __init__(
        self, *, units: Sequence[Unit], optimizer: torch.optim.Optimizer, steps: StreamedSteps
    ) -> None:
        self._units, self._steps, self._optimizer = units, steps, optimizer
        self._slabs = [slab for unit in units for slab in unit.slabs]
        addresses = tuple(
            FragmentAddress(
                name=part.member.name,
                shape=tuple(part.member.parameter.shape),
                start=part.span.start,
                numel=part.span.stop - part.span.start,
                slab=index,
                offset=part.offset,
            )
            for index, slab in enumerate(self._slabs)
            for part in slab.parts
        )
        self._places: dict[str, tuple[Unit, Member]] = {
            member.name: (unit, member) for unit in units for member in unit.members
        }
        super().__init__(
            addresses=addresses,
            order=tuple(
                (member.name, tuple(member.parameter.shape))
                for slab in self._slabs
                for member in slab.members
            ),
        )

    @property
    @override
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    @override
    def tensors(self) -> Sequence[torch.Tensor]:
        return [slab.key for slab in self._slabs]

    @override
    def masters_of(self, address: FragmentAddress, part: slice) -> torch.Tensor:
        first, stop, _ = part.indices(address.numel)
        masters = self._slabs[address.slab].masters
        return masters.read(slice(address.offset + first, address.offset + stop))

    @override
    def settle(self) -> None:
        self._steps.settle()

    @override
    @contextmanager
    def reading(self, slab: int) -> Iterator[Slab]:
        self._steps.check_whole()
        yield self._opened(slab)

    @override
    @contextmanager
    def writing(self, slab: int) -> Iterator[Slab]:
        # What lies there may be of no step: a checkpoint is loaded over it.
        opened = self._opened(slab)
        try:
            yield opened
        finally:
            self._slabs[slab].masters.write(opened.value)
            opened.states.write_back()

    def _opened(self, slab: int) -> Slab:
        each = self._slabs[slab]
        return Slab(value=each.masters.read(), states=OptimizerStates(self._optimizer, each.key))

    @override
    def expect(self, followers: Sequence[Follower]) -> None:
        self._steps.expect(followers)

    @override
    def follow(self, followers: Sequence[Follower]) -> bool:
        return self._steps.follow(followers)

    @override
    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:
        unit, member = self._places[address.name]
        if unit.resident and unit.is_current:
            return member.parameter.data.reshape(-1)[address.start : address.stop]
        # Split, it is the upper half of the master weight itself.
        split = any(isinstance(slab.masters, SplitMasters) for slab in unit.slabs)
        return None if split else unit.host[member.span][address.start : address.stop]

    @override
    def refresh(self) -> None:
        for unit in self._units:
            for slab in unit.slabs:
                if not isinstance(slab.masters, SplitMasters):
                    unit.host[slab.span].copy_(slab.masters.read())
        self._steps.refresh()
