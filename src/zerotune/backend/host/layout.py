"""The master weights of streamed units: one slab per unit and parameter group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from typing_extensions import override

from zerotune.backend.ema_update import EMAUpdate
from zerotune.backend.fragments import FragmentAddress, OptimizerStates, Slab
from zerotune.backend.host.steps import StreamedSteps
from zerotune.backend.host.units import Member, Unit
from zerotune.backend.host.updates import AdamOnHost
from zerotune.backend.master_weights import MasterLayout
from zerotune.backend.optimizers.classes import AdamW8BitStates
from zerotune.backend.step.adams import Host8BitAdam
from zerotune.backend.step.kernel import load_host_step
from zerotune.backend.step_state import StepState


class HostLayout(MasterLayout):
    """Layout of the host-memory master weights of a model whose weights are streamed.

    Args:
        units: The trained units.
        optimizer: Optimizer that updates the slabs.
        steps: Object that runs the updates.
        state: The engine's state between steps.
    """

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        optimizer: torch.optim.Optimizer,
        steps: StreamedSteps,
        state: StepState,
    ) -> None:
        self._units, self._steps, self._optimizer = units, steps, optimizer
        self._state = state
        coded = isinstance(optimizer, AdamW8BitStates)
        self._coder = Host8BitAdam(op=load_host_step(), adam=optimizer) if coded else None
        self._is_pass = isinstance(steps.update, AdamOnHost)
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
        self._versions = self._current_versions()
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
    def tensors(self) -> Sequence[torch.Tensor]:
        return [slab.key for slab in self._slabs]

    @override
    def masters_of(self, address: FragmentAddress, part: slice) -> torch.Tensor:
        first, stop, _ = part.indices(address.numel)
        masters = self._slabs[address.slab].masters
        return masters.read(slice(address.offset + first, address.offset + stop))

    @override
    def rounded(self, address: FragmentAddress, values: torch.Tensor) -> torch.Tensor:
        return self._slabs[address.slab].masters.rounded(values)

    @override
    def settle(self) -> None:
        self._steps.settle()

    def _current_versions(self) -> dict[str, int]:
        """Counts of writes by torch to units whose weights are a part of their masters."""
        return {
            unit.members[0].name: unit.host._version
            for unit in self._units
            if all(slab.masters.holds_weights for slab in unit.slabs)
        }

    @override
    def written(self) -> str | None:
        now = self._current_versions()
        return next((name for name, before in self._versions.items() if now[name] != before), None)

    @override
    def begin_writing(self) -> None:
        self._steps.begin_writing()

    @override
    @contextmanager
    def reading(self, slab: int) -> Iterator[Slab]:
        self._state.ask("read")
        yield self._opened(slab)

    @override
    @contextmanager
    def writing(self, slab: int) -> Iterator[Slab]:
        # The old weights may be inconsistent: loading a checkpoint overwrites them.
        opened = self._opened(slab)
        try:
            yield opened
        finally:
            self._slabs[slab].masters.write(opened.value)
            opened.states.write_back()

    def _opened(self, slab: int) -> Slab:
        return Slab(value=self._slabs[slab].masters.read(), states=self.states_at_rest(slab))

    @override
    def states_at_rest(self, slab: int) -> OptimizerStates:
        own = self._slabs[slab]
        # Whole parameters have step counters of their own.
        counts = own.counts if self._is_pass else None
        return OptimizerStates(self._optimizer, own.key, coder=self._coder, counts=counts)

    @override
    def update_emas(self, updates: Sequence[EMAUpdate]) -> bool:
        return self._steps.update_emas(updates)

    @property
    @override
    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        # Not kept, because a closed unit gives its memory back.
        for name, (unit, member) in self._places.items():
            yield name, member.parameter if unit.resident else unit.host

    @override
    def have_known_bits(self) -> Iterable[tuple[Collection[str], torch.Tensor]]:
        for unit in self._steps.on_device:
            yield [member.name for member in unit.members], unit.has_known_bits()

    @override
    def in_model(self, address: FragmentAddress) -> torch.Tensor | None:
        unit, member = self._places[address.name]
        if unit.resident and unit.is_current:
            return member.parameter.data.reshape(-1)[address.start : address.stop]
        held = any(slab.masters.holds_weights for slab in unit.slabs)
        return None if held else unit.host[member.span][address.start : address.stop]

    @override
    def refresh(self) -> None:
        for unit in self._units:
            for slab in unit.slabs:
                if not slab.masters.holds_weights:
                    unit.host[slab.span].copy_(slab.masters.read())
        self._steps.refresh()
        self._versions = self._current_versions()
