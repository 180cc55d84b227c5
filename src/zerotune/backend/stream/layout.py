"""``StreamLayout``: the master weights of streamed units, one slab for each unit and group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from typing_extensions import override

from zerotune.backend.layouts import ResidentLayout
from zerotune.backend.master_weights import Follower, FragmentAddress, Slab
from zerotune.backend.stream.steps import StreamedSteps
from zerotune.backend.stream.units import Member, Unit


class StreamLayout(ResidentLayout):
    """fp32 slabs in host memory, beside the weights that the model computes with.

    Args:
        units: Those that are trained.
        optimizer: What steps the slabs.
        steps: What takes the steps.
    """

    def __init__(
        self, *, units: Sequence[Unit], optimizer: torch.optim.Optimizer, steps: StreamedSteps
    ) -> None:
        self._units, self._steps = units, steps
        slabs = [slab for unit in units for slab in unit.slabs]
        addresses = tuple(
            FragmentAddress(
                name=part.member.name,
                shape=tuple(part.member.parameter.shape),
                start=part.span.start,
                numel=part.span.stop - part.span.start,
                slab=index,
                offset=part.offset,
            )
            for index, slab in enumerate(slabs)
            for part in slab.parts
        )
        self._places: dict[str, tuple[Unit, Member]] = {
            member.name: (unit, member) for unit in units for member in unit.members
        }
        super().__init__(
            optimizer=optimizer,
            slabs=[slab.master for slab in slabs],
            addresses=addresses,
            order=tuple(
                (member.name, tuple(member.parameter.shape))
                for slab in slabs
                for member in slab.members
            ),
        )

    @override
    def settle(self) -> None:
        self._steps.settle()

    @override
    def reading(self, slab: int) -> AbstractContextManager[Slab]:
        self._steps.check_whole()
        return super().reading(slab)

    @override
    def writing(self, slab: int) -> AbstractContextManager[Slab]:
        # What lies there may be of no step: a checkpoint is loaded over it.
        return super().reading(slab)

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
        return unit.host[member.span][address.start : address.stop]

    @override
    def refresh(self) -> None:
        for unit in self._units:
            for slab in unit.slabs:
                unit.host[slab.span].copy_(slab.master.data)
        self._steps.refresh()
